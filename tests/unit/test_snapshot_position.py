"""lake/snapshot/snapshot_copy.py: the position of the rows of a snapshot, and the point that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import BusyError, TableError
from airflow_provider_pgrepl.replication.drift.bound_rules import BoundRules
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from tests.support.announced import relation
from tests.support.changelogs import epoch_record

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Locks:
    """The locks of a pipeline. `app_runs`: the replication app holds its own."""

    def __init__(self, *, app_runs: bool = False) -> None:
        self._app_runs = app_runs

    @contextmanager
    def locked(self, _pipeline: str, purpose: str, timeout_s: float) -> Iterator[None]:
        assert (purpose, timeout_s) == ("replicate", 0)
        if self._app_runs:
            raise BusyError("the replication app runs")
        yield


def snapshot(lake: Path, epoch: int = 1, *, app_runs: bool = False) -> SnapshotCopy:
    """Return a snapshot at consistent point 100, before it copies tables."""
    pipeline = Pipeline(name="p", lake=str(lake), tables=("public.t",))
    record = epoch_record(epoch, consistent_point=100)
    exported: Any = SimpleNamespace(consistent_point=record.consistent_point, exported_at=NOW)
    state_db: Any = Locks(app_runs=app_runs)
    unused: Any = None
    return SnapshotCopy(unused, "", pipeline, state_db, record, unused, exported)


def write_point(lake: Path, *, epoch: int = 1, app_runs: bool = False) -> ConsistentPoint | None:
    """Write the point of a snapshot at consistent point 100 that copied a table; return the newest point."""
    copy = snapshot(lake, epoch, app_runs=app_runs)
    copy._versions["public.t"] = 0
    copy.write_point()
    return ConsistentPoints(str(lake)).latest()


def test_snapshot_stands_before_its_consistent_point(tmp_path: Path) -> None:
    """A transaction that commits at the consistent point itself comes by the stream."""
    point = write_point(tmp_path)
    assert point is not None
    assert (point.lsn, point.positions, point.epoch) == (99, {"public.t": 99}, 1)


def test_points_of_an_earlier_epoch_do_not_replace_that_of_the_snapshot(tmp_path: Path) -> None:
    ConsistentPoints(str(tmp_path)).append(ConsistentPoint(1, 5000, NOW, {"public.t": 0}))
    point = write_point(tmp_path, epoch=2)
    assert point is not None
    assert point.order == (2, 99)


def test_snapshot_leaves_the_points_to_an_app_that_runs(tmp_path: Path) -> None:
    """The app may be started as soon as the first tables are copied."""
    assert write_point(tmp_path, app_runs=True) is None


def test_point_that_the_app_has_written_in_the_epoch_stays_the_newest(tmp_path: Path) -> None:
    of_app = ConsistentPoint(2, 500, NOW, {"public.t": 3})
    ConsistentPoints(str(tmp_path)).append(of_app)
    assert write_point(tmp_path, epoch=2) == of_app


def test_writer_of_points_continues_after_a_snapshot_at_its_last_point(tmp_path: Path) -> None:
    app = ConsistentPoints(str(tmp_path))
    app.append(ConsistentPoint(1, 99, NOW, {"public.t": 0, "public.u": 0}))
    write_point(tmp_path)
    app.append(ConsistentPoint(1, 120, NOW, {"public.t": 1, "public.u": 0}))
    assert [point.lsn for point in ConsistentPoints(str(tmp_path)).all()] == [99, 120]


def test_table_waits_for_the_index_before_its_settings_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tables, which are copied at the same time, are added to the index."""
    copy, is_locked = snapshot(tmp_path), list[bool]()

    def problems(*_: object) -> list[str]:
        is_locked.append(copy._index_lock.locked())
        return ["it is excluded"]

    monkeypatch.setattr(BoundRules, "problems", problems)
    unused: Any = None
    with pytest.raises(TableError, match="it is excluded"):
        copy._plan(unused, relation(7, "id"))
    assert is_locked == [True]
