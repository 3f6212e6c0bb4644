"""A real server that speaks S3, with a bucket, for tests of lakes that are no directory."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo.versitygw import PROGRAM, Gateway
from tests.support.replicated import wait_until

BUCKET = "lakes"
REQUIRED = "PGREPL_REQUIRE_DEBIAN"
BUILDING = "PGREPL_BUILDING"
"""Names the file that `make test-rest` makes when it has built its servers, while the tests run."""
_WHY = "needs versitygw: sh setup/versitygw.sh"


def await_built() -> None:
    """Wait until `make test-rest` has built the servers that it builds."""
    if built := os.environ.get(BUILDING):
        wait_until(Path(built).exists, 800, "the servers of make stores")


@contextmanager
def running_gateway() -> Iterator[Gateway]:
    """Yield a server with the bucket. Skips the test where the server is not built, unless it is required."""
    await_built()
    if not PROGRAM.exists():
        assert not os.environ.get(REQUIRED), _WHY
        pytest.skip(_WHY)
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-s3-") as folder:
        gateway = Gateway(Path(folder))
        gateway.start()
        gateway.make_bucket(BUCKET)
        try:
            yield gateway
        finally:
            gateway.stop()


def new_lake() -> str:
    """Return the URI of a new lake, to which nothing has been written."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}/lake"
