"""What is to be said of a server, or of the database on it, that can be replicated all the same."""

from __future__ import annotations

from collections.abc import Iterator

from airflow_provider_pgrepl.errors import one_line
from airflow_provider_pgrepl.replication.source.connection import Connection, row, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.synchronous_standbys import synchronous_problem

# The second is there since PostgreSQL 18.
_SLOT_LIMITS = """
SELECT max(setting::bigint) FILTER (WHERE name = 'max_slot_wal_keep_size'),
    pg_catalog.current_setting('max_slot_wal_keep_size', true),
    max(setting::bigint) FILTER (WHERE name = 'idle_replication_slot_timeout'),
    pg_catalog.current_setting('idle_replication_slot_timeout', true)
FROM pg_catalog.pg_settings WHERE name IN ('max_slot_wal_keep_size', 'idle_replication_slot_timeout')
"""
# A role that owns the schema, which may not be there yet, can read it.
_OWNER_WITHOUT_RIGHT = """
SELECT r.rolname::text FROM pg_catalog.pg_database d JOIN pg_catalog.pg_roles r ON r.oid = d.datdba
WHERE d.datname = pg_catalog.current_database()
    AND NOT pg_catalog.pg_has_role(r.oid, 'pg_read_all_data', 'USAGE')
    AND NOT coalesce((SELECT pg_catalog.has_schema_privilege(r.oid, n.oid, 'USAGE')
        FROM pg_catalog.pg_namespace n WHERE n.nspname = '_pgrepl'),
        pg_catalog.pg_has_role(r.oid, current_user, 'USAGE'))
"""
_SENDABLE = (
    "UTF8 LATIN1 LATIN2 LATIN4 LATIN5 LATIN6 LATIN7 LATIN8 LATIN9 LATIN10 WIN866 WIN1256 KOI8R KOI8U"
    " ISO_8859_5"
)
ALWAYS_SENDABLE = frozenset(_SENDABLE.split())
"""Encodings of which every byte that PostgreSQL lets in can be converted into UTF-8."""


_MOVES_SLOTS_RIGHTLY = {14: 140018, 15: 150013, 16: 160009, 17: 170005}
"""By major version, the first release that keeps catalog rows for a slot that is moved.
https://postgrespro.com/list/id/E1u9I5V-00291M-0Z@gemulon.postgresql.org"""


def server_warnings(connection: Connection, slot: str) -> Iterator[str]:
    """Sentences about the database that one connects to, and about the walsender of a slot."""
    if synchronous := synchronous_problem(connection, slot):
        yield synchronous
    version = connection.server_version
    if version < _MOVES_SLOTS_RIGHTLY.get(version // 10000, 0):
        first = _MOVES_SLOTS_RIGHTLY[version // 10000]
        yield (
            f"this server is PostgreSQL {version // 10000}.{version % 10000}. Before {first // 10000}."
            f"{first % 10000} a slot that is moved may lose what it needs of the catalog, so that"
            " replication ends with an error of the server's: upgrade it"
        )
    yield from _slot_limits(connection)
    yield from _unreadable_schema(connection)
    with source_errors("asking for the encoding"):
        encoding = row(connection, "SELECT pg_catalog.current_setting('server_encoding')")[0]
    if encoding not in ALWAYS_SENDABLE:
        yield (
            f"the database's encoding is {encoding}, in which PostgreSQL takes texts that it cannot convert"
            " into UTF-8. One such value in a published table ends the replication of the whole pipeline at"
            " its transaction, until somebody gets past it; a copy of the table stops at it, too"
        )


def _slot_limits(connection: Connection) -> Iterator[str]:
    """Settings of the server by which it invalidates the slot of a pipeline that stands still."""
    with source_errors("asking for limits of slots"):
        kept, kept_shown, idle, idle_shown = row(connection, _SLOT_LIMITS)
    if kept is not None and kept >= 0:
        yield (
            f"max_slot_wal_keep_size is {kept_shown}: the server invalidates the slot of a pipeline that is"
            " behind by more, which then needs a new epoch"
        )
    if idle:
        yield (
            f"idle_replication_slot_timeout is {idle_shown}: the server invalidates a slot that nobody reads"
            " for as long, as while the pipeline is stopped; it then needs a new epoch. During a snapshot the"
            " slot is kept in use"
        )


def _unreadable_schema(connection: Connection) -> Iterator[str]:
    """The owner of the database, if its backups fail from the first snapshot on."""
    with source_errors("asking for the owner of the database"):
        found = rows(connection, _OWNER_WITHOUT_RIGHT)
    for (owner,) in found:
        yield (
            f"role {one_line(owner)}, which owns the database, may not read schema _pgrepl, which the"
            " pipeline makes there: pg_dump by this role ends with an error. Give it"
            " --exclude-schema=_pgrepl"
        )
