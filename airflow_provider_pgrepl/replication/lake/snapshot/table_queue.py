"""The tables of a snapshot, copied a few at a time; which errors stop one of them, and which stop all."""

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
"""Tables that are copied at the same time at most."""


@dataclass
class Copied:
    """What became of the tables: rows of those that are in the lake now, errors of those that stopped.

    `displaced`: tables that another session altered, or had to wait for. `lost`: the keeper was lost. What is
    neither done nor failed has to be copied again, under another snapshot.
    """

    done: dict[TableName, int] = field(default_factory=dict)
    failed: dict[TableName, errors.PgReplError] = field(default_factory=dict)
    displaced: dict[TableName, errors.TableSnapshotError] = field(default_factory=dict)
    lost: errors.SnapshotError | None = None

    @property
    def unusable(self) -> errors.SnapshotError | None:
        """Why tables have to be copied again under another snapshot, if any has."""
        return self.lost or next(iter(self.displaced.values()), None)


def copy_tables(
    tables: Sequence[TableName],
    copy: Callable[[TableName], int],
    *,
    at_once: int = AT_ONCE,
    finished: Callable[[TableName, int], None],
    failed: Callable[[TableName, errors.PgReplError], None],
) -> Copied:
    """Copy each table in a thread of its own, `at_once` at a time; `copy` gives the number of rows.

    `finished` and `failed` record what became of a table, in the thread that calls. What stops all of them
    (a lost snapshot, the lake out of reach, an outcome that cannot be recorded) keeps those in the queue from
    beginning; those under way are waited for, and recorded. Raises it, except a lost snapshot.
    """
    copied = Copied()
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
    """Copy a table. The thread logs what is unexpected: of several such errors the process ends by one."""
    try:
        return copy(table)
    except Exception as error:
        log_unexpected(log, f"copying {table}", error)
        raise


def _cancel(futures: dict[Future[int], TableName]) -> None:
    """Begin none that has not begun.

    One by one: of those that the pool's `shutdown(cancel_futures=True)` drops, `as_completed` never hears.
    """
    for future in futures:
        future.cancel()


def is_of_one_table(error: errors.PgReplError) -> bool:
    """Whether an error of one table's COPY leaves the other tables alone: a right that it lacks, and what the
    server says of this table only, are no trouble of the others."""
    if error.scope is errors.Scope.TABLE or isinstance(error, errors.PrivilegeError):
        return True
    return type(error) is errors.SourceError
