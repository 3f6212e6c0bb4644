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
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relations
from airflow_provider_pgrepl.replication.source.connection import Connection, rows
from airflow_provider_pgrepl.replication.source.publication import read_publication
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

_OIDS = """
SELECT c.oid::bigint FROM unnest(%s::text[], %s::text[]) AS named (schema, name)
    JOIN pg_catalog.pg_namespace n ON n.nspname = named.schema
    JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = named.name
"""


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
        schemas, tables = zip(*((name.schema, name.name) for name in names), strict=True)
        oids = [oid for (oid,) in rows(connection, _OIDS, (list(schemas), list(tables)))]
    return list(read_relations(connection, oids, pipeline.publication).values())
