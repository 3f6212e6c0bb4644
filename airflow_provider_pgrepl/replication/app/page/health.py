"""The problems of a pipeline that its state database alone shows, without I/O.

`status/health.py` also asks the source and the lake. The limits are those of its HealthLimits: importing them
would load pyarrow in Airflow's API server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from airflow_provider_pgrepl.replication.state.overview import PipelineRow
from airflow_provider_pgrepl.replication.state.tables import TableState

LAG_S, WAL_WARNING, WAL_FAILURE, HEARTBEAT_S = 300.0, 0.5, 0.8, 60.0
_SAMPLED_S = 180.0
"""The age up to which a sample shows the present: there is one a minute."""


@dataclass(frozen=True)
class PageProblem:
    """A problem of a pipeline. `reason`: a sentence. `hint`: the next step."""

    severity: Literal["failure", "warning"]
    reason: str
    hint: str = ""


def find_problems(row: PipelineRow) -> list[PageProblem]:
    """Return the problems of a pipeline, failures first."""
    found = [*_of_application(row), *_of_tables(row), *_of_sample(row)]
    return sorted(found, key=lambda problem: problem.severity == "warning")


def is_running(row: PipelineRow) -> bool:
    """Return True if the replication app has reported within HEARTBEAT_S seconds, and has not ended since."""
    if row.reported_at is None:
        return False
    has_ended = row.run is not None and row.run.has_ended_since(row.reported_at)
    return not has_ended and _age(row, row.reported_at) < HEARTBEAT_S


def state_of(row: PipelineRow) -> str:
    """Return the state of a pipeline: `running`, `failed`, `stopped`, `silent` or `not_started`."""
    if is_running(row):
        return "running"
    if row.run is not None and row.run.has_ended:
        return row.run.kind
    return "not_started" if row.reported_at is None else "silent"


def _of_application(row: PipelineRow) -> Iterator[PageProblem]:
    match state_of(row):
        case "failed":
            assert row.run is not None
            reason = f"the replication app failed: {row.run.error}: {row.run.reason}"
            yield PageProblem("failure", reason, row.run.hint)
        case "stopped":
            hint = "run the DAG that replicates, unless the pipeline runs on a schedule"
            yield PageProblem("warning", "the replication app was stopped", hint)
        case "silent":
            hint = "see the log of the task that replicates; its process or host may be gone"
            yield PageProblem("failure", "the replication app no longer reports", hint)
        case "not_started":
            hint = "run the DAG that replicates once the snapshot is done"
            yield PageProblem("warning", "the replication app has never reported", hint)


def _of_tables(row: PipelineRow) -> Iterator[PageProblem]:
    if count := row.states.get(TableState.ERRORED, 0):
        tables = "1 table is" if count == 1 else f"{count} tables are"
        yield PageProblem("failure", f"{tables} errored", "each table shows its error and a hint")


def _of_sample(row: PipelineRow) -> Iterator[PageProblem]:
    sample = row.sample
    if sample is None or not is_running(row) or _age(row, sample.time) > _SAMPLED_S:
        return
    if sample.lag_seconds is not None and sample.lag_seconds >= LAG_S:
        hint = "see the log of the replication app for slow merges and waiting tables"
        yield PageProblem("failure", f"the lake lags {sample.lag_seconds:,.0f} s behind the source", hint)
    if sample.slot_active is False:
        hint = "see the log of the replication app: it cannot read the slot"
        yield PageProblem("failure", f"slot {row.slot} is not read by any process", hint)
    if sample.wal_limit_bytes and sample.wal_retained_bytes is not None:
        share = sample.wal_retained_bytes / sample.wal_limit_bytes
        if share >= WAL_WARNING:
            reason = f"slot {row.slot} retains {share:.0%} of its WAL limit (max_slot_wal_keep_size)"
            hint = "check in the app's log that it receives changes; do not drop the slot"
            yield PageProblem("failure" if share >= WAL_FAILURE else "warning", reason, hint)


def _age(row: PipelineRow, time: datetime) -> float:
    return (row.now - time).total_seconds()
