"""PointWriter: consistent points of the tables that stream, also after one of them has stopped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from airflow_provider_pgrepl.replication.lake.apply.merge_policy import MergePolicy
from airflow_provider_pgrepl.replication.lake.apply.merge_scheduler import PointWriter
from airflow_provider_pgrepl.replication.lake.apply.table_schedule import (
    BEFORE_ALL,
    CaughtUpTable,
    TableSchedule,
)
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress, BatchEnd, WorkItem
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.tables import TableState

SNAPSHOT = LSN(5)


def record(name: str, state: TableState = TableState.STREAMING) -> Any:
    return SimpleNamespace(table=TableName("public", name), state=state)


def caught_up(through: int, history: int | None = None) -> CaughtUpTable:
    return CaughtUpTable(SNAPSHOT, through, through, through, 100 * through, history, "")


def test_a_table_that_stopped_while_others_were_behind_ends_no_point(tmp_path: Path) -> None:
    """The end of an older batch was forgotten because the table that stopped would not have had it."""
    schedule = TableSchedule(lambda _: MergePolicy(0, 60, 20, 2), 1000)
    points = ConsistentPoints(str(tmp_path))
    writer = PointWriter(points, Epoch(1), schedule, ApplierProgress(), every_s=60)
    behind, stopped = record("t"), record("w")
    schedule.add(BatchEnd(1, LSN(100), None), BEFORE_ALL, [], 0.0)
    schedule.caught_up.add(7, caught_up(1))
    schedule.add(BatchEnd(2, LSN(200), None), 1, [WorkItem(7, 1, 2, ("a",), 1)], 0.0)
    writer.write({7: behind, 8: stopped})
    writer.write({7: behind})
    assert points.latest() is None
    schedule.caught_up.add(7, caught_up(2))
    writer.write({7: behind})
    latest = points.latest()
    assert latest is not None
    assert (latest.lsn, latest.tables) == (LSN(200), {"public.t": 2})


def test_a_table_that_streams_only_after_the_newest_point_is_brought_to_it(tmp_path: Path) -> None:
    """No other change of the source makes a new version of the changelog."""
    schedule = TableSchedule(lambda _: MergePolicy(3600, 3600, 20, 2), 1000)
    points = ConsistentPoints(str(tmp_path))
    writer = PointWriter(points, Epoch(1), schedule, ApplierProgress(), every_s=1e-9)
    first, later = record("t"), record("w")
    schedule.add(BatchEnd(1, LSN(100), None), BEFORE_ALL, [], 0.0)
    for oid in (7, 8):
        schedule.caught_up.add(oid, caught_up(1))
        schedule.pace(oid).start(0.0)
    schedule.add(BatchEnd(2, LSN(200), None), 1, [WorkItem(8, 1, 2, ("a",), 1)], 0.0)
    writer.write({7: first, 8: record("w", TableState.CATCHING_UP)})
    latest = points.latest()
    assert latest is not None
    assert (latest.lsn, latest.tables) == (LSN(200), {"public.t": 1})
    writer.write({7: first, 8: later})
    assert schedule.turns(1.0)[8].at <= 1.0, "its change waits for its own pace"
    schedule.start(8, SimpleNamespace(is_planned=False), 1.0)  # type: ignore[arg-type]
    schedule.finish(8, caught_up(2))
    writer.write({7: first, 8: later})
    latest = points.latest()
    assert latest is not None
    assert (latest.lsn, latest.tables) == (LSN(200), {"public.t": 1, "public.w": 2})


def test_versions_of_a_hot_table_are_known_until_the_slow_one_has_its_point(tmp_path: Path) -> None:
    """Maintenance keeps the files of these versions, which no point names yet."""
    schedule = TableSchedule(lambda _: MergePolicy(3600, 3600, 20, 2), 1000)
    points = ConsistentPoints(str(tmp_path))
    names = {7: TableName("public", "t"), 8: TableName("public", "w")}
    writer = PointWriter(points, Epoch(1), schedule, ApplierProgress(), every_s=1e-9)
    records = {7: record("t"), 8: record("w")}

    def merge_hot(version: int) -> None:
        schedule.start(7, SimpleNamespace(is_planned=False), 1.0)  # type: ignore[arg-type]
        schedule.finish(7, caught_up(version, history=version + 10))

    schedule.add(BatchEnd(1, LSN(100), None), BEFORE_ALL, [], 0.0)
    schedule.caught_up.add(7, caught_up(1, history=11))
    schedule.caught_up.add(8, caught_up(1))
    writer.write(records)
    changes = [WorkItem(oid, 1, 2, ("a",), 1) for oid in records]
    schedule.add(BatchEnd(2, LSN(200), None), 1, changes, 0.0)
    writer.write(records)
    slow: Any = SimpleNamespace(is_planned=False, is_last=True, through=2)
    schedule.start(8, slow, 1.0)
    merge_hot(2)
    for version in (3, 4):
        changes = [WorkItem(oid, version - 1, version, ("a",), 1) for oid in records]
        schedule.add(BatchEnd(version, LSN(100 * version), None), version - 1, changes, 0.0)
        merge_hot(version)
        writer.write(records)
    known = schedule.caught_up.versions_for_points(names)
    assert known == {"public/t": {1, 2, 4}, "public/t~history": {11, 12, 14}, "public/w": {1}}
    schedule.finish(8, caught_up(2))
    writer.write(records)
    latest = points.latest()
    assert latest is not None
    assert latest.tables == {"public.t": 2, "public.t~history": 12, "public.w": 2}
    assert schedule.caught_up.versions_for_points({7: names[7]})["public/t"] == {2, 4}
