"""The tables of a pipeline: those of its file, plus those added and minus those removed by operators."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.preflight.selection import (
    RecordedNames,
    RequestedTables,
    SelectedTables,
    lists,
    select_tables,
)
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import Membership, TableRecord, TableState

log = logging.getLogger(__name__)

Records = Mapping[TableName, TableRecord]


def requested_of(records: Records, recorded: RecordedNames | None = None) -> RequestedTables:
    """Return which tables the records show as added, removed and replicated."""
    return RequestedTables(
        recorded=recorded,
        added=frozenset(table for table, record in records.items() if record.membership == "added"),
        removed=frozenset(table for table, record in records.items() if record.membership == "removed"),
        replicated=frozenset(
            table
            for table, record in records.items()
            if record.membership != "removed" and record.state is not TableState.REMOVED
        ),
    )


def belongs(pipeline: Pipeline, table: TableName, record: TableRecord | None) -> bool:
    """Return True if a table is to be replicated: the record's membership decides, or else the pipeline file.

    A pattern in the file also covers tables that do not exist yet.
    """
    if record is not None and record.membership != "configured":
        return record.membership == "added"
    return lists(pipeline, table)


def membership_of(pipeline: Pipeline, table: TableName) -> Membership:
    """Return the membership of a requested table: `configured` if the file lists it, else `added`."""
    return "configured" if lists(pipeline, table) else "added"


def new_tables(connection: Connection, pipeline: Pipeline, records: Records) -> list[TableName]:
    """Return the unrecorded tables that a pattern of the pipeline matches now. Raises SourceError."""
    return unrecorded(select_tables(connection, pipeline, requested_of(records)), records)


def unrecorded(selected: SelectedTables, records: Records) -> list[TableName]:
    """Return the tables that patterns match and that are not recorded, sorted."""
    return sorted(selected.matched - records.keys())


def left_out(pipeline: Pipeline, new: Iterable[TableName]) -> frozenset[TableName]:
    """Return the new tables that a run leaves out, by the pipeline's `new_tables`.

    Raises ConfigError with the names of the new tables if `new_tables` is `error`.
    """
    found = sorted(set(new))
    if not found or pipeline.new_tables == "add":
        return frozenset()
    names = ", ".join(map(str, found))
    if pipeline.new_tables == "error":
        raise ConfigError(
            f"new tables match the patterns of the pipeline: {names}",
            f"{errors.add(','.join(map(str, found)))}; or set new_tables to add or ignore. The others go on",
        )
    log.info("new tables are left out (new_tables: ignore; pgrepl snapshot --add adds them): %s", names)
    return frozenset(found)


def retire_unknown_tables(state_db: StateDatabase, pipeline: Pipeline, records: Records) -> None:
    """Set tables to `removed` that neither the file nor an operator requests.

    Their lake tables stay unchanged.
    """
    for table, record in records.items():
        if record.state is TableState.REMOVED or record.membership == "removed":
            continue
        if not belongs(pipeline, table, record):
            state_db.set_state(pipeline.name, table, TableState.REMOVED)
            log.info("table %s is no longer in the pipeline; its lake table stays as it is", table)


def file_differences(pipeline: Pipeline, records: Records) -> tuple[str, ...]:
    """Return sentences about tables that only the file or only the records have, with the remedy for each.

    A replication continues with the recorded tables; snapshot, add and remove change the records. New tables
    that a pattern matches are left to `new_tables`.
    """
    replicated = {table for table, record in records.items() if record.state is not TableState.REMOVED}
    gone = sorted(table for table in replicated if not belongs(pipeline, table, records[table]))
    named = {TableName.parse(text) for text in pipeline.tables if not text.endswith(".*")}
    removed = {table for table, record in records.items() if record.membership == "removed"}
    absent = sorted(named - replicated - removed)
    found = []
    if gone:
        names = ", ".join(map(str, gone))
        found.append(
            f"no longer in the pipeline file, but still replicated: {names}; add them to the file again, or"
            f" remove them: {errors.remove(*gone)}"
        )
    if absent:
        names = ", ".join(map(str, absent))
        found.append(
            f"in the pipeline file, and not replicated: {names}; add them: pgrepl snapshot FILE.json --add"
            f" '{','.join(map(str, absent))}'"
        )
    return tuple(found)


def read_selected(state_db: StateDatabase, pipeline: Pipeline) -> list[Relation]:
    """Return the relations that were selected, or [] if the state is not set up."""
    return state_db.read_selected(pipeline.name) if state_db.is_set_up() else []


def read_records(state_db: StateDatabase, pipeline: Pipeline) -> Records:
    """Return the recorded tables after migrating the state's schema, or {} if the state is not set up.

    Does not set up the state.
    """
    if not state_db.is_set_up():
        return {}
    state_db.migrate()
    return state_db.read_tables(pipeline.name)
