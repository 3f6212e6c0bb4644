"""Generated columns that are made of excluded ones, as a column for full-text search is of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.names import ColumnName
from airflow_provider_pgrepl.replication.relation import Relation
from airflow_provider_pgrepl.replication.source.connection import Connection, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

# An expression cannot hold the whole row, nor another generated column. A partition can have its own.
_MADE_OF = """
SELECT DISTINCT a.attrelid::bigint, a.attname::text, source.attname::text
FROM pg_catalog.pg_attribute a
    JOIN pg_catalog.pg_attrdef e ON e.adrelid = a.attrelid AND e.adnum = a.attnum
    JOIN pg_catalog.pg_depend d ON d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = a.attrelid
        AND (d.classid = 'pg_catalog.pg_attrdef'::regclass AND d.objid = e.oid
            OR d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = a.attrelid AND d.objsubid = a.attnum)
    JOIN pg_catalog.pg_attribute source ON source.attrelid = a.attrelid AND source.attnum = d.refobjsubid
WHERE a.attrelid = ANY (%s::oid[]) AND a.attgenerated <> '' AND source.attnum <> a.attnum
ORDER BY 1, 2, 3
"""


def generated_exclusions(
    connection: Connection, pipeline: Pipeline, relations: Mapping[int, Relation]
) -> Iterator[tuple[int, str]]:
    """Yield the oid of each of these tables that publishes a generated column which is made of an excluded
    one, with a sentence that says so. Raises SourceConnectionError, SourceError."""
    excluded = frozenset(map(ColumnName.parse, pipeline.exclude_columns))
    tables = {one.table for one in excluded}
    wanted = {oid: one for oid, one in relations.items() if one.table in tables}
    if not wanted:
        return
    holders = {part.oid: oid for oid, one in wanted.items() for part in one.partitions} | {
        oid: oid for oid in wanted
    }
    with source_errors("looking for generated columns"):
        found = rows(connection, _MADE_OF, (list(holders),))
    made_of = dict.fromkeys((holders[oid], generated, source) for oid, generated, source in found)
    for oid, *names in made_of:
        relation = wanted[oid]
        generated, source = (ColumnName(relation.table, name) for name in names)
        is_published = any(column.name == generated.name for column in relation.columns)
        if is_published and source in excluded and generated not in excluded:
            yield (
                oid,
                f"column {generated} is generated from {source}, which exclude_columns names: name it there",
            )
