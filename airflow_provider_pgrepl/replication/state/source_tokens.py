"""Random tokens that a source and a lake share, to recognize a copy of the source.

A copy of a server's files has the same system identifier, timeline, slot and WAL. Therefore each start writes
a new random token, first into the source and then into the changelog. The next start looks for the
changelog's token in the source; a copy has only the tokens from before it was made. Tokens are stored under
the name of the slot. Only the slot's reader writes them.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import psycopg2.errors

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import PgReplError, PrivilegeError, RewoundError, StateError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source.catalog.refused_changes import all_tables_publications
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, row, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

from . import schema
from .schema import check_ownership

log = logging.getLogger(__name__)

_BITS = 62
_FLUSHED = "SELECT pg_catalog.pg_current_wal_flush_lsn()::text"
_LOCK_WAIT_MS = 10_000

_HAS_SCHEMA = "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = '_pgrepl')"
_HAS_TABLE = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = '_pgrepl' AND c.relname = 'source_tokens')
"""
_TABLE = """
CREATE TABLE IF NOT EXISTS _pgrepl.source_tokens (
    slot text NOT NULL,
    token bigint NOT NULL,
    holder text NOT NULL,
    written_at timestamptz NOT NULL DEFAULT pg_catalog.now(),
    PRIMARY KEY (slot, token)
)
"""
_ADD = "INSERT INTO _pgrepl.source_tokens (slot, token, holder) VALUES (%s, %s, %s) RETURNING 1"
_KEEP = "DELETE FROM _pgrepl.source_tokens WHERE slot = %s AND NOT token = ANY (%s) RETURNING 1"
_DROP = "DELETE FROM _pgrepl.source_tokens WHERE slot = %s AND token = %s RETURNING 1"
_FORGET = """
DELETE FROM _pgrepl.source_tokens t WHERE t.slot = %(slot)s AND (
    EXISTS (SELECT FROM _pgrepl.source_tokens o WHERE o.slot = t.slot AND o.token = %(token)s)
    OR NOT EXISTS (SELECT FROM pg_catalog.pg_replication_slots s
        WHERE s.slot_name = t.slot AND s.database = pg_catalog.current_database()))
RETURNING 1
"""
_LAST = """
SELECT holder, written_at::timestamptz(0)::text FROM _pgrepl.source_tokens WHERE slot = %s
ORDER BY written_at DESC LIMIT 1
"""
_RIGHTS = """
SELECT pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(c.relowner)), pg_catalog.quote_ident(current_user),
    pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE')
    AND pg_catalog.has_table_privilege(c.oid, 'SELECT')
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = '_pgrepl' AND c.relname = 'source_tokens'
"""
_CANNOT_WRITE = (psycopg2.errors.InsufficientPrivilege, psycopg2.errors.ReadOnlySqlTransaction)


def has_token(source: Connection, slot: str, token: int) -> bool | None:
    """Return True if the source has the token, False if it has only others of this slot, and None if it has
    none of this slot, as before the first start.

    Raises StateError if the schema with the tokens belongs to, or holds objects of, other roles;
    PrivilegeError if this role may not read them; SourceError.
    """
    with source_errors("looking for the token of the last start"):
        if not (rights := rows(source, _RIGHTS)):
            return None
        check_ownership(source)
        owner, role, can_read = rights[0]
        if not can_read:
            raise PrivilegeError(
                f"role {role} may not read _pgrepl.source_tokens, which belongs to role {owner}: without its"
                " tokens a copy of the source cannot be recognized",
                _grants(owner, role),
            )
        found = rows(source, "SELECT token FROM _pgrepl.source_tokens WHERE slot = %s", (slot,))
        return (token,) in found if found else None


def _grants(owner: str, role: str) -> str:
    """Return the statements that let a role use the table of tokens, which another role owns. Both names are
    quoted."""
    return (
        f"run as {owner}, or as a superuser: ALTER TABLE _pgrepl.source_tokens OWNER TO {role};"
        f" GRANT USAGE ON SCHEMA _pgrepl TO {role}"
    )


def copy_error(source: Connection, slot: str) -> RewoundError:
    """Return the error for a source that lacks the changelog's token. It names the last process that wrote a
    token."""
    with source_errors("looking for the last start"):
        last = rows(source, _LAST, (slot,)) if row(source, _HAS_TABLE)[0] else []
    followed = f"it was last followed by {last[0][0]} at {last[0][1]}" if last else "it knows of no start"
    return RewoundError(
        "this server is a copy of the source, or was restored to an earlier state, or the lake was: it lacks"
        f" the token that source and lake share since the last start; {followed}",
        "check the connection (conn_id, or PGREPL_DSN): the lake continues with the server that has the"
        f" token. If this is that server, and its schema _pgrepl was lost: {errors.reference('errors')}."
        " Nothing was changed",
    )


def token_error(source: Connection, slot: str, token: int, *, is_recorded: bool) -> RewoundError | None:
    """Return the error for a source that lacks the changelog's token; None for one that has it.

    If the source has no token and the state is lost, too (not `is_recorded`), the schema with both was
    dropped: returns None, because the lost state is reported instead. Raises what `has_token` raises.
    """
    has = has_token(source, slot, token)
    if has or (has is None and not is_recorded):
        return None
    return copy_error(source, slot)


def renew_token(dsn: str, slot: str, check: Callable[[], object], before: int, used: str = "") -> int:
    """Check that the source has the changelog's token, write a new token to the source, and return it.

    `check`: raises if the source cannot continue the changelog for another reason; it is called first,
    because a new token at the wrong source would lock the right one out. `before`: the changelog's token, 0
    if it has none yet. It stays in the source, because this process may end before the changelog has the new
    one. `used`: another program's publication that the slot's reader uses. Returns `before` if the source
    cannot be written. Raises RewoundError for a copy of the source, and what `check` raises.
    """
    with closing(connect(dsn, "source token")) as source:
        if before and not has_token(source, slot, before):
            raise copy_error(source, slot)
        check()
        return write_token(source, slot, before, used) or before


@dataclass(frozen=True)
class NewToken:
    """A token that was written to the source. `lsn`: at or after the commit that wrote it."""

    token: int
    lsn: LSN


def replace_token(dsn: str, slot: str, before: int, superseded: int, used: str = "") -> NewToken | None:
    """Write a new token for a running receiver and return it; the source keeps `before`, too.

    `superseded`: the receiver's token before `before`, the only one that is deleted: a receiver that has
    taken over in between, unnoticed by this one, has written its own. Returns None if the source lacks
    `before`, or cannot be written; both are logged. Raises SourceError, StateError.
    """
    with closing(connect(dsn, "source token")) as source:
        if not has_token(source, slot, before):
            log.warning("the source no longer has the token that it shares with the lake: it is not renewed")
            return None
        token = write_token(source, slot, before, used, superseded)
        with source_errors("asking for the WAL position"):
            return NewToken(token, LSN.parse(row(source, _FLUSHED)[0])) if token else None


def write_token(
    source: Connection, slot: str, before: int, used: str = "", superseded: int | None = None
) -> int:
    """Write a new token and return it; 0, after logging it, if the source cannot be written.

    The token is on the source's disk when this returns. `superseded`: the only token that is deleted; None:
    all others of the slot but `before` are deleted. Raises SourceError.
    """
    with source_errors("asking whether the source is a standby"):
        if row(source, "SELECT pg_catalog.pg_is_in_recovery()")[0]:
            log.info("the source is a standby, which keeps no token: a copy of its primary is not recognized")
            return 0
        has_table = row(source, _HAS_TABLE)[0]
    if not has_table and all_tables_publications(source, slot, used):
        log.warning(
            "no token is kept at the source, because a publication FOR ALL TABLES would send it to"
            " others; a copy of the source is not recognized"
        )
        return 0
    token = secrets.randbits(_BITS) + 1
    try:
        with source_errors("writing a token"), _transaction(source):
            if not row(source, _HAS_TABLE)[0]:
                if not row(source, _HAS_SCHEMA)[0]:
                    source.cursor().execute("CREATE SCHEMA _pgrepl")
                check_ownership(source)
                source.cursor().execute(_TABLE)
            check_ownership(source)
            rows(source, _ADD, (slot, token, f"{socket.gethostname()}:{os.getpid()}"))
            if superseded is None:
                rows(source, _KEEP, (slot, [before, token]))
            else:
                rows(source, _DROP, (slot, superseded))
    except (_CannotWriteError, StateError) as error:
        log.warning(
            "the source keeps no new token, so that a copy of this server may be taken for it: %s; %s",
            error.message,
            error.hint or _what_lets_it(source),
        )
        return 0
    return token


def _what_lets_it(source: Connection) -> str:
    with source_errors("looking who may write tokens"):
        if rights := rows(source, _RIGHTS):
            return _grants(*rights[0][:2])
        names = "pg_catalog.quote_ident(current_database()), pg_catalog.quote_ident(current_user)"
        database, role = row(source, f"SELECT {names}")
    return f"GRANT CREATE ON DATABASE {database} TO {role} lets it"


def forget_tokens(source: Connection, slot: str, token: int) -> None:
    """Delete the tokens of a dropped slot, and then the table and the schema if they are empty. Does nothing
    if there is no table of tokens.

    `token`: the changelog's, 0 if it has none or cannot be read. Another pipeline may have created a slot of
    this name since, and its first token replaces all others. So if the slot exists, its tokens are deleted
    only if this one is among them.
    """
    with source_errors("deleting tokens"):
        if not row(source, _HAS_TABLE)[0]:
            return
        check_ownership(source)
        try:
            with _transaction(source):
                # Another pipeline may be writing its first token to the table.
                source.cursor().execute("LOCK TABLE _pgrepl.source_tokens IN ACCESS EXCLUSIVE MODE")
                rows(source, _FORGET, {"slot": slot, "token": token})
                if not rows(source, "SELECT 1 FROM _pgrepl.source_tokens LIMIT 1"):
                    source.cursor().execute("DROP TABLE _pgrepl.source_tokens")
        except _CannotWriteError as error:
            raise PrivilegeError(f"deleting tokens: {error.message}", _what_lets_it(source)) from None
    schema.remove_schema(source)


class _CannotWriteError(PgReplError):
    """The role lacks the privilege to write tokens, or the database is read-only."""


@contextmanager
def _transaction(source: Connection) -> Iterator[None]:
    """Run the block in a transaction whose commit waits for the server's own disk, but not for a standby."""
    with source.cursor() as cursor:
        cursor.execute("BEGIN")
        try:
            cursor.execute("SET LOCAL synchronous_commit = local")
            cursor.execute(f"SET LOCAL lock_timeout = {_LOCK_WAIT_MS}")
            yield
            cursor.execute("COMMIT")
        except _CANNOT_WRITE as error:
            cursor.execute("ROLLBACK")
            raise _CannotWriteError((error.diag.message_primary or "no right").strip()) from None
        except BaseException:
            if not source.closed:
                cursor.execute("ROLLBACK")
            raise
