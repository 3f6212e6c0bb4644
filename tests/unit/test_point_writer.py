"""PointWriter: consistent points of the tables that stream, also after one of them has stopped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from airflow_provider_pgrepl.replication.lake.apply.schedule import BEFORE_ALL, CaughtUpTable, TableSchedule
from airflow_provider_pgrepl.replication.lake.apply.scheduler import PointWriter
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress, BatchEnd, WorkItem
from airflow_provider_pgrepl.replication.lake.apply.write_budget import MergePolicy
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.tables import TableState

SNAPSHOT = LSN(5)


def record(name: str) -> Any:
    return SimpleNamespace(table=TableName("public", name), state=TableState.STREAMING)


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
