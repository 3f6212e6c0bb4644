"""The outcome of a table's merge: the next merge is planned at once, or later."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import OvertakenError
from airflow_provider_pgrepl.replication.lake.apply import table_merge
from airflow_provider_pgrepl.replication.lake.apply.merge_task import MergeJob
from airflow_provider_pgrepl.replication.lake.apply.schedule import TableSchedule
from airflow_provider_pgrepl.replication.lake.apply.scheduler import TableOutcomes
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableResult
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.lake.apply.write_budget import MergePolicy
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from tests.support.changes import work_of

TABLE = 7


def test_merge_that_another_program_prevented_is_done_again_and_is_no_error(monkeypatch: pytest.MonkeyPatch):
    def overtake(*_: Any) -> None:
        raise OvertakenError("another program has committed version 3 meanwhile")

    monkeypatch.setattr(table_merge, "open_newest", overtake)
    result = table_merge.bring_forward(work_of(TABLE), [], LSN(9))
    assert (result.error, result.stops_pipeline) == (None, False)
    assert result.overtaken == "another program has committed version 3 meanwhile"


@pytest.mark.parametrize(
    ("result", "at_once"),
    [
        (TableResult(TABLE, position=8), True),
        (TableResult(TABLE, has_gone_back=True), False),
        (TableResult(TABLE, overtaken="another program has committed version 3 meanwhile"), False),
        (TableResult(TABLE, error="unexpected ValueError"), False),
    ],
)
def test_a_table_that_lags_goes_on_at_once_unless_its_merge_failed(result: TableResult, at_once: bool):
    schedule = TableSchedule(lambda _: MergePolicy(0, 60, 20, 2), 1000)
    planner: Any = SimpleNamespace(remember=lambda *_: None)
    outcomes = TableOutcomes("shop", None, schedule, planner, ApplierProgress())  # type: ignore[arg-type]
    job = MergeJob(work_of(TABLE), LSN(5), 1, ("a",), 1, upto_lsn=LSN(9), is_last=False)
    schedule.start(TABLE, job, time.monotonic())
    outcomes.take(result, None)
    now = time.monotonic()
    assert (TABLE in schedule.lagging([TABLE], now)) == at_once
    assert TABLE in schedule.lagging([TABLE], now + 0.3)
