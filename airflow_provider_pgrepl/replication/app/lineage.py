"""The lineage of a pipeline for OpenLineage: its source tables, its lake tables, and their columns.

Names follow https://openlineage.io/docs/spec/naming.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import pyarrow as pa
from deltalake import Schema

from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.lake.history.table import history_schema, history_uri
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.lake import parse_uri
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline, copied_options
from airflow_provider_pgrepl.replication.source.connection import server_and_database
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState
from airflow_provider_pgrepl.replication.values import lake_schema

from .access import Access


@dataclass(frozen=True)
class DatasetColumn:
    """A column of a dataset. `type`: PostgreSQL's name of it at the source, Delta's in the lake.

    `source_column`: the column whose values the lake column has, None at the source and for a bookkeeping
    column.
    """

    name: str
    type: str
    source_column: str | None = None


@dataclass(frozen=True)
class LineageDataset:
    """A table under its names in OpenLineage. `is_delta`: it is a Delta table."""

    namespace: str
    name: str
    columns: tuple[DatasetColumn, ...] = ()
    is_delta: bool = False


@dataclass(frozen=True)
class TableLineage:
    """A source table, and the tables of the lake that get its rows."""

    source: LineageDataset
    lake: tuple[LineageDataset, ...]


def read_lineage(access: Access, tables: Collection[TableName] = ()) -> list[TableLineage]:
    """Return the lineage of the recorded tables of a pipeline, by name. Reads the state database only.

    A table without a finished snapshot has no lineage yet. Without lake tables, the changelog gets the rows.

    :param tables: the tables to return; empty: all
    :raises StateError: for a state of another version
    :raises SourceConnectionError: if the state database does not answer
    """
    pipeline = access.pipeline
    with StateDatabase(access.state_dsn, f"lineage {pipeline.name}") as state_db:
        records = state_db.read_tables(pipeline.name) if state_db.is_set_up() else {}
    (host, port), database = server_and_database(access.dsn)
    return [
        TableLineage(
            LineageDataset(
                f"postgres://{host}:{port}",
                f"{database}.{relation.source_table.schema}.{relation.source_table.name}",
                tuple(DatasetColumn(column.name, column.type_name) for column in relation.columns),
            ),
            tuple(_lake_tables(pipeline, record, relation)),
        )
        for table, record in sorted(records.items())
        if record.state is not TableState.REMOVED
        and (relation := record.relation) is not None
        and (not tables or table in tables)
    ]


def _lake_tables(pipeline: Pipeline, record: TableRecord, relation: Relation) -> Iterator[LineageDataset]:
    if not pipeline.has_lake_tables:
        yield LineageDataset(*dataset_name(changelog_uri(pipeline.lake_root)), is_delta=True)
        return
    options = copied_options(pipeline, record.config, record.table)
    built = {f"{pipeline.lake_root}/{record.table.path}": lake_schema(relation, options)}
    if options.policy.history:
        built[history_uri(pipeline.lake_root, record.table)] = history_schema(relation, options)
    at_source = {column.name for column in relation.columns}
    for uri, schema in built.items():
        yield LineageDataset(*dataset_name(uri), tuple(_lake_columns(schema, at_source)), is_delta=True)


def _lake_columns(schema: pa.Schema, at_source: Collection[str]) -> Iterator[DatasetColumn]:
    for field in Schema.from_arrow(schema).fields:
        delta_type = getattr(field.type, "type", "")
        yield DatasetColumn(field.name, str(delta_type), field.name if field.name in at_source else None)


def dataset_name(uri: str) -> tuple[str, str]:
    """Return namespace and name of a table of the lake: `s3://bucket` and `path`, or `file` and `/path`."""
    parts = parse_uri(uri)
    if parts is None or parts[0] == "file":
        return "file", uri if parts is None else parts[2]
    scheme, host, path = parts
    return f"{scheme}://{host}", path.strip("/")
