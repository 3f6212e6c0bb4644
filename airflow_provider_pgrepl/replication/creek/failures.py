"""What a table of a copy does not take, which is its own failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg2

from airflow_provider_pgrepl.errors import TargetError
from airflow_provider_pgrepl.replication.creek.table_shape import TableShape
from airflow_provider_pgrepl.replication.postgres.names import TableName


class TableFailedError(TargetError):
    """A table does not take a change, or a row of its snapshot."""

    source: TableName


class OutgrownError(TargetError):
    """A change has columns that its table does not have yet."""

    source: TableName
    shape: TableShape


@contextmanager
def taking(source: TableName, target: TableName, failing: Callable[[], None]) -> Iterator[None]:
    """Raises TableFailedError for what the server refuses, once `failing` was called. The server's own
    message may hold values."""
    failed: psycopg2.Error | None = None
    try:
        yield
    except psycopg2.OperationalError:
        raise
    except psycopg2.Error as error:
        failed = error
    if failed is not None:
        failing()
        raise _refused(source, target, failed)


def _refused(source: TableName, target: TableName, failed: psycopg2.Error) -> TableFailedError:
    names = (failed.diag.constraint_name, failed.diag.column_name)
    where = ", ".join(name for name in names if name)
    return table_failed(
        source,
        f"{target} does not take a change: {type(failed).__name__}{f' ({where})' if where else ''}",
        "the server's log says more; mend the table and start the consumer again, or have the table taken"
        f" whole: --resnapshot {target}",
    )


def table_failed(source: TableName, message: str, hint: str) -> TableFailedError:
    """Of one table."""
    error = TableFailedError(message, hint)
    error.source = source
    return error
