"""A connection to the state database, and what its errors mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import psycopg2.errors

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import StateError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.state.schema import check_ownership


class StateConnection:
    """What each part of the store works with.

    Raises SourceConnectionError when the database cannot be reached, StateError when the schema in it is
    somebody else's.
    """

    def __init__(self, dsn: str, role: str) -> None:
        self._connection = connect(dsn, role)
        try:
            check_ownership(self._connection)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the connection, and so release the locks. May be called again."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def state_errors(doing: str) -> Iterator[None]:
    """Turn psycopg2's errors inside the block into ours; `doing` says what was tried."""
    with source_errors(f"state: {doing}"):
        try:
            yield
        except (psycopg2.errors.UndefinedTable, psycopg2.errors.InvalidSchemaName):
            raise StateError(
                f"state: {doing}: schema _pgrepl is not set up in this database", errors.SNAPSHOT
            ) from None
        except psycopg2.errors.UndefinedColumn:
            raise StateError(
                f"state: {doing}: schema _pgrepl is of an older version",
                "any app of this version brings it up when it starts, as do pause, resume and retry",
            ) from None
        except psycopg2.errors.ForeignKeyViolation:
            raise StateError(f"state: {doing}: the pipeline is not recorded", errors.SNAPSHOT) from None
        except psycopg2.errors.ReadOnlySqlTransaction:
            raise StateError(
                f"state: {doing}: the database is read-only",
                "give another database for it: state_conn_id, or PGREPL_STATE_DSN",
            ) from None


def text_of(lsn: LSN | None) -> str | None:
    """A position as a parameter of a statement."""
    return None if lsn is None else str(lsn)
