"""Faults of the network between apps and source, state or store; `verify` then finds lake and source equal.

The stream meets each fault on each connection, snapshots meet each fault and each connection.
"""

from __future__ import annotations

import itertools
import random
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from airflow_provider_pgrepl.replication.app.process import RETRY_MAY_HELP, STATE_DSN_VARIABLE
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from demo.postgres import Server
from demo.versitygw import Gateway, environment_of
from tests.spark.test_verify import Verified
from tests.support.replicated import execute, kill, wait_until
from tests.support.toxiproxy import FAULTS, Link, running_toxiproxy
from tests.support.traffic import INSERT_ONLY, SETUP, SUMS, TABLES, WHOLE, traffic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.thorough(
    "integration/test_reconnecting.py and test_silent_source.py; the other faults: none but these"
)
_FAULT_S = 3.0
Links = Mapping[str, Link]


@pytest.fixture
def links(server: Server, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[Links]:
    """Connections to source, state and store, with the environment of apps that use them."""
    with running_toxiproxy() as proxy:
        ports = {"source": server.port, "state": server.port, "store": gateway.port}
        found = {name: proxy.link(name, port) for name, port in ports.items()}
        for name, value in environment_of(found["store"].port).items():
            monkeypatch.setenv(name, value)
        yield found


@pytest.fixture
def pipeline(
    spark: SparkSession, dsn: str, s3_lake: str, links: Links, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Verified:
    execute(dsn, *SETUP)
    monkeypatch.setenv(STATE_DSN_VARIABLE, links["state"].of(dsn))
    return Verified(
        spark,
        links["source"].of(dsn),
        tmp_path,
        TABLES,
        lake=s3_lake,
        insert_only=INSERT_ONLY,
        merge="merge_on_read",
    )


@contextmanager
def suffering_for_a_while(link: Link, fault: str) -> Iterator[None]:
    """Apply a fault for three seconds, or until the end of the block."""
    begun, over = threading.Event(), threading.Event()

    def suffer() -> None:
        with link.suffering(fault):
            begun.set()
            over.wait(_FAULT_S)

    thread = threading.Thread(target=suffer)
    thread.start()
    assert begun.wait(30)
    try:
        yield
    finally:
        over.set()
        thread.join()


def run_again(pipeline: Verified, *arguments: str) -> None:
    """Take a snapshot again while its exit code says that this may help, as its supervisor does."""

    def is_done() -> bool:
        code = pipeline.run("snapshot", *arguments)
        assert code in (0, RETRY_MAY_HELP), pipeline.log_tail()
        return code == 0

    wait_until(is_done, what="a snapshot to succeed")


def assert_verified(pipeline: Verified, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = pipeline.verify(capsys)
    assert code == 0, found
    assert {report["status"] for report in found.values()} == {"equal"}


def test_snapshots_under_faults_of_network_equal_source(pipeline, links, dsn, capsys):
    with traffic(dsn, 1) as writing:
        cases = zip(FAULTS, itertools.cycle(links), itertools.cycle(TABLES), strict=False)
        for number, (fault, name, table) in enumerate(cases):
            with suffering_for_a_while(links[name], fault):
                run_again(pipeline, *(("--tables", table) if number else ()))
            writing.wait_for_more(5)
    pipeline.catch_up()
    assert_verified(pipeline, capsys)


class Supervised:
    """The replication app, started again when it ends with the exit code for it, as its supervisor does."""

    def __init__(self, pipeline: Verified) -> None:
        self._pipeline = pipeline
        self._process = pipeline.start("replicate")

    def wait_for_new_point(self, what: str) -> None:
        """Wait until the lake has a later consistent point than now."""
        before = self._newest()
        wait_until(lambda: self._continues() and self._newest() > before, what=f"a point after {what}")

    def end(self) -> None:
        kill(self._process, signal.SIGTERM)

    def _newest(self) -> tuple[int, int]:
        point = ConsistentPoints(self._pipeline.pipeline.lake_root).latest()
        return (0, 0) if point is None else point.order

    def _continues(self) -> bool:
        if (code := self._process.poll()) is not None:
            assert code == RETRY_MAY_HELP, self._pipeline.log_tail()
            self._process = self._pipeline.start("replicate")
        return True


def test_stream_under_faults_of_network_equals_source(pipeline, links, dsn, capsys):
    pipeline.snapshot()
    cases = list(itertools.product(FAULTS, links))
    random.Random(1).shuffle(cases)
    app = Supervised(pipeline)
    try:
        with traffic(dsn, 2) as writing:
            for fault, name in cases:
                with suffering_for_a_while(links[name], fault):
                    writing.wait_for_more(20)
                app.wait_for_new_point(f"{fault} of {name}")
    finally:
        app.end()
    assert "connected to the source again" in pipeline.log.read_text()
    pipeline.catch_up()
    assert_verified(pipeline, capsys)
    sums = pipeline.at_every_point(SUMS, *TABLES)
    assert sums
    assert all(row == WHOLE for row in sums)
