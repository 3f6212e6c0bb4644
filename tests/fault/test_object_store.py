"""A lake in a store that speaks S3: whole as on a disk, after kills, and with two apps at once."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest

from demo.versitygw import environment_of
from tests.support.faulty_store import Fault, FaultyStore, faulty_store
from tests.support.in_process import InProcess
from tests.support.replicated import execute, kill, wait_for_end, wait_until
from tests.support.traffic import INSERT_ONLY, SETUP, TABLES, traffic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FAULTS: tuple[Fault, ...] = ("throttled", "cut", "answer lost")
DYING = Path(__file__).with_name("dying.py")


@pytest.fixture
def replicated(spark: SparkSession, s3_lake: str, dsn: str, tmp_path: Path) -> InProcess:
    execute(dsn, *SETUP)
    return InProcess(
        spark, dsn, tmp_path, TABLES, lake=s3_lake, insert_only=INSERT_ONLY, merge="merge_on_read"
    )


@pytest.mark.real_kill
def test_lake_in_s3_equals_source_after_kills(replicated, dsn, monkeypatch):
    replicated.snapshot()
    with traffic(dsn, 1) as writing:
        writing.wait_for_more(40)
        for point in ("durable and not told", "rows marked and committed"):
            monkeypatch.setenv("PGREPL_TEST_POINT", point)
            process = replicated.start("replicate", "replicate", script=DYING)
            try:
                assert wait_for_end(process) == -signal.SIGKILL, replicated.log_tail()
            finally:
                kill(process)
            writing.wait_for_more(10)
    replicated.catch_up()
    replicated.assert_equal(*TABLES)


def test_outage_of_store_holds_stream_and_loses_nothing(replicated, gateway, dsn, monkeypatch):
    """Requests are throttled, cut, done with their answer lost, and then nothing answers for a while."""
    replicated.snapshot()
    chance = random.Random(7)
    with faulty_store(gateway.port) as faulty:
        for name, value in environment_of(faulty.port).items():
            monkeypatch.setenv(name, value)
        process = replicated.start("replicate")
        try:
            with traffic(dsn, 1) as writing:
                writing.wait_for_more(20)
                faulty.fault = lambda _: chance.choice(FAULTS) if chance.random() < 0.1 else None
                writing.wait_for_more(60)
                wait_until(lambda: all(faulty.faults[fault] for fault in FAULTS))
                faulty.fault = lambda _: "gone"
                writing.wait_for_more(20)
                wait_until(lambda: faulty.faults["gone"] >= 3, what="the app to ask in vain")
                faulty.fault = lambda _: None
                writing.wait_for_more(20)
        finally:
            kill(process, signal.SIGTERM)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", gateway.client_environment["AWS_ENDPOINT_URL_S3"])
    replicated.catch_up()
    replicated.assert_equal(*TABLES)


def test_requests_of_a_change_to_store_are_bounded(replicated, gateway, dsn, monkeypatch):
    """Few requests per change: nothing is listed, other tables are left alone, points are committed once."""
    replicated.configure(flush_interval_s=1.0)
    replicated.snapshot()
    with faulty_store(gateway.port) as counted:
        for name, value in environment_of(counted.port).items():
            monkeypatch.setenv(name, value)
        process = replicated.start("replicate")
        try:
            update_until(dsn, lambda: by_method(counted, PLACES[0])["commit"] >= 5)
            with counted.lock:
                counted.asked.clear()
            update_until(dsn, lambda: by_method(counted, PLACES[0])["commit"] >= 20)
            asked = {place: by_method(counted, place) for place in PLACES}
        finally:
            kill(process, signal.SIGTERM)
    accounts, savings, changelog, points = (asked[place] for place in PLACES)
    # A listing covers only the end of a log, behind the version that is known.
    assert accounts["PUT"] <= 2 * accounts["commit"]
    assert accounts["GET"] + accounts["HEAD"] + accounts["LIST"] <= 50 * accounts["commit"]
    assert savings["PUT"] == savings["commit"] == 0
    assert savings.total() <= 40, "opened by nobody, looked at now and then"
    assert points["commit"] <= changelog["commit"] + 2
    assert points["PUT"] <= points["commit"] + 2
    assert changelog["PUT"] <= changelog["commit"] + 2


PLACES = ("public/accounts", "public/savings", "_pgrepl/changelog", "_pgrepl/consistent_points")


def update_until(dsn: str, is_enough: Callable[[], bool]) -> None:
    def has_enough() -> bool:
        execute(dsn, "update accounts set owner = owner || '.' where id = 7")
        return is_enough()

    wait_until(has_enough, what="enough commits")


def by_method(store: FaultyStore, place: str) -> Counter[str]:
    """Return the number of requests below a table's folder by method, with commits and lists apart."""
    with store.lock:
        asked = dict(store.asked)
    found: Counter[str] = Counter()
    for one, times in asked.items():
        path = unquote(one.path)
        if f"/{place}/" in path:
            kind = "commit" if one.is_commit else one.method
            found["LIST" if "list-type" in path else kind] += times
    return found
