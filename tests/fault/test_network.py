"""Faults of the network between apps and source, state or store; `verify` then finds lake and source equal.

The stream meets each fault that ends connections on each of them. Other faults, and snapshots, meet each one
once.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg2
import pytest

from airflow_provider_pgrepl.replication.app.process import RETRY_MAY_HELP, STATE_DSN_VARIABLE
from demo.postgres import Server
from demo.versitygw import Gateway, environment_of
from tests.spark.test_verify import Verified
from tests.support.in_process import at_every_point
from tests.support.replicated import execute, wait_until
from tests.support.supervised import Supervised
from tests.support.toxiproxy import CUT, ENDING, FAULTS, Link, running_toxiproxy
from tests.support.traffic import INSERT_ONLY, SETUP, SUMS, TABLES, WHOLE, traffic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.thorough(
    "integration/test_reconnecting.py and test_silent_source.py; the other faults: none but these"
)
_FAULT_S, _SNAPSHOT_S = 3.0, 10.0
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


def run_under(link: Link, fault: str, pipeline: Verified, *arguments: str) -> list[int]:
    """Take a snapshot, again while its exit code says that this may help; return the exit codes.

    The fault ends when a snapshot has succeeded, and at the latest after ten seconds.
    """
    over, begun = threading.Event(), threading.Event()

    def suffer() -> None:
        with link.suffering(fault):
            begun.set()
            over.wait(_SNAPSHOT_S)

    def is_done() -> bool:
        codes.append(pipeline.run("snapshot", *arguments))
        return codes[-1] != RETRY_MAY_HELP

    codes: list[int] = []
    with ThreadPoolExecutor(1) as thread:
        suffering = thread.submit(suffer)
        try:
            wait_until(lambda: begun.is_set() or suffering.done())
            wait_until(is_done, what="a snapshot to succeed")
        finally:
            over.set()
        suffering.result()
    assert codes[-1] == 0, pipeline.log_tail()
    return codes


def assert_verified(pipeline: Verified, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = pipeline.verify(capsys)
    assert code == 0, found
    assert {report["status"] for report in found.values()} == {"equal"}


def test_links_suffer_what_is_asked_for(links, dsn):
    """Otherwise the tests below would show nothing."""

    def ask(statement: str) -> float:
        began = time.monotonic()
        execute(links["source"].of(dsn), statement)
        return time.monotonic() - began

    large = "select repeat('x', 400000)"
    for fault in FAULTS:
        with links["source"].suffering(fault):
            if fault in ENDING:
                with pytest.raises(psycopg2.OperationalError):
                    execute(f"{links['source'].of(dsn)} connect_timeout=2", large)
            else:
                at_least = {"latency": 0.1, "bandwidth": 1.0, "slicer": 0.5}[fault]
                assert ask(large) > at_least, fault
        ask(large)


def test_snapshots_under_faults_of_network_equal_source(pipeline, links, dsn, capsys):
    cases = list(zip(FAULTS, itertools.cycle(links), strict=False))
    with traffic(dsn, 1) as writing:
        for number, (fault, name) in enumerate(cases):
            tables = ("--tables", TABLES[number // 2 % len(TABLES)]) if number else ()
            codes = run_under(links[name], fault, pipeline, *tables)
            if fault == CUT:
                assert RETRY_MAY_HELP in codes, name
            writing.wait_for_more(5)
    pipeline.catch_up()
    assert_verified(pipeline, capsys)


def test_stream_under_faults_of_network_equals_source(pipeline, links, gateway, s3_lake, dsn, capsys):
    pipeline.snapshot()
    slow = [fault for fault in FAULTS if fault not in ENDING]
    cases = [*itertools.product(ENDING, links), *zip(slow, links, strict=True)]
    random.Random(1).shuffle(cases)
    app, over = Supervised(pipeline), threading.Event()
    try:
        with traffic(dsn, 2) as writing:
            for fault, name in cases:
                with links[name].suffering(fault):
                    writing.wait_for_more(20)
                    over.wait(_FAULT_S)
                app.wait_for_point_above(app.newest_point(), f"{fault} of {name}")
    finally:
        app.end()
    lost = pipeline.log.read_text().count("the connection to the source was lost")
    assert lost >= len(ENDING), f"{lost} times, and {len(ENDING)} faults of the source end connections"
    pipeline.catch_up()
    assert_verified(pipeline, capsys)
    # Hundreds of points: the store's objects are files, which are read much faster than through its API.
    sums = at_every_point(str(gateway.data / s3_lake.removeprefix("s3://")), SUMS, *TABLES)
    assert sums
    assert all(row == WHOLE for row in sums)
