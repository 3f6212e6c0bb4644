"""Columns that have the values of excluded ones, under names that no setting excludes.

A child by plain inheritance is copied and sent as a table of its own, so a setting that names the parent's
column does not name the child's. The two have one name: PostgreSQL renames an inherited column together with
its parent's. A generated column may be made of an excluded one, as that for full-text search is of several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from airflow_provider_pgrepl.replication.postgres.names import ColumnName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relations
from airflow_provider_pgrepl.replication.source.connection import Connection, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

_PARENTS = """
WITH RECURSIVE above (child, oid) AS (
    SELECT i.inhrelid, i.inhparent
    FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
    WHERE i.inhrelid = ANY (%s::oid[]) AND NOT c.relispartition
    UNION
    SELECT above.child, i.inhparent FROM above JOIN pg_catalog.pg_inherits i ON i.inhrelid = above.oid
)
SELECT child::bigint, oid::bigint FROM above ORDER BY child, oid
"""
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


class RecordedRules(Protocol):
    """The settings that named tables and columns when these were recorded."""

    def problems(self, relation: Relation) -> Iterable[str]:
        """The settings that named a table or its columns by earlier names only, in sentences."""


def derived_exclusions(
    connection: Connection,
    pipeline: Pipeline,
    relations: Mapping[int, Relation],
    recorded: RecordedRules | None,
) -> Iterator[tuple[int, str]]:
    """Yield the oid of each of these tables that publishes such a column, with a sentence that says so.
    Raises SourceConnectionError, SourceError."""
    excluded = frozenset(map(ColumnName.parse, pipeline.exclude_columns))
    if excluded:
        yield from _inherited(connection, excluded, relations, recorded)
        yield from _generated(connection, excluded, relations)


def _inherited(
    connection: Connection,
    excluded: frozenset[ColumnName],
    relations: Mapping[int, Relation],
    recorded: RecordedRules | None,
) -> Iterator[tuple[int, str]]:
    with source_errors("looking for inherited columns"):
        pairs = rows(connection, _PARENTS, (list(relations),))
    parents = read_relations(connection, {parent for _, parent in pairs}, None) if pairs else {}
    for oid, parent_oid in pairs:
        child, parent = relations[oid], parents.get(parent_oid)
        if parent is None:
            continue
        for column in (*child.columns, *child.unpublished):
            own, inherited = (ColumnName(one.table, column.name) for one in (child, parent))
            if inherited in excluded and own not in excluded:
                yield oid, f"inherits column {inherited}, which exclude_columns names: name {own} there"
        for problem in recorded.problems(parent) if recorded is not None else ():
            yield oid, f"inherits from {parent.table}: {problem}"


def _generated(
    connection: Connection, excluded: frozenset[ColumnName], relations: Mapping[int, Relation]
) -> Iterator[tuple[int, str]]:
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
