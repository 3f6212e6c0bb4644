"""Tables of a pipeline whose UPDATE and DELETE the source refuses as long as they are published."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.refused_changes import RefusedChanges, read_refused
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relations
from airflow_provider_pgrepl.replication.source.connection import Connection, rows
from airflow_provider_pgrepl.replication.source.publication import read_publication
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

_OIDS = """
SELECT c.oid::bigint FROM unnest(%s::text[], %s::text[]) AS named (schema, name)
    JOIN pg_catalog.pg_namespace n ON n.nspname = named.schema
    JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = named.name
"""

# A publication of a table holds its children by plain inheritance as well.
_WITH_CHILDREN = """
WITH RECURSIVE below (oid) AS (
    SELECT oid FROM unnest(%s::oid[]) AS named (oid)
    UNION
    SELECT i.inhrelid FROM below JOIN pg_catalog.pg_inherits i ON i.inhparent = below.oid
)
SELECT oid::bigint FROM below
"""


def refused_once_published(
    connection: Connection, pipeline: Pipeline, tables: Collection[TableName]
) -> list[RefusedChanges]:
    """Return why the source would refuse changes of these tables, and of those below them, if the pipeline's
    publication, which is not there yet, were created for them."""
    with source_errors("listing the tables to publish"):
        oids = [oid for (oid,) in rows(connection, _WITH_CHILDREN, (_oids(connection, tables),))]
    relations = read_relations(connection, oids, pipeline.publication, planned=True).values()
    found = refused_tables(connection, replace(pipeline, publication_mode="create"), relations)
    return sorted(set(found.values()), key=lambda refused: refused.table)


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


def others_published(
    connection: Connection, pipeline: Pipeline, relations: Iterable[Relation]
) -> list[Relation]:
    """Return tables of a publication that is not the pipeline's own, other than these.

    A publication of all tables, or of a schema, takes in tables that the pipeline does not replicate.
    """
    if pipeline.publication_mode != "use":
        return []
    publication = read_publication(connection, pipeline.publication)
    names = frozenset() if publication is None else publication.tables
    names -= {relation.table for relation in relations}
    if not names:
        return []
    with source_errors("listing published tables"):
        oids = _oids(connection, names)
    return list(read_relations(connection, oids, pipeline.publication).values())


def _oids(connection: Connection, tables: Collection[TableName]) -> list[int]:
    schemas, names = zip(*((table.schema, table.name) for table in tables), strict=True)
    return [oid for (oid,) in rows(connection, _OIDS, (list(schemas), list(names)))]
