"""Tables of a pipeline whose UPDATE and DELETE the source refuses as long as they are published."""

from __future__ import annotations

from collections.abc import Iterable

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.refused_changes import (
    RefusedChanges,
    read_refused,
)
from airflow_provider_pgrepl.replication.source.connection import Connection


def refused_tables(
    connection: Connection, pipeline: Pipeline, relations: Iterable[Relation]
) -> dict[int, RefusedChanges]:
    """Return why the source refuses changes of these tables, by oid.

    A table without replica identity that `insert_only` lists is left out: rows are only inserted into it.
    """
    planned = pipeline.publication_mode == "create"
    relations = list(relations)
    found = read_refused(connection, relations, pipeline.publication, planned=planned)
    insert_only = frozenset(map(TableName.parse, pipeline.insert_only))
    wanted = {relation.oid for relation in relations if relation.table in insert_only}
    return {oid: refused for oid, refused in found.items() if not (refused.lacks_identity and oid in wanted)}
