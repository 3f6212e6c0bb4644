"""The connection to the state database, and the conversion of its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import psycopg2.errors

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ServerSettingError, StateError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, row, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

from .actor import actor_fields
from .schema import check_ownership

_ENFORCE = """
SELECT pg_catalog.set_config('session_replication_role', 'origin', false)
WHERE pg_catalog.current_setting('session_replication_role') OPERATOR(pg_catalog.=) 'replica'
"""


class StateConnection:
    """A connection to the state database, the base class of each part of the store.

    Raises SourceConnectionError if the database cannot be reached, StateError if the schema in it belongs to,
    or holds objects of, other roles, ServerSettingError if its foreign keys are not enforced.
    """

    def __init__(self, dsn: str, role: str, started_by: str = "") -> None:
        """Open the connection.

        :param role: the program and the pipeline, as the session shows them
        :param started_by: what started this program, for the events that it records
        """
        self._actor = actor_fields(role.partition(" ")[0], started_by)
        self._connection = connect(dsn, role)
        try:
            check_ownership(self._connection)
            _enforce_foreign_keys(self._connection)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the connection, which releases the locks. Can be called again."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _enforce_foreign_keys(connection: Connection) -> None:
    """Set `session_replication_role` to `origin` if it is `replica`, which disables foreign keys.

    Records of a forgotten pipeline would stay. Raises ServerSettingError if the role may not set it.
    """
    with source_errors("state: setting up a connection"):
        try:
            rows(connection, _ENFORCE)
        except psycopg2.errors.InsufficientPrivilege:
            role, database = row(connection, "SELECT session_user::text, pg_catalog.current_database()::text")
            raise ServerSettingError(
                f"role {role} has session_replication_role = replica in database {database}, which disables"
                " the foreign keys of schema _pgrepl",
                f"as a superuser, run ALTER ROLE {quote_identifier(role)} RESET session_replication_role; or"
                f" ALTER DATABASE {quote_identifier(database)} RESET session_replication_role",
            ) from None


@contextmanager
def state_errors(doing: str) -> Iterator[None]:
    """Convert psycopg2's errors inside the block to this package's. `doing`: the operation, for the
    message."""
    with source_errors(f"state: {doing}"):
        try:
            yield
        except (psycopg2.errors.UndefinedTable, psycopg2.errors.InvalidSchemaName):
            raise StateError(
                f"state: {doing}: schema _pgrepl is not set up in this database", errors.SNAPSHOT
            ) from None
        except psycopg2.errors.UndefinedColumn:
            raise older_schema(doing) from None
        except psycopg2.errors.ForeignKeyViolation:
            raise StateError(f"state: {doing}: the pipeline is not recorded", errors.SNAPSHOT) from None
        except psycopg2.errors.ReadOnlySqlTransaction:
            raise StateError(
                f"state: {doing}: the database is read-only",
                "give another database for it: state_conn_id, or PGREPL_STATE_DSN",
            ) from None


def older_schema(doing: str) -> StateError:
    """Return the error of a schema that an older version has created."""
    return StateError(
        f"state: {doing}: schema _pgrepl is of an older version",
        "start any app of this version: it migrates the schema, as do the commands pause, resume and retry",
    )


def text_of(lsn: LSN | None) -> str | None:
    """Return an LSN as a parameter of a statement."""
    return None if lsn is None else str(lsn)
