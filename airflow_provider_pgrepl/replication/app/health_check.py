"""A check of a pipeline's health, which also applies its setting `on_wal_budget`.

The check needs no running app: the source's disk fills up while none runs.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from airflow_provider_pgrepl.errors import BusyError, PgReplError, SlotError
from airflow_provider_pgrepl.replication.app.status.health import (
    HealthLimits,
    HealthProblem,
    HealthReport,
    ProblemKind,
    Severity,
    find_health_problems,
)
from airflow_provider_pgrepl.replication.app.status.status import read_status
from airflow_provider_pgrepl.replication.runtime.quantities import show_bytes
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.server import written_lsn
from airflow_provider_pgrepl.replication.source.slot import drop_slot, read_slot, reason_to_keep
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState

from .access import Access
from .evidence import gather
from .ownership import check_ours, has_begun

log = logging.getLogger(__name__)
_READ = (
    "let the replication app catch up, and do not stop it: while no process reads the slot, the next health"
    " check drops it, and every table must be copied again. To rule that out, set on_wal_budget to alert"
)
_KEPT = (
    "find the program that uses the slot: select slot_name, plugin, database, active_pid from"
    " pg_replication_slots. Do not drop it before: the changes that its reader lacks would be lost"
)


def check_health(access: Access, limits: HealthLimits) -> HealthReport:
    """Return the problems of a pipeline.

    If the setting `on_wal_budget` is `drop_slot` and the slot retains more WAL than `wal_budget`, drop the
    slot first, unless the replication app runs, or a process reads the slot, or the evidence that it is the
    pipeline's is incomplete. Raises SourceConnectionError, ConfigError, StateError.
    """
    status = read_status(access.pipeline, access)
    report = find_health_problems(status, limits)
    held = None if status.slot is None else status.slot.held_bytes
    if access.pipeline.on_wal_budget != "drop_slot" or held is None or not _is_beyond(access.pipeline, held):
        return report
    problem = _give_up(access)
    if problem is None:
        return report
    if problem.kind is ProblemKind.SLOT_DROPPED:
        return replace(report, problems=(problem, *report.problems))
    return replace(report, problems=(*report.problems, problem))


def _is_beyond(pipeline: Pipeline, held: int) -> bool:
    return pipeline.wal_budget is not None and held > pipeline.wal_budget


def _give_up(access: Access) -> HealthProblem | None:
    """Drop the slot, and return the problem that reports it, or why it was kept.

    Returns None if the slot is within its budget by now, or gone.
    """
    pipeline = access.pipeline
    role = f"budget {pipeline.name}"
    with access.source("budget") as source, StateDatabase(access.state_dsn, role) as state_db:
        try:
            # Check before taking locks, too: a lock in another state database does not stop this pipeline's
            # apps, and taking one migrates the schema.
            _check_provably_ours(pipeline, state_db, source)
            begins = _lock(state_db, pipeline.name)
            _check_provably_ours(pipeline, state_db, source, begins)
            found = read_slot(source, pipeline.slot)
            held = None if found is None else found.held_bytes(written_lsn(source))
            if held is None or not _is_beyond(pipeline, held):
                return None
            drop_slot(source, pipeline.slot)
        except PgReplError as error:
            reason = f"slot {pipeline.slot} is beyond wal_budget and was not dropped: {error.message}"
            hint = _READ if isinstance(error, BusyError) else error.hint or _KEPT
            return HealthProblem(Severity.FAILURE, ProblemKind.SLOT_KEPT, pipeline.slot, reason, hint)
        dropped = _record(pipeline, state_db, held)
    return HealthProblem(
        Severity.FAILURE, ProblemKind.SLOT_DROPPED, pipeline.slot, dropped.message, dropped.hint
    )


def _lock(state_db: StateDatabase, name: str) -> BusyError | None:
    """Take the pipeline's locks, so that no app starts to read the slot or creates it again.

    Raises BusyError while the replication app runs: it frees WAL, or ends with an error. Returns the error of
    a snapshot app that runs, which may go on for hours and frees no WAL.
    """
    state_db.lock(name, "replicate")
    try:
        state_db.lock(name, "snapshot")
    except BusyError as error:
        return error
    return None


def _check_provably_ours(
    pipeline: Pipeline, state_db: StateDatabase, source: Connection, begins: BusyError | None = None
) -> None:
    """Raise PgReplError unless source, lake and state agree that the slot is this pipeline's.

    The lake may be out of reach, which may be why the slot retains WAL: the state is compared then.
    `begins`: the error of a snapshot app that runs. It is raised while that app begins an epoch, because the
    app drops and creates the slot itself.
    """
    evidence = gather(pipeline, state_db, source, lake_may_fail=True, migrates=False)
    check_ours(evidence)
    if begins is not None and not has_begun(evidence):
        raise begins
    recorded, found = evidence.recorded, evidence.slots.get(pipeline.slot)
    if recorded is None or not recorded.slot_owned or recorded.slot != pipeline.slot or found is None:
        raise SlotError("the state does not record it as created by this pipeline", _KEPT)
    if (reason := reason_to_keep(source, found)) is not None:
        raise SlotError(reason, _KEPT)


def _record(pipeline: Pipeline, state_db: StateDatabase, held: int) -> SlotError:
    """Record that the slot is gone, and mark every table that needs changes errored. Return its error."""
    error = SlotError(
        f"slot {pipeline.slot} was dropped, because it retained {show_bytes(held)} of WAL, more than"
        f" wal_budget ({show_bytes(pipeline.wal_budget)})",
        "begin a new epoch, which compares every table with the lake: pgrepl resync FILE.json prints a name;"
        " run it again with --give-up and that name. pgrepl snapshot FILE.json --new-epoch resnapshots every"
        " table",
    )
    log.error("%s", error)
    state_db.record_slot(pipeline.name, is_owned=False)
    for record in state_db.read_tables(pipeline.name).values():
        if record.state.needs_changes or record.state in (TableState.PENDING, TableState.SNAPSHOTTING):
            state_db.mark_errored(pipeline.name, record, error)
    return error
