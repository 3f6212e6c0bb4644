"""What rights and publication can have against a pipeline, table by table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from airflow_provider_pgrepl.errors import (
    PgReplError,
    PrivilegeError,
    PublicationError,
    ServerSettingError,
    one_line,
)
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.owner_code import read_owner_code, refused_code
from airflow_provider_pgrepl.replication.source.connection import Connection, acting_role_hint, row, rows
from airflow_provider_pgrepl.replication.source.copy.table_locks import lock_tables
from airflow_provider_pgrepl.replication.source.publication import read_publication
from airflow_provider_pgrepl.replication.source.server import Server
from airflow_provider_pgrepl.replication.source.server_errors import LOCKS_SETTING, source_errors

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


def right_problems(connection: Connection, relations: Iterable[Relation]) -> Problems:
    """Whether the role can read all rows of these tables, which the catalog has now, and their partitions."""
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
    """Whether the server has room for locks on all tables and partitions, which a snapshot takes at once.

    How much room there is depends on more than settings: where it may be short, the locks are tried.
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
            return  # somebody's lock is in the way, which the snapshot waits for
        finally:
            cursor.execute("ROLLBACK")


def code_problems(connection: Connection, pipeline: Pipeline, relations: Iterable[Relation]) -> Problems:
    """Whether reading the tables can run code of their owners with our rights."""
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
    """Whether the publication carries these tables, or can be made to."""
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
            f"ALTER PUBLICATION {quote_identifier(name)} SET (publish = 'insert, update, delete, truncate')",
        )
    if not publication.via_root and any(relation.relkind == "p" for relation in relations):
        yield PublicationError(
            f"publication {name} publishes partitions under their own names",
            f"ALTER PUBLICATION {quote_identifier(name)} SET (publish_via_partition_root = true)",
        )
        return
    outside = [str(relation.table) for relation in relations if relation.table not in publication.tables]
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
    unpublished = {relation.oid for relation in relations if relation.table not in published}
    foreign = [one_line(table) for oid, _, table, *_, owner in found if not owner and oid in unpublished]
    if foreign:
        yield PrivilegeError(
            f"role {role} may not publish {', '.join(foreign)}: only a table's owner may",
            f"{acting}GRANT the owning role TO {quote_identifier(role)}, or let the owner create the"
            " publication, and set publication_mode to use",
        )
