"""What the lake or the stream can have against a table, from its kind and its shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from airflow_provider_pgrepl.errors import one_line
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier, show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import STATE_SCHEMA, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relations
from airflow_provider_pgrepl.replication.source.connection import Connection

_KINDS = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "S": "a sequence",
    "i": "an index",
    "I": "an index",
    "c": "a composite type",
    "t": "a TOAST table",
}
_PERSISTENCE = {"u": "an unlogged table", "t": "a temporary table"}
_OWN_COLUMNS = {"_pgrepl_commit_lsn": "commit_lsn_column", "_pgrepl_commit_ts": "commit_ts_column"}


def is_system(schema: str) -> bool:
    """Whether a schema is PostgreSQL's own, or ours."""
    return schema.startswith("pg_") or schema in ("information_schema", STATE_SCHEMA)


def why_no_table(table: TableName, facts: tuple[Any, ...] | None) -> str | None:
    """Why what has this name cannot be replicated, by its relkind and relpersistence; None when it can."""
    if is_system(table.schema):
        return "in a system schema, which is never replicated"
    if facts is None:
        return "does not exist"
    relkind, persistence = facts[0], facts[1]
    if relkind not in ("r", "p"):
        return f"is {_KINDS.get(relkind, 'no table')}; only tables can be replicated"
    if persistence in _PERSISTENCE:
        return f"is {_PERSISTENCE[persistence]}, which PostgreSQL does not replicate"
    return None


def shape_problems(connection: Connection, pipeline: Pipeline, relation: Relation) -> Iterator[str]:
    """What is wrong with a table's columns, what the pipeline chooses for them, and its partitions."""
    # Imported here: types bring pyarrow along, which who only asks for tables and slots need not wait for.
    from airflow_provider_pgrepl.replication.values import choice_problems

    if not relation.columns and not relation.unpublished:
        yield from _columnless_problems(pipeline, relation)
    yield from _name_problems(pipeline, relation)
    if generated := [show_identifier(column.name) for column in relation.unpublished if column.is_key]:
        yield (
            f"its key holds generated column {', '.join(generated)}, whose values the publication does not"
            " carry, so that rows cannot be matched. Give it another key; or, from PostgreSQL 18 on, let the"
            " publication hold stored ones: publish_generated_columns = stored"
        )
    yield from choice_problems(relation, pipeline.choices(relation.table))
    if relation.relkind == "p":
        yield from _leaf_problems(connection, pipeline, relation)


def _columnless_problems(pipeline: Pipeline, relation: Relation) -> Iterator[str]:
    """The rows of a table without columns are in the lake by what the lake table has beside them."""
    if not _has_own_columns(pipeline, relation):
        yield (
            "has no columns, and a lake table needs at least one; set commit_lsn_column to true, which gives"
            " it one"
        )
    elif relation.replica_identity == "f":
        yield (
            "has no columns, so that deleted rows cannot be told from others. ALTER TABLE"
            f" {relation.table} REPLICA IDENTITY DEFAULT, with which PostgreSQL refuses to delete rows"
            " while the table is published, and list it in insert_only"
        )


def _has_own_columns(pipeline: Pipeline, relation: Relation) -> bool:
    """Whether the lake table has columns beside those of the source."""
    choices = pipeline.choices(relation.table)
    is_soft = choices.policy.deletes == "soft"
    return is_soft or choices.commit_lsn_column or choices.commit_ts_column


def _name_problems(pipeline: Pipeline, relation: Relation) -> Iterator[str]:
    from airflow_provider_pgrepl.replication.values import DELETED

    names: dict[str, str] = {}
    for column in (*relation.columns, *relation.unpublished):
        lower, shown = column.name.casefold(), show_identifier(column.name)
        if lower in names:
            first, second = (one_line(quote_identifier(name)) for name in (names[lower], column.name))
            yield (
                f"columns {first} and {second} differ only in case, which lake tables cannot"
                " tell apart; rename one of them"
            )
        if lower in _OWN_COLUMNS and getattr(pipeline, _OWN_COLUMNS[lower]):
            option = _OWN_COLUMNS[lower]
            yield f"column {shown} is one that the lake table gets anyway; set {option} to false"
        if lower == DELETED and pipeline.choices(relation.table).policy.deletes == "soft":
            yield f"column {shown} is one that the lake table gets where deletes are soft; rename it"
        names[lower] = column.name


def _leaf_problems(connection: Connection, pipeline: Pipeline, relation: Relation) -> Iterator[str]:
    planned = pipeline.publication_mode == "create"
    oids = [leaf.oid for leaf in relation.partitions]
    published = read_relations(connection, oids, pipeline.publication, planned=planned)
    insert_only = relation.table in map(TableName.parse, pipeline.insert_only)
    for leaf in relation.partitions:
        problem = why_no_table(leaf.table, (leaf.relkind, leaf.persistence))
        if problem:
            yield f"its partition {leaf.table} cannot be published: {problem}"
        elif not insert_only and not _same_identity(relation, published[leaf.oid]):
            yield (
                f"its partition {leaf.table} has another key or replica identity than the partitioned"
                " table; give it the same (each partition has its own REPLICA IDENTITY)"
            )


def _same_identity(relation: Relation, leaf: Relation) -> bool:
    """Whether changes in a partition come with all that tells the rows of the partitioned table apart."""
    if "f" in (leaf.replica_identity, relation.replica_identity):
        return leaf.replica_identity == "f"
    key = {column.name for column in relation.key_columns}
    return bool(key) and key == {column.name for column in leaf.key_columns}
