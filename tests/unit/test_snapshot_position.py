"""lake/snapshot/snapshot_copy.py: the position at which a snapshot's rows are."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from tests.support.changelogs import epoch_record

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_snapshot_stands_before_its_consistent_point(tmp_path: Path) -> None:
    """A transaction that commits at the consistent point itself comes by the stream."""
    pipeline = Pipeline(name="p", lake=str(tmp_path), tables=("public.t",))
    record = epoch_record(consistent_point=100)
    exported: Any = SimpleNamespace(consistent_point=record.consistent_point, exported_at=NOW)
    keeper: Any = SimpleNamespace(connection=None)
    unused: Any = None
    copy = SnapshotCopy(unused, "", pipeline, unused, record, keeper, exported)
    copy._versions["public.t"] = 0
    copy.write_point()
    point = ConsistentPoints(pipeline.lake_root).latest()
    assert point is not None
    assert (point.lsn, point.positions, point.epoch) == (99, {"public.t": 99}, 1)
