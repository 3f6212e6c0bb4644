"""The checks of each table of a pipeline: columns, rights, locks and publication."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from airflow_provider_pgrepl.errors import (
    PgReplError,
    PrivilegeError,
    PublicationError,
    ServerSettingError,
    one_line,
)
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier, show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import STATE_SCHEMA, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.owner_code import read_owner_code, refused_code
from airflow_provider_pgrepl.replication.source.catalog.refused_changes import (
    RESNAPSHOT_OF_ALTERED,
    RefusedChanges,
    read_refused,
)
from airflow_provider_pgrepl.replication.source.catalog.relations import (
    COLUMN_LISTS_SINCE,
    memberships,
    read_relations,
)
from airflow_provider_pgrepl.replication.source.connection import Connection, acting_role_hint, row, rows
from airflow_provider_pgrepl.replication.source.copy.imported_snapshot import lock_tables
from airflow_provider_pgrepl.replication.source.publication import read_publication
from airflow_provider_pgrepl.replication.source.server import Server
from airflow_provider_pgrepl.replication.source.server_errors import LOCKS_SETTING, source_errors

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
# https://www.postgresql.org/docs/current/runtime-config-locks.html#GUC-MAX-LOCKS-PER-TRANSACTION
_LOCKS = """
SELECT own.locks * sum(s.setting::bigint)::bigint,
    own.locks
FROM pg_catalog.pg_settings s,
    (SELECT pg_catalog.current_setting('max_locks_per_transaction')::bigint AS locks) own
WHERE s.name IN ('max_connections', 'max_prepared_transactions', 'max_worker_processes', 'max_wal_senders',
    'autovacuum_max_workers')
GROUP BY own.locks
"""
_RIGHTS = """
SELECT c.oid::bigint, pg_catalog.format('%%I', n.nspname), pg_catalog.format('%%I.%%I', n.nspname, c.relname),
    pg_catalog.has_schema_privilege(n.oid, 'USAGE'), pg_catalog.has_table_privilege(c.oid, 'SELECT'),
    pg_catalog.row_security_active(c.oid), pg_catalog.pg_has_role(c.relowner, 'USAGE')
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY (%s::oid[]) ORDER BY 3
"""
_CREATE_RIGHT = """
SELECT current_user::text, pg_catalog.current_database()::text,
    pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE')
"""
Problems = Iterator[PgReplError]
_OIDS = """
SELECT c.oid::bigint FROM unnest(%s::text[], %s::text[]) AS named (schema, name)
    JOIN pg_catalog.pg_namespace n ON n.nspname = named.schema
    JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = named.name
"""
_WITH_FILTER = """
SELECT m.oid::bigint FROM pg_catalog.pg_publication_rel m
WHERE m.oid = ANY (%s::oid[]) AND m.prqual IS NOT NULL
"""
# Of these storages, values of more than some 2 kB are moved out of the row (TOAST).
_LARGE = """
SELECT a.attrelid::bigint, a.attnum FROM pg_catalog.pg_attribute a
WHERE a.attrelid = ANY (%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped AND a.attstorage IN ('e', 'x')
"""
# A publication of a table includes its children by plain inheritance as well.
_WITH_CHILDREN = """
WITH RECURSIVE below (oid) AS (
    SELECT oid FROM unnest(%s::oid[]) AS named (oid)
    UNION
    SELECT i.inhrelid FROM below JOIN pg_catalog.pg_inherits i ON i.inhparent = below.oid
)
SELECT oid::bigint FROM below
"""


def is_system(schema: str) -> bool:
    """Return True if a schema is PostgreSQL's own, or this package's."""
    return schema.startswith("pg_") or schema in ("information_schema", STATE_SCHEMA)


def why_no_table(table: TableName, facts: tuple[Any, ...] | None) -> str | None:
    """Return why the relation of this name cannot be replicated, or None if it can.

    `facts`: its relkind and relpersistence, or None if it does not exist.
    """
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
    """Yield the problems of a table's columns, of the pipeline's settings for them, and of its partitions."""
    # Import here: this module loads pyarrow, which callers that only read tables and slots do not need.
    from airflow_provider_pgrepl.replication.values import option_problems

    if not relation.columns and not relation.unpublished:
        yield from _columnless_problems(pipeline, relation)
    yield from _name_problems(pipeline, relation)
    if generated := [show_identifier(column.name) for column in relation.unpublished if column.is_key]:
        yield (
            f"its key holds generated column {', '.join(generated)}, whose values the publication does not"
            " carry, so that rows cannot be matched. Give it another key; or, from PostgreSQL 18 on, let the"
            " publication hold stored ones: publish_generated_columns = stored"
        )
    yield from option_problems(relation, pipeline.options(relation.table))
    if relation.relkind == "p":
        yield from _leaf_problems(connection, pipeline, relation)


def _columnless_problems(pipeline: Pipeline, relation: Relation) -> Iterator[str]:
    """Yield the problems of a table without columns. Its lake table needs columns of its own for the rows."""
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
    """Return True if the lake table has columns in addition to those of the source."""
    options = pipeline.options(relation.table)
    is_soft = options.policy.deletes == "soft"
    return is_soft or options.commit_lsn_column or options.commit_ts_column


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
        if lower == DELETED and pipeline.options(relation.table).policy.deletes == "soft":
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
    """Return True if changes in a partition include all that identifies rows of the partitioned table."""
    if "f" in (leaf.replica_identity, relation.replica_identity):
        return leaf.replica_identity == "f"
    key = {column.name for column in relation.key_columns}
    return bool(key) and key == {column.name for column in leaf.key_columns}


def right_problems(connection: Connection, relations: Iterable[Relation]) -> Problems:
    """Yield errors if the role cannot read all rows of these existing tables and their partitions."""
    with source_errors("reading the rights"):
        found = rows(connection, _RIGHTS, (_with_leaves(relations),))
        role = row(connection, "SELECT pg_catalog.quote_ident(current_user::text)")[0]
        acting = acting_role_hint(connection)
    closed = sorted({one_line(schema) for _, schema, _, usage, *_ in found if not usage})
    unreadable = [one_line(table) for _, _, table, _, select, *_ in found if not select]
    filtered = [one_line(table) for *_, table, _, _, policy, _ in found if policy]
    if closed:
        schemas = ", ".join(closed)
        yield PrivilegeError(
            f"role {role} lacks USAGE on schema {schemas}",
            f"{acting}GRANT USAGE ON SCHEMA {schemas} TO {role}",
        )
    if unreadable:
        tables = ", ".join(unreadable)
        yield PrivilegeError(
            f"role {role} lacks SELECT on {tables}", f"{acting}GRANT SELECT ON {tables} TO {role}"
        )
    if filtered:
        yield PrivilegeError(
            f"row-level security would hide rows of {', '.join(filtered)} from role {role}",
            f"ALTER ROLE {role} BYPASSRLS, or use the tables' owner",
        )


def lock_problems(connection: Connection, dsn: str, relations: list[Relation]) -> Problems:
    """Yield an error if the server cannot hold locks on all tables and partitions, as a snapshot needs.

    The number of possible locks depends on more than settings: if it may be too small, the locks are tried.
    """
    needed = len(_with_leaves(relations))
    with source_errors("reading the room for locks"):
        room, setting = row(connection, _LOCKS)
    if needed <= room // 2:
        return
    with source_errors("trying locks"), connection.cursor() as cursor:
        cursor.execute("BEGIN")
        try:
            lock_tables(connection, dsn, relations)
        except ServerSettingError:
            yield ServerSettingError(
                f"a snapshot locks {needed} tables and partitions, more than the server has room for:"
                f" {LOCKS_SETTING} is {setting}",
                f"raise {LOCKS_SETTING} (needs a restart) to {2 * -(-setting * needed // room)}, or leave"
                " partitioned tables out",
            )
        except PgReplError:
            return  # another session holds a lock, which the snapshot will wait for
        finally:
            cursor.execute("ROLLBACK")


def code_problems(connection: Connection, pipeline: Pipeline, relations: Iterable[Relation]) -> Problems:
    """Yield an error for each table whose reading can run code of its owner with this role's rights."""
    if pipeline.trust_table_owners:
        return
    for relation in relations:
        code = read_owner_code(connection, _with_leaves([relation]))
        if code:
            found = dict.fromkeys(one for of_table in code.values() for one in of_table)
            yield refused_code(connection, relation.table, found)


def _with_leaves(relations: Iterable[Relation]) -> list[int]:
    return sorted({oid for one in relations for oid in (one.oid, *(part.oid for part in one.partitions))})


def publication_problems(
    connection: Connection, pipeline: Pipeline, server: Server, relations: list[Relation]
) -> Problems:
    """Yield the reasons why the publication does not include these tables, or cannot be made to."""
    check: Callable[..., Problems] = (
        _used_publication_problems if pipeline.publication_mode == "use" else _created_publication_problems
    )
    yield from check(connection, pipeline, server, relations)


def _used_publication_problems(
    connection: Connection, pipeline: Pipeline, _: Server, relations: list[Relation]
) -> Problems:
    name = pipeline.publication
    publication = read_publication(connection, name)
    if publication is None:
        yield PublicationError(
            f"there is no publication {name}", "create it, or set publication_mode to create"
        )
        return
    operations = ("insert", "update", "delete", "truncate")
    missing = [operation for operation in operations if not getattr(publication, operation)]
    if missing:
        yield PublicationError(
            f"publication {name} does not publish {', '.join(missing)}",
            f"ALTER PUBLICATION {quote_identifier(name)} SET (publish = 'insert, update, delete, truncate')"
            f"; {RESNAPSHOT_OF_ALTERED}",
        )
    if not publication.via_root and any(relation.relkind == "p" for relation in relations):
        yield PublicationError(
            f"publication {name} publishes partitions under their own names",
            f"ALTER PUBLICATION {quote_identifier(name)} SET (publish_via_partition_root = true);"
            f" {RESNAPSHOT_OF_ALTERED}",
        )
        return
    names = [relation.source_table for relation in relations]
    outside = [str(name) for name in names if name not in publication.tables]
    if outside:
        tables = ", ".join(outside)
        yield PublicationError(
            f"publication {name} does not hold {tables}",
            f"ALTER PUBLICATION {quote_identifier(name)} ADD TABLE {tables}",
        )


def _created_publication_problems(
    connection: Connection, pipeline: Pipeline, server: Server, relations: list[Relation]
) -> Problems:
    publication = read_publication(connection, pipeline.publication)
    if publication is None and server.in_recovery:
        yield PublicationError(
            "a publication cannot be created on a standby",
            "create it on the primary, and set publication_mode to use",
        )
        return
    with source_errors("reading the rights"):
        role, database, may_create = row(connection, _CREATE_RIGHT)
        acting = acting_role_hint(connection)
        found = rows(connection, _RIGHTS, ([relation.oid for relation in relations],))
    if publication is None and not may_create:
        yield PrivilegeError(
            f"role {role} may not create a publication: it lacks CREATE on database {database}",
            f"{acting}GRANT CREATE ON DATABASE {quote_identifier(database)} TO {quote_identifier(role)}, or"
            " let its owner create the publication, and set publication_mode to use",
        )
    published = frozenset() if publication is None else publication.tables
    unpublished = {relation.oid for relation in relations if relation.source_table not in published}
    foreign = [one_line(table) for oid, _, table, *_, owner in found if not owner and oid in unpublished]
    if foreign:
        yield PrivilegeError(
            f"role {role} may not publish {', '.join(foreign)}: only a table's owner may",
            f"{acting}GRANT the owning role TO {quote_identifier(role)}, or let the owner create the"
            " publication, and set publication_mode to use",
        )


def table_warnings(
    connection: Connection, relations: Collection[Relation], pipeline: Pipeline
) -> Iterator[str]:
    """Yield warnings about unpublished generated columns, tables without replica identity, and row filters
    on tables with large values."""
    large = _large_values_in_filters(connection, relations, pipeline)
    for relation in relations:
        yield from _unpublished_columns(relation, pipeline)
        if relation.replica_identity == "n" or (
            relation.replica_identity != "f" and not relation.key_columns
        ):
            yield (
                f"{relation.table}: has no replica identity, so PostgreSQL refuses UPDATE and DELETE on it as"
                " long as it is published"
            )
        elif names := large.get(relation.oid):
            yield (
                f"{relation.table}: when an UPDATE moves a row into the publication's row filter, PostgreSQL"
                f" does not send large values (TOAST) of {', '.join(names)} that it does not change, and the"
                " table stops. REPLICA IDENTITY FULL prevents this, unless there is a column list"
            )


def _large_values_in_filters(
    connection: Connection, relations: Collection[Relation], pipeline: Pipeline
) -> dict[int, list[str]]:
    """Return the names of columns, by the oid of their table, whose values the server may not send for a row
    that is moved into a row filter. With REPLICA IDENTITY FULL it sends all."""
    oids = sorted(relation.oid for relation in relations if relation.replica_identity != "f")
    if not oids or connection.server_version < COLUMN_LISTS_SINCE:
        return {}
    with source_errors("reading the row filters"):
        members = memberships(connection, oids, pipeline.publication, planned=False)
        wanted = sorted({member.oid for member in members.values()})
        filters = {oid for (oid,) in rows(connection, _WITH_FILTER, (wanted,))}
        filtered = [oid for oid, member in members.items() if member.oid in filters]
        large = {tuple(found) for found in rows(connection, _LARGE, (filtered,))}
    return {relation.oid: names for relation in relations if (names := _names(relation, large, pipeline))}


def _names(relation: Relation, large: Collection[tuple[int, ...]], pipeline: Pipeline) -> list[str]:
    options = pipeline.options(relation.table)
    return [
        show_identifier(column.name)
        for column in relation.columns
        if (relation.oid, column.attnum) in large
        and not column.is_key
        and not options.column(column.name).excluded
    ]


def _unpublished_columns(relation: Relation, pipeline: Pipeline) -> Iterator[str]:
    options = pipeline.options(relation.table)
    names = [
        show_identifier(column.name)
        for column in relation.unpublished
        if not options.column(column.name).excluded
    ]
    if names:
        columns = "generated column" if len(names) == 1 else "generated columns"
        yield (
            f"{relation.table}: {columns} {', '.join(names)} {'is' if len(names) == 1 else 'are'} null in the"
            " lake, because the publication does not hold it: PostgreSQL can publish stored ones from 18 on"
            " (publish_generated_columns = stored), virtual ones never. exclude_columns leaves a column out"
        )


def refused_once_published(
    connection: Connection, pipeline: Pipeline, tables: Collection[TableName]
) -> list[RefusedChanges]:
    """Return why the source would reject changes of these tables and their children once published.

    The pipeline's publication does not exist yet, and is assumed to be created for them.
    """
    with source_errors("listing the tables to publish"):
        oids = [oid for (oid,) in rows(connection, _WITH_CHILDREN, (_oids(connection, tables),))]
    relations = read_relations(connection, oids, pipeline.publication, planned=True).values()
    found = refused_tables(connection, replace(pipeline, publication_mode="create"), relations)
    return sorted(set(found.values()), key=lambda refused: refused.table)


def refused_tables(
    connection: Connection, pipeline: Pipeline, relations: Iterable[Relation]
) -> dict[int, RefusedChanges]:
    """Return why the source rejects changes of these tables, by oid.

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
    """Return the other tables of a publication that the pipeline uses and did not create.

    A publication of all tables, or of a schema, includes tables that the pipeline does not replicate.
    """
    if pipeline.publication_mode != "use":
        return []
    publication = read_publication(connection, pipeline.publication)
    names = frozenset() if publication is None else publication.tables
    names -= {relation.source_table for relation in relations}
    if not names:
        return []
    with source_errors("listing published tables"):
        oids = _oids(connection, names)
    return list(read_relations(connection, oids, pipeline.publication).values())


def _oids(connection: Connection, tables: Collection[TableName]) -> list[int]:
    schemas, names = zip(*((table.schema, table.name) for table in tables), strict=True)
    return [oid for (oid,) in rows(connection, _OIDS, (list(schemas), list(names)))]
