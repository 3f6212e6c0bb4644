"""Excluded columns that a child by plain inheritance has from its parent.

The child is copied and sent as a table of its own, so a setting that names the parent's column does not name
the child's. The two have one name: PostgreSQL renames an inherited column together with its parent's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.names import ColumnName
from airflow_provider_pgrepl.replication.relation import Relation
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


class RecordedRules(Protocol):
    """The settings that named tables and columns when these were recorded."""

    def problems(self, relation: Relation) -> Iterable[str]:
        """The settings that named a table or its columns by earlier names only, in sentences."""


def inherited_exclusions(
    connection: Connection,
    pipeline: Pipeline,
    relations: Mapping[int, Relation],
    recorded: RecordedRules | None,
) -> Iterator[tuple[int, str]]:
    """Yield the oid of each of these tables that inherits an excluded column which no setting names for it,
    with a sentence that says so. Raises SourceConnectionError, SourceError."""
    excluded = frozenset(map(ColumnName.parse, pipeline.exclude_columns))
    if not excluded:
        return
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
