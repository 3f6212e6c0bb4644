"""Read-only checks of source, state and lake before an app is started.

They take no lock and raise only what the app itself would raise. The app checks what they cannot see.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from airflow_provider_pgrepl.errors import ConfigError, StateError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.refused_changes import check_not_published
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.source.preflight.check import check_source, check_surroundings
from airflow_provider_pgrepl.replication.source.preflight.selection import (
    RequestedTables,
    SelectedTables,
    select_tables,
)
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState

from .access import Access
from .tables import Records, requested_at

_WITHOUT_TRIGGER = (
    "nothing was created. Set event_trigger to false, or let those publications list their tables"
)


def check_own_tables(access: Access, state_db: StateDatabase, source: Connection) -> None:
    """Raise PublicationError if other programs' subscribers would receive tables that a snapshot creates.

    These are in schema `_pgrepl`: the tables of the state, and the key of the event trigger.
    """
    pipeline = access.pipeline
    used = pipeline.used_publication
    state_db.check_not_published(pipeline.slot, used if access.state_dsn == access.dsn else "")
    if pipeline.event_trigger and not trigger.is_present(source, pipeline):
        check_not_published(source, pipeline.slot, used, _WITHOUT_TRIGGER)


def check_storage(pipeline: Pipeline) -> None:
    """Check that this host can write the lake. Leaves nothing there.

    Raises LakeError, LakeUnavailableError.
    """
    # Imported here: a process that only parses DAGs may lack the packages for the lake.
    from airflow_provider_pgrepl.replication.storage.probe import check_directory, check_store

    check_directory(pipeline.lake_root)
    check_store(pipeline.lake_root)


def check_replication(access: Access) -> None:
    """Raise the error that would keep the replication app from receiving.

    Checks the server's settings, the replication connection, the slot, the role's rights, that the lake can
    be written, and that it has a changelog.
    """
    check_storage(access.pipeline)
    check_surroundings(access.dsn, access.pipeline)
    _check_lake(access.pipeline, _read_records(access), must_have_begun=True)


def check_snapshot(
    access: Access,
    *,
    resnapshot: Collection[TableName] = (),
    added: Collection[TableName] = (),
    new_epoch: bool = False,
) -> None:
    """Raise the error that would keep the snapshot app from starting.

    :param resnapshot: tables to copy again
    :param added: tables to add to the pipeline
    """
    check_storage(access.pipeline)
    with StateDatabase(access.state_dsn, "preflight") as state_db, access.source("preflight") as source:
        check_own_tables(access, state_db, source)
        requested = _read_requested(access.pipeline, state_db, source)
    records = _read_records(access)
    if not new_epoch:
        _check_lake(access.pipeline, records, must_have_begun=False)
    if records is None or (not new_epoch and _has_begun(access.pipeline, records)):
        check_surroundings(access.dsn, access.pipeline)
    else:
        check_source(access.dsn, access.pipeline, requested, new_epoch=new_epoch, makes_slot=True)
    if records is not None and (resnapshot or added):
        _check_named(access, records, requested, frozenset(resnapshot), frozenset(added))


def check_verification(access: Access, tables: Collection[TableName]) -> None:
    """Raise the error that would keep the verification app from starting.

    :param tables: tables to compare; empty: all
    """
    records = _read_records(access)
    _check_lake(access.pipeline, records, must_have_begun=True)
    if records is not None:
        check_recorded(tables, records)


def check_recorded(tables: Collection[TableName], records: Records) -> None:
    """Raise ConfigError for tables to compare that do not belong to the pipeline."""
    known = {table for table, record in records.items() if record.state is not TableState.REMOVED}
    if unknown := sorted(map(str, set(tables) - known)):
        raise ConfigError(
            f"--tables: not among the tables of the pipeline: {', '.join(unknown)}",
            f"name some of: {', '.join(map(str, sorted(known)))}",
        )


def check_known(wanted: Collection[TableName], selected: SelectedTables, records: Records) -> None:
    """Raise ConfigError for tables to resnapshot that do not belong to the pipeline."""
    unknown = sorted(set(wanted) - selected.tables - records.keys())
    if unknown:
        raise ConfigError(
            f"--tables: not among the tables of the pipeline: {', '.join(map(str, unknown))}",
            "check the name; or add it to `tables` in the pipeline file, or take it with --add, or"
            " PgAddTablesOperator",
        )


def check_addable(wanted: Collection[TableName], selected: SelectedTables, records: Records) -> None:
    """Raise TableError for a table to add that is not recorded yet and cannot be replicated."""
    for table in sorted(set(wanted) - records.keys()):
        if table in selected.problems:
            raise selected.problems[table]


def _check_named(
    access: Access,
    records: Records,
    requested: RequestedTables,
    resnapshot: frozenset[TableName],
    added: frozenset[TableName],
) -> None:
    requested = replace(
        requested,
        added=requested.added | added | (resnapshot & requested.removed),
        removed=requested.removed - added - resnapshot,
    )
    with access.source("preflight") as source:
        selected = select_tables(source, access.pipeline, requested)
    check_known(resnapshot, selected, records)
    check_addable(added, selected, records)


def _check_lake(pipeline: Pipeline, records: Records | None, *, must_have_begun: bool) -> None:
    # Imported here: this module reads the lake, and a process that only parses DAGs may lack the packages for
    # it.
    from .epoch import check_lake_is_there

    if records is not None:
        check_lake_is_there(pipeline, records, must_have_begun=must_have_begun)


def _has_begun(pipeline: Pipeline, records: Records) -> bool:
    """Return True if the state records the position of a table, or tables whose copies all failed."""
    from .epoch import find_epoch

    copied = any(record.position_lsn is not None for record in records.values())
    return copied or (bool(records) and find_epoch(pipeline) is not None)


def _read_requested(pipeline: Pipeline, state_db: StateDatabase, source: Connection) -> RequestedTables:
    """Return the recorded requests; none if the state cannot be read yet."""
    try:
        return requested_at(source, state_db, pipeline)
    except StateError:
        return RequestedTables()


def _read_records(access: Access) -> Records | None:
    """Return the recorded tables, {} if the state is not set up, or None if it cannot be read yet."""
    with StateDatabase(access.state_dsn, f"preflight {access.pipeline.name}") as state_db:
        try:
            return state_db.read_tables(access.pipeline.name) if state_db.is_set_up() else {}
        except StateError:
            return None
