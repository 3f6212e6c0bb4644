"""A store that answers 503 to everything for a while: what continues, and what ends when, by operation.

Pauses are a hundredth of what they are, and so is the limit of three minutes: a longer burst represents one
of five minutes. The pauses of Arrow's clients for Google and Azure have no setting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import LakeUnavailableError
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.record import PublisherLog, PublisherRecord
from airflow_provider_pgrepl.replication.events.reader import ChangeReader
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.maintenance import Maintenance
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.storage.stores import amazon, base, google
from tests.support.faulty_store import Fault, FaultyStore, faulty_store
from tests.support.handed import Handed
from tests.support.replicated import execute
from tests.support.stores import AzureServer, GoogleServer, running_store

pytestmark = pytest.mark.thorough("unit/test_store_access, test_store_faults")
Store = tuple[str, FaultyStore]
LIMIT_S = 2.0
GOOGLES_LIMIT_S = 20.0
"""Arrow's client for Google pauses for one second, two, four."""
TABLE = "public.t"


class Places:
    """The operations on the lake, each of which can be repeated. Only `reader` does not write."""

    def __init__(self, handed: Handed, relation: Relation) -> None:
        self.handed, self.relation = handed, relation
        self.log = PublisherLog(handed.pipeline.lake_root, "events")
        self.record = self.log.take(PublisherRecord(EventPosition(Epoch(1), LSN(1), 0)), "test")
        self.points = ConsistentPoints(handed.pipeline.lake_root)
        self.lsn = 100
        self.changes = ChangeReader(handed.pipeline)

    def receiver(self) -> None:
        self.handed.receive()

    def merge(self) -> None:
        done = self.handed.hand(self.relation)
        if done.error is not None:
            assert done.stops_pipeline, "the table itself is not at fault"
            raise LakeUnavailableError(done.error)

    def point(self) -> None:
        self.lsn += 1
        self.points.append(ConsistentPoint(Epoch(1), LSN(self.lsn), None, {TABLE: 0}))

    def reader(self) -> None:
        """Read what a publisher reads, which keeps its reader while it runs."""
        found = [change.data for changes in self.changes.read() for change in changes]
        assert found == [{"id": 1, "v": "c"}]

    def publisher(self) -> None:
        self.log.save(self.record)

    def maintenance(self) -> None:
        done = Maintenance(self.handed.pipeline).run()
        if done.failed:
            raise LakeUnavailableError(str(done.failed))

    @property
    def all(self) -> tuple[Callable[[], None], ...]:
        return self.receiver, self.reader, self.merge, self.point, self.publisher, self.maintenance


@pytest.fixture(params=["s3", "google", "azure"])
def store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, FaultyStore]]:
    """The URI of a lake of the test's own, and the proxy to its store, to which the environment leads."""
    with ExitStack() as stack:
        if request.param == "s3":
            lake, faulty = request.getfixturevalue("s3_lake"), request.getfixturevalue("faulty")
        else:
            kind = GoogleServer if request.param == "google" else AzureServer
            server = stack.enter_context(running_store(kind))
            faulty = stack.enter_context(faulty_store(server.port))
            for name, value in server.environment_of(faulty.port).items():
                monkeypatch.setenv(name, value)
            lake = server.new_lake()
        yield lake, faulty


@pytest.fixture
def places(dsn: str, tmp_path: Path, store: Store, monkeypatch: Any) -> Places:
    monkeypatch.setattr(base, "RETRY_TIMEOUT", timedelta(seconds=LIMIT_S))
    monkeypatch.setattr(google, "RETRY_TIMEOUT", timedelta(seconds=GOOGLES_LIMIT_S))
    monkeypatch.setattr(base, "_FIRST_PAUSE", timedelta(milliseconds=1))
    monkeypatch.setattr(base, "_LONGEST_PAUSE", timedelta(milliseconds=100))
    monkeypatch.setattr(amazon, "_ATTEMPTS", 6)  # 1.55 s
    execute(dsn, "create table t (id int primary key, v text)", "insert into t values (1, 'a'), (2, 'b')")
    handed = Handed(dsn, tmp_path, (TABLE,), lake=store[0])
    places = Places(handed, handed.copy(TABLE))
    execute(dsn, "update t set v = 'c' where id = 1")
    return places


def test_burst_within_the_limit_is_waited_for_at_every_place(places: Places, store: Store) -> None:
    """Each request is rejected three times, however many an operation makes: none uses up another's tries."""
    faulty = store[1]
    for work in places.all:
        faulty.asked.clear()
        faulty.fault = lambda asked: "throttled" if faulty.asked[asked] <= 3 else None
        work()
        assert faulty.faults["throttled"] > 3
    faulty.fault = lambda _: None
    places.handed.assert_equal(TABLE)
    assert places.points.latest() == ConsistentPoint(Epoch(1), LSN(101), None, {TABLE: 0})


def test_longer_burst_ends_at_the_limit_and_loses_nothing(places: Places, store: Store) -> None:
    faulty = store[1]
    for work in places.all:
        refused: Fault = "throttled"
        faulty.fault = lambda _, refused=refused: refused  # type: ignore[misc]
        began = time.monotonic()
        said = failure(work)
        assert time.monotonic() - began >= 0.7 * LIMIT_S, work.__name__
        assert "the store throttles requests" in said, (work.__name__, said)
        faulty.fault = lambda _: None
        work()
    places.handed.assert_equal(TABLE)


def failure(work: Callable[[], None]) -> str:
    """Return the error message of an operation, whose LakeUnavailableError means that a retry may help."""
    with pytest.raises(LakeUnavailableError) as caught:
        work()
    return str(caught.value)
