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

BUCKET = "lakes"
REQUIRED = "PGREPL_REQUIRE_DEBIAN"
_WHY = "needs versitygw: sh setup/versitygw.sh"


@contextmanager
def running_gateway() -> Iterator[Gateway]:
    """Yield a server with the bucket. Skips the test where the server is not built, unless it is required."""
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
