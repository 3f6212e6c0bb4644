"""The tables of a pipeline: those of its file, plus those added and minus those removed by operators."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.followed_names import FollowedNames
from airflow_provider_pgrepl.replication.source.catalog.relations import find_tables
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.preflight.selection import (
    RecordedNames,
    RequestedTables,
    SelectedTables,
    lists,
    select_tables,
)
from airflow_provider_pgrepl.replication.source.server import SourceRecord, known_source, read_server
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import Membership, TableRecord, TableState

if TYPE_CHECKING:
    from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex

log = logging.getLogger(__name__)

Records = Mapping[TableName, TableRecord]


def requested_of(
    records: Records, followed: FollowedNames | None, recorded: RecordedNames | None = None
) -> RequestedTables:
    """Return which tables the records show as added, removed and replicated.

    :param followed: the names of renamed tables
    """
    return RequestedTables(
        recorded=recorded,
        added=frozenset(table for table, record in records.items() if record.membership == "added"),
        removed=frozenset(table for table, record in records.items() if record.membership == "removed"),
        replicated=frozenset(
            table
            for table, record in records.items()
            if record.membership != "removed" and record.state is not TableState.REMOVED
        ),
        followed=followed,
    )


def followed_names(pipeline: Pipeline) -> FollowedNames:
    """Return the names of renamed tables that the lake has recorded, which are those of the recorded source.

    Raises LakeError, LakeUnavailableError.
    """
    return FollowedNames.read(pipeline, lambda: _index(pipeline).pipeline_names())


def followed_at(
    source: Connection, pipeline: Pipeline, records: Records, recorded: SourceRecord | None
) -> FollowedNames:
    """Return the names of renamed tables at this source, which may be another one than the recorded one.

    In another database, the same OIDs are other tables. There, a table is found by the name that it had last
    at the recorded source, as far as the records show it. Raises LakeError, LakeUnavailableError.
    """
    server = read_server(source)
    if recorded is not None and not known_source(recorded, server).differs(server):
        return followed_names(pipeline)
    relations = (record.relation for record in records.values())
    moved = {one.renamed_to: one.table for one in relations if one is not None and one.renamed_to is not None}
    found = find_tables(source, moved)
    return FollowedNames(pipeline, {oid: moved[name] for name, oid in found.items()})


def record_names(pipeline: Pipeline, state_db: StateDatabase, epoch: Epoch) -> None:
    """Record the names of tables that were copied by an earlier version of this package, so that they can be
    followed. Raises LakeError, LakeUnavailableError, and what the state raises."""
    if not FollowedNames(pipeline).follows_any:
        return
    index = _index(pipeline)
    recorded = FollowedNames.read(pipeline, index.pipeline_names)
    # Records that are not of this epoch may be of another database.
    oids = set(index.relation_ids()) - recorded.recorded.keys()
    # If there are several records of one table, the one to which changes are applied has its name.
    found = state_db.read_tables(pipeline.name).values()
    records = sorted(found, key=lambda record: record.state.needs_changes)
    relations = [record.relation for record in records if record.relation and record.relation.oid in oids]
    index.add_selected(epoch, relations)


def _index(pipeline: Pipeline) -> RelationIndex:
    # Import this here: operators import this module, and must not import deltalake.
    from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri

    return RelationIndex(relations_uri(pipeline.lake_root))


def requested_at(source: Connection, state_db: StateDatabase, pipeline: Pipeline) -> RequestedTables:
    """Return which tables the state shows as added, removed and replicated, for a check before a run.

    Raises StateError for a state that cannot be read yet.
    """
    if not state_db.is_set_up():
        return RequestedTables()
    records, recorded = state_db.read_tables(pipeline.name), state_db.read_pipeline(pipeline.name)
    return requested_of(records, followed_at(source, pipeline, records, recorded))


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
    """Return the unrecorded tables that a pattern of the pipeline matches now. Raises SourceError.

    The source has been checked to be the recorded one.
    """
    requested = requested_of(records, followed_names(pipeline))
    return unrecorded(select_tables(connection, pipeline, requested), records)


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
