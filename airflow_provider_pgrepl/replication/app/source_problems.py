"""What is wrong between a pipeline and its source while both work, for status and drift check to say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from airflow_provider_pgrepl.replication.app.tables import requested_of
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.all_tables_publications import all_tables_warning
from airflow_provider_pgrepl.replication.source.catalog.inherited_children import inherited_warnings
from airflow_provider_pgrepl.replication.source.catalog.refused_changes import RefusedChanges
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relations
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.preflight.refused_tables import (
    others_published,
    refused_tables,
)
from airflow_provider_pgrepl.replication.source.preflight.selection import left_out_warnings, select_tables
from airflow_provider_pgrepl.replication.source.synchronous_standbys import synchronous_problem
from airflow_provider_pgrepl.replication.state.table_state import TableState
from airflow_provider_pgrepl.replication.state.tables import TableRecord


def source_problems(
    source: Connection, pipeline: Pipeline, refused: Mapping[TableName, RefusedChanges]
) -> tuple[str, ...]:
    """Return in sentences what the source's own statements suffer; `refused` from `published_refused`."""
    synchronous = synchronous_problem(source, pipeline.slot)
    return (*([synchronous] if synchronous else []), *map(str, refused.values()))


def source_warnings(
    source: Connection, pipeline: Pipeline, records: Mapping[TableName, TableRecord]
) -> tuple[str, ...]:
    """Return in sentences what may be meant to be so: rows and tables that the lake does not get, and tables
    of ours that subscribers of others get."""
    sent = all_tables_warning(source, pipeline.slot, pipeline.used_publication)
    left_out: Iterable[str] = ()
    if any(text.endswith(".*") for text in pipeline.tables):
        left_out = left_out_warnings(select_tables(source, pipeline, requested_of(records)))
    return (*left_out, *inherited_warnings(source, _oids(records)), *([sent] if sent else []))


def published_refused(
    source: Connection, pipeline: Pipeline, records: Mapping[TableName, TableRecord]
) -> dict[TableName, RefusedChanges]:
    """Return the tables that are in the publication now, and whose changes the source refuses.

    Those of another's publication that the pipeline does not replicate count, too.
    """
    oids = _oids(records)
    current = list(read_relations(source, oids, pipeline.publication).values())
    current += others_published(source, pipeline, current)
    found = refused_tables(source, pipeline, [relation for relation in current if relation.membership_oid])
    return {oids.get(oid, refused.table): refused for oid, refused in found.items()}


def _oids(records: Mapping[TableName, TableRecord]) -> dict[int, TableName]:
    """Return the tables by oid."""
    return {
        record.relation.oid: table
        for table, record in records.items()
        if record.relation is not None and record.state is not TableState.REMOVED
    }
