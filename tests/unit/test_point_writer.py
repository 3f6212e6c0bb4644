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


def caught_up(through: int) -> CaughtUpTable:
    return CaughtUpTable(SNAPSHOT, through, through, through, 100 * through, None, "")


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
