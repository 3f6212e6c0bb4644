"""Operations on single tables of a pipeline, whether its apps run or not: pause, resume, retry, remove.

All tables are checked before any is changed. The others, the slot and the apps go on meanwhile: the
replication app looks at the states before each batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import PgReplError, StateError
from airflow_provider_pgrepl.replication.app import evidence
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.lake_choice import check_lake_choice, refuse_without_lake
from airflow_provider_pgrepl.replication.app.operations.chosen_tables import (
    change,
    choose,
    raise_all,
    recorded,
)
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from airflow_provider_pgrepl.replication.app.operations.retry import Continuation
from airflow_provider_pgrepl.replication.changelog import writer
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.state.table_state import TableState
from airflow_provider_pgrepl.replication.state.tables import TableRecord
from airflow_provider_pgrepl.trace import trace_of

__all__ = ["Retried", "pause_tables", "remove_tables", "resume_tables", "retry_tables"]

log = logging.getLogger(__name__)

_S = TableState
_APPLIED = (_S.CATCHING_UP, _S.STREAMING)
_INSTEAD = {
    _S.PENDING: f"it has not been copied yet: {hints.SNAPSHOT}",
    _S.SNAPSHOTTING: "wait for the snapshot that runs; if it has died, run pgrepl snapshot FILE.json again",
    _S.ERRORED: f"retry it, or {hints.RESNAPSHOT}",
    _S.PAUSED: "resume it",
    _S.REMOVED: "add it again: pgrepl snapshot FILE.json --add NAME, or PgAddTablesOperator",
}


@dataclass(frozen=True)
class Retried:
    """What became of a table that was tried again; `refused` says why it stays errored."""

    table: TableName
    refused: PgReplError | None = None


def pause_tables(access: Access, tables: Iterable[TableName | str]) -> None:
    """Let these tables stand still; their changes are kept in the changelog as long as they are paused.

    A batch that runs is finished. Tables that are paused stay so. Raises ConfigError for names that are not
    among the pipeline's tables, StateError for tables that nothing is applied to.
    """
    refuse_without_lake(
        access.pipeline,
        "pause",
        "nothing is applied that could stand still: leave it out of a publisher's tables, or remove it",
    )
    name = access.pipeline.name
    with access.store("pause") as store:
        _check_place(access, store)
        change(
            store,
            name,
            choose(store, name, tables),
            lambda record: _must_be(record, "paused", (*_APPLIED, _S.PAUSED)),
            lambda record: record.state is _S.PAUSED or store.move(name, record, _S.PAUSED),
        )


def resume_tables(access: Access, tables: Iterable[TableName | str]) -> None:
    """Have paused tables catch up with the others. Tables that are applied to already stay as they are.

    Raises ConfigError for names that are not among the pipeline's tables, StateError for tables that cannot
    be resumed.
    """
    refuse_without_lake(access.pipeline, "resume", "nothing is applied to tables")
    name = access.pipeline.name
    with access.store("resume") as store:
        _check_place(access, store)
        change(
            store,
            name,
            choose(store, name, tables),
            _not_resumable,
            lambda record: record.state in _APPLIED or store.move(name, record, _S.CATCHING_UP),
        )
    _wake(access)


def retry_tables(access: Access, tables: Iterable[TableName | str] | None = None) -> tuple[Retried, ...]:
    """Have errored tables catch up from where they stand, without a new copy; None: all errored ones.

    Whether the cause is gone is looked at as far as source, lake and changelog tell; a cause that is still
    there marks the table errored again. Where the pipeline file has other choices now, and the lake table
    looks the same under them, they hold from here on.

    Tables that were named are tried again all or none: raises what the first of them is refused for, naming
    all (LakeTableError without a copy, ChangelogError when changes are no longer kept, DriftError,
    PrivilegeError, StateError when it is not errored). Otherwise the result says it of each. Raises also
    what concerns all: StateError, ChangelogError, PublicationError, ConfigError for unknown names.
    """
    name = access.pipeline.name
    with access.store("retry") as store:
        evidence.check(access.pipeline, store, access.dsn)
        # The file would be recorded as that by which they were taken.
        check_lake_choice(access.pipeline, recorded(store, name))
        if tables is None:
            errored = [r for r in recorded(store, name).values() if r.state is _S.ERRORED]
            if not errored:
                return ()
        else:
            errored = choose(store, name, tables)
            raise_all(_problems(errored))
            errored = [record for record in errored if record.state is _S.ERRORED]
        with access.source("retry") as source:
            lake = Continuation.open(source, access.pipeline)
            checked = [(record, *_checked(lake, record)) for record in errored]
        if tables is not None:
            raise_all([refused for _, _, refused in checked if refused is not None])
        for record, relation, _ in checked:
            if relation is not None and not store.move(
                name, record, _S.CATCHING_UP, config=lake.choices(record, relation)
            ):
                log.info("table %s was changed by another process meanwhile", record.table)
    if any(relation is not None for _, relation, _ in checked):
        _wake(access)
    return tuple(Retried(record.table, refused) for record, _, refused in checked)


def _check_place(access: Access, store: Store) -> None:
    """For what changes the state alone: what cannot be reached is not compared."""
    evidence.check(access.pipeline, store, access.dsn, lake_may_fail=True, needs_source=False)


def _problems(records: list[TableRecord]) -> list[PgReplError]:
    found = (_must_be(record, "tried again", (*_APPLIED, _S.ERRORED)) for record in records)
    return [problem for problem in found if problem is not None]


def _checked(lake: Continuation, record: TableRecord) -> tuple[Relation | None, PgReplError | None]:
    try:
        relation = lake.check(record)
        lake.choices(record, relation)
    except PgReplError as error:
        return None, error
    return relation, None


def _not_resumable(record: TableRecord) -> PgReplError | None:
    if record.state is _S.PAUSED and record.relation is None:
        return StateError(f"{record.table}: was paused before it was copied", hints.resnapshot(record.table))
    return _must_be(record, "resumed", (*_APPLIED, _S.PAUSED))


def _must_be(record: TableRecord, done: str, states: tuple[TableState, ...]) -> PgReplError | None:
    if record.state in states:
        return None
    instead = hints.named(_INSTEAD[record.state], record.table)
    return StateError(f"{record.table}: is {record.state}, and cannot be {done}", instead)


def _wake(access: Access) -> None:
    """Have a replication app that waits for changes look at its tables. It does so with the next change, too,
    which is why what fails here stops nothing."""
    try:
        writer.mark(changelog_uri(access.pipeline.lake_root))
    except Exception as error:  # noqa: BLE001 - deltalake raises many kinds
        log.warning("the replication app could not be woken: %s", trace_of(error))
