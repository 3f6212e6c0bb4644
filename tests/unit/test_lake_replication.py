"""The run of the replication app with lake tables: what it waits for, and which error ends it."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.lake_replication import LakeReplication
from airflow_provider_pgrepl.replication.lake.apply import applier
from airflow_provider_pgrepl.replication.lake.apply.merge_policy import MergePolicy
from airflow_provider_pgrepl.replication.lake.apply.merge_scheduler import MergeScheduler
from airflow_provider_pgrepl.replication.lake.apply.table_schedule import CaughtUpTable, TableSchedule
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from tests.support.changelogs import epoch_record


class Stop:
    is_set = False

    def wait(self, _seconds: float) -> bool:
        return self.is_set


class Applier:
    """An applier that reads for some calls of `is_reading`, and may then have failed."""

    def __init__(self, reads: int = 0, error: Exception | None = None) -> None:
        self._left, self._then = reads, error
        self.error: Exception | None = None
        self.calls: list[str] = []

    @property
    def is_reading(self) -> bool:
        self._left -= 1
        if self._left < 0:
            self.error = self._then
        return self._left >= 0

    def start(self, *, available_now: bool) -> None:
        self.calls.append("start available" if available_now else "start")

    def stop(self) -> None:
        self.calls.append("stop")


def replication(applier: Applier | None = None, seen: int = 0) -> Any:
    """Return a run with this applier. `seen`: the LSN that its receiver has made durable."""
    run: Any = LakeReplication.__new__(LakeReplication)
    run._applier = applier or Applier()
    run._supervise = lambda: run._applier.calls.append("supervise")
    run._receiver = SimpleNamespace(
        failed=threading.Event(),
        progress=SimpleNamespace(seen_lsn=LSN(seen)),
        asked=0,
    )

    def request_keepalive() -> None:
        run._receiver.asked += 1
        if run._receiver.asked == 3:
            run._receiver.progress.seen_lsn = LSN(100)

    run._receiver.request_keepalive = request_keepalive
    run._stop = Stop()
    return run


def test_run_supervises_until_everything_available_is_applied():
    run = replication(Applier(reads=2))
    run._follow(available_now=True)
    assert run._applier.calls == ["start available", "supervise", "supervise"]


def test_run_that_is_asked_to_stop_waits_for_the_running_merges():
    run = replication(Applier(reads=9))
    run._stop.is_set = True
    run._follow()
    assert run._applier.calls == ["start", "stop"]


def test_run_that_is_stopped_amid_the_last_batches_has_not_reached_its_target():
    """The applier reports that all batches are applied that it has begun."""
    run = replication(Applier(reads=9), seen=100)
    run._applier.progress = SimpleNamespace(caught_up=True)
    run._in_state, run._caught_up = (lambda _: []), (lambda _: process.DONE)
    has_received = run._has_received

    def stopped_after(target: LSN) -> bool:
        found = has_received(target)
        run._stop.is_set = True
        return found

    run._has_received = stopped_after
    assert run._run_until(LSN(100)) == process.RETRY_MAY_HELP
    assert run._applier.calls == ["start available", "stop", "supervise"]


def test_error_of_the_applier_is_raised():
    run = replication(Applier(error=KeyError("of the applier")))
    with pytest.raises(KeyError, match="of the applier"):
        run._follow()
    assert run._applier.calls == ["start"]


def test_target_is_awaited_until_it_is_durable():
    run = replication()
    assert run._has_received(LSN(100))
    assert run._receiver.asked == 3


def test_target_is_not_awaited_when_the_receiver_failed_or_the_app_is_to_stop():
    failed, stopped = replication(), replication()
    failed._receiver.failed.set()
    stopped._stop.is_set = True
    assert not failed._has_received(LSN(100))
    assert not stopped._has_received(LSN(100))
    assert (failed._receiver.asked, stopped._receiver.asked) == (0, 0)


def applier_that_knows(table: TableName, *versions: int) -> applier.Applier:
    """Return an applier for whose next consistent point these versions of a table may be named."""
    schedule = TableSchedule(lambda _: MergePolicy(0, 60, 20, 2), 1000)
    for version in versions:
        schedule.caught_up.add(7, CaughtUpTable(LSN(5), version, version, version, 100, None, ""))
    rounds: Any = MergeScheduler.__new__(MergeScheduler)
    rounds._changed, rounds._schedule = threading.Condition(threading.RLock()), schedule
    rounds._records = {7: SimpleNamespace(table=table), 8: SimpleNamespace(table=TableName("public", "lags"))}
    found: Any = applier.Applier.__new__(applier.Applier)
    found._rounds = rounds
    return found


def test_maintenance_of_the_app_keeps_versions_that_its_next_point_may_name(tmp_path: Path) -> None:
    ours = CommitProperties(app_transactions=[Transaction("shop:1", 1)])
    for value in range(4):
        rows = pa.table({"n": [value]})
        write_deltalake(f"{tmp_path}/public/a", rows, mode="overwrite", commit_properties=ours)
    ConsistentPoints(str(tmp_path)).append(ConsistentPoint(1, LSN(9), datetime.now(UTC), {"public.a": 0}))
    pipeline = Pipeline(name="shop", lake=str(tmp_path), tables=("public.a",))
    unused: Any = None
    run: Any = LakeReplication("", pipeline, unused, epoch_record(), unused, unused)
    run._applier = applier_that_knows(TableName("public", "a"), 2, 3)
    done = run._maintenance.run(datetime.now(UTC) + timedelta(days=1))
    assert (done.files, done.failed) == (1, {}), "of version 1"
    assert DeltaTable(f"{tmp_path}/public/a", version=2).to_pyarrow_table()["n"].to_pylist() == [2]
