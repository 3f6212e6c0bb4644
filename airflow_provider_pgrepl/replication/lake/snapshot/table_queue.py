"""Copies the tables of a snapshot, a few at a time. Decides which errors stop one table, and which stop
all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.trace import log_unexpected

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Maximum number of tables that are copied at the same time."""


@dataclass
class CopyResult:
    """The result of copying tables: `done` has the number of rows of each copied table, `failed` the errors
    of tables that stopped.

    `displaced`: tables that another session altered or had to wait for. `lost`: the error if the keeper was
    lost. Tables that are neither done nor failed have to be copied again, under another snapshot.
    """

    done: dict[TableName, int] = field(default_factory=dict)
    failed: dict[TableName, errors.PgReplError] = field(default_factory=dict)
    displaced: dict[TableName, errors.TableSnapshotError] = field(default_factory=dict)
    lost: errors.SnapshotError | None = None

    @property
    def unusable(self) -> errors.SnapshotError | None:
        """The error because of which tables have to be copied again under another snapshot, or None."""
        return self.lost or next(iter(self.displaced.values()), None)


def copy_tables(
    tables: Sequence[TableName],
    copy: Callable[[TableName], int],
    *,
    at_once: int = AT_ONCE,
    finished: Callable[[TableName, int], None],
    failed: Callable[[TableName, errors.PgReplError], None],
) -> CopyResult:
    """Copy each table in a thread of its own, `at_once` at a time. `copy` returns the number of rows.

    `finished` and `failed` record the result of a table, and are called in the calling thread. After an error
    that stops all tables (a lost snapshot, an unreachable lake, a result that cannot be recorded), no further
    copy is started. Running copies are waited for, and recorded unless recording failed. Raises that error,
    except for a lost snapshot.
    """
    copied = CopyResult()
    stopping: errors.PgReplError | None = None
    with ThreadPoolExecutor(min(at_once, len(tables))) as pool:
        futures = {pool.submit(_traced, copy, table): table for table in tables}
        try:
            for future in as_completed(futures):
                table = futures[future]
                try:
                    rows = future.result()
                except CancelledError:
                    continue
                except errors.TableSnapshotError as error:
                    copied.displaced[table] = error
                except errors.SnapshotError as error:
                    copied.lost = error
                    _cancel(futures)
                except errors.PgReplError as error:
                    if is_of_one_table(error):
                        copied.failed[table] = error
                        failed(table, error)
                    else:
                        stopping = stopping or error
                        _cancel(futures)
                else:
                    finished(table, rows)
                    copied.done[table] = rows
        except BaseException:
            _cancel(futures)
            raise
    if stopping is not None:
        raise stopping
    return copied


def _traced(copy: Callable[[TableName], int], table: TableName) -> int:
    """Copy a table, and log an unexpected error. Logged in the thread, because the process reports only one
    of several such errors."""
    try:
        return copy(table)
    except Exception as error:
        log_unexpected(log, f"copying {table}", error)
        raise


def _cancel(futures: dict[Future[int], TableName]) -> None:
    """Cancel the copies that have not started.

    They are canceled one by one, because `as_completed` is not notified of futures that the pool's
    `shutdown(cancel_futures=True)` drops.
    """
    for future in futures:
        future.cancel()


def is_of_one_table(error: errors.PgReplError) -> bool:
    """Return True if an error in copying one table does not affect the other tables: a missing privilege, or
    an error that the server reports for this table only."""
    if error.scope is errors.Scope.TABLE or isinstance(error, errors.PrivilegeError):
        return True
    return type(error) is errors.SourceError
