"""Problems at the source, and removal of published tables whose changes the source rejects."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from contextlib import closing

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import PgReplError, Remedy, TableError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.partitions import inherited_warnings
from airflow_provider_pgrepl.replication.source.catalog.refused_changes import (
    RefusedChanges,
    all_tables_warning,
)
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relations
from airflow_provider_pgrepl.replication.source.catalog.sequences import refused_sequences
from airflow_provider_pgrepl.replication.source.connection import Connection, connect
from airflow_provider_pgrepl.replication.source.preflight.selection import left_out_warnings, select_tables
from airflow_provider_pgrepl.replication.source.preflight.tables import others_published, refused_tables
from airflow_provider_pgrepl.replication.source.publication import drop_tables, table_names
from airflow_provider_pgrepl.replication.source.server import synchronous_problem
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState

from .tables import followed_names, requested_of

log = logging.getLogger(__name__)
INTERVAL_S = 15.0


def source_problems(
    source: Connection, pipeline: Pipeline, refused: Mapping[TableName, RefusedChanges]
) -> tuple[str, ...]:
    """Return sentences about problems of the application's statements at the source.

    :param refused: the result of `published_refused`
    """
    synchronous = synchronous_problem(source, pipeline.slot)
    return (*([synchronous] if synchronous else []), *map(str, refused.values()))


def source_warnings(
    source: Connection, pipeline: Pipeline, records: Mapping[TableName, TableRecord]
) -> tuple[str, ...]:
    """Return sentences about conditions that may be intended.

    They are rows, tables and values of sequences that the lake does not get, and tables of schema `_pgrepl`
    that other programs' subscribers get.
    """
    sent = all_tables_warning(source, pipeline.slot, pipeline.used_publication)
    left_out: Iterable[str] = ()
    if any(text.endswith(".*") for text in pipeline.tables):
        requested = requested_of(records, followed_names(pipeline))
        left_out = left_out_warnings(select_tables(source, pipeline, requested))
    inherited = inherited_warnings(source, _oids(records))
    return (*left_out, *inherited, *_unread_sequences(source, pipeline, records), *([sent] if sent else []))


def _unread_sequences(
    source: Connection, pipeline: Pipeline, records: Mapping[TableName, TableRecord]
) -> Iterable[str]:
    if not pipeline.sequences:
        return ()
    oids = _oids(records)
    names = {table for table, record in records.items() if record.state is not TableState.REMOVED}
    refused = refused_sequences(source, oids, names)
    return (f"sequence {name}: {why}" for name, why in refused.items())


def published_refused(
    source: Connection, pipeline: Pipeline, records: Mapping[TableName, TableRecord]
) -> dict[TableName, RefusedChanges]:
    """Return the tables that are published now, and whose changes the source rejects for that reason.

    Includes tables of a publication of others that the pipeline does not replicate.
    """
    oids = _oids(records)
    known = read_relations(source, oids, pipeline.publication)
    current = [relation.followed_as(oids[oid]) for oid, relation in known.items()]
    current += others_published(source, pipeline, current)
    found = refused_tables(source, pipeline, [relation for relation in current if relation.membership_oid])
    return {oids.get(oid, refused.table): refused for oid, refused in found.items()}


def _oids(records: Mapping[TableName, TableRecord]) -> dict[int, TableName]:
    """Return the names of the recorded tables by OID, without removed tables."""
    return {
        record.relation.oid: table
        for table, record in records.items()
        if record.relation is not None and record.state is not TableState.REMOVED
    }


def protect_source(
    source: Connection,
    state_db: StateDatabase,
    pipeline: Pipeline,
    refused: Mapping[TableName, RefusedChanges],
) -> None:
    """Drop these tables from the pipeline's own publication, and mark them errored.

    Does nothing if the pipeline does not own the publication.
    """
    recorded = state_db.read_pipeline(pipeline.name)
    if not refused or recorded is None or not recorded.publication_owned:
        return
    records = state_db.read_tables(pipeline.name)
    for table, why in refused.items():
        record = records.get(table)
        if record is None or record.relation is None:
            continue
        names = table_names(source, [record.relation.oid])
        drop_tables(source, recorded.publication, names, pipeline.lock_timeout_s)
        error = TableError(
            f"{table}: taken out of the publication: {why.problem}",
            ". Then ".join(filter(None, (why.fix, errors.resnapshot(table)))),
            Remedy.RESNAPSHOT,
        )
        state_db.mark_errored(pipeline.name, record, error)
        log.error("%s", error)


class SourceProtection:
    """A thread of the replication app that calls `protect_source`, if the pipeline enables that."""

    def __init__(self, dsn: str, state_dsn: str, pipeline: Pipeline) -> None:
        self._dsn = dsn
        self._state_dsn = state_dsn
        self._pipeline = pipeline
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start checking every 15 s. Does nothing if the setting `protect_source` is false."""
        if self._pipeline.protect_source:
            threading.Thread(target=self._run, name="pgrepl-protection", daemon=True).start()

    def stop(self) -> None:
        """Ask the thread to end. Does not wait for a check that is under way."""
        self._stopping.set()

    def look(self) -> None:
        """Check once. Raises PgReplError."""
        role = f"protection {self._pipeline.name}"
        with closing(connect(self._dsn, role)) as source, StateDatabase(self._state_dsn, role) as state_db:
            records = state_db.read_tables(self._pipeline.name)
            refused = published_refused(source, self._pipeline, records)
            protect_source(source, state_db, self._pipeline, refused)

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            try:
                self.look()
            except PgReplError as error:
                log.warning("refused changes could not be looked for: %s", error)
