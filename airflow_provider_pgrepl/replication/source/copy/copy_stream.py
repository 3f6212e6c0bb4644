"""One COPY as a stream of bytes, which ends where the table's range ends, or fails."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import psycopg2
import psycopg2.errors

from airflow_provider_pgrepl.errors import (
    PgReplError,
    SnapshotError,
    SourceConnectionError,
    TableSnapshotError,
)
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, limit_idleness, row
from airflow_provider_pgrepl.replication.source.copy.imported_snapshot import CONFLICT_HINT
from airflow_provider_pgrepl.replication.source.copy.lock_waiters import copy_role
from airflow_provider_pgrepl.replication.source.copy.ranges import CopyRange
from airflow_provider_pgrepl.replication.source.server_errors import ROLLED_BACK, describe, translate
from airflow_provider_pgrepl.replication.source.time_limit import abandon
from airflow_provider_pgrepl.trace import log_unexpected, traced

log = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 20
# What PostgreSQL's own pg_dump sets, where the server knows it.
_REFUSE_VIEWS = """
SELECT pg_catalog.set_config(name, 'view, foreign-table', false) FROM pg_catalog.pg_settings
WHERE name = 'restrict_nonsystem_relation_kind'
"""
# By a function: it looks at what is there now, not in the snapshot.
_FOUND = "SELECT coalesce(pg_catalog.to_regclass(%s)::oid::bigint, -1)"
_END_GRACE_S = 10.0
_CANCEL_INTERVAL_S = 0.25
_UNREAD_LIMIT_S = 60
"""As `tcp_user_timeout`: the server may have sent the last bytes long before the reader takes them."""
STALL_LIMIT_S = 300.0
"""How long a COPY may bring nothing. A range has 128 MB of a table; a filter may leave out most of it."""


@contextlib.contextmanager
def open_copy(dsn: str, snapshot: str, copy_range: CopyRange) -> Iterator[BinaryIO]:
    """The CSV bytes of one range as they were in the snapshot, over a connection of its own.

    A COPY that fails raises SnapshotError, SourceConnectionError or PrivilegeError, at the read that would
    have said "end of file" and again when the block is left: it never looks like a short table. Leaving early
    ends the COPY.
    """
    source = _CopyBytes(_connect(dsn, snapshot, copy_range), copy_range)
    reader = io.BufferedReader(source, _BUFFER_BYTES)
    try:
        yield reader
    except Exception:
        source.stop()
        if source.failure is not None:  # the block's error is but its consequence
            raise source.failure from None
        raise
    finally:
        source.stop()
    if source.failure is not None:
        raise source.failure


def _connect(dsn: str, snapshot: str, copy_range: CopyRange) -> Connection:
    connection = connect(dsn, copy_role(snapshot))
    try:
        with connection.cursor() as cursor:
            cursor.execute(_REFUSE_VIEWS)
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            limit_idleness(connection, _UNREAD_LIMIT_S)
            # First the lock, then the snapshot: its session, which holds the table, must still be there.
            # NOWAIT: behind a statement that waits for that session, this one would wait for itself.
            if copy_range.leaf_oid:
                cursor.execute(f"LOCK TABLE ONLY {copy_range.leaf.sql} IN ACCESS SHARE MODE NOWAIT")
            cursor.execute("SET TRANSACTION SNAPSHOT %s", (snapshot,))
            _check_name(connection, copy_range)
    except BaseException as error:
        connection.close()
        if isinstance(error, psycopg2.Error):
            raise _failed(error, copy_range) from None
        raise
    return connection


def _check_name(connection: Connection, copy_range: CopyRange) -> None:
    """Raises SnapshotError when the name leads to another table than it did: schemas were renamed."""
    found = row(connection, _FOUND, (copy_range.leaf.sql,))[0] if copy_range.leaf_oid else 0
    if found != copy_range.leaf_oid:
        raise SnapshotError(
            f"copying {copy_range.leaf}: another table has this name now",
            "no schema should be renamed while its tables are copied; run the snapshot again",
        )


class _CopyBytes(io.RawIOBase):
    """The reading end of a pipe into which a thread copies."""

    def __init__(self, connection: Connection, copy_range: CopyRange) -> None:
        super().__init__()
        self.failure: PgReplError | None = None
        self._connection = connection
        self._range = copy_range
        self._stopping = False
        self._stopped = False
        self._stalled = False
        # Held by whoever reads, so that the pipe is not closed under a reader of another thread.
        self._reading = threading.Lock()
        self._read_end, write_end = os.pipe()
        with contextlib.suppress(OSError):  # a larger pipe is only faster
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _BUFFER_BYTES)
        self._thread = threading.Thread(
            target=self._copy, args=(write_end,), name=f"copy {copy_range.leaf}", daemon=True
        )
        self._thread.start()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._reading:
            if self._stopped:
                raise ValueError("the copy is closed")
            if not select.select([self._read_end], [], [], STALL_LIMIT_S)[0]:
                self._stalled = True
                abandon(self._connection)
            count = os.readv(self._read_end, [buffer])
        if count == 0:
            self._thread.join()
            if self.failure is not None:
                raise self.failure
        return count

    def close(self) -> None:
        if self.closed:
            return
        self.stop()
        super().close()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """End the COPY wherever it is, without waiting for a server that does not answer."""
        if self._stopped:
            return
        self._stopping = self._thread.is_alive()
        is_ours = self._cancel_until(lambda: self._reading.acquire(timeout=_CANCEL_INTERVAL_S))
        self._stopped = True
        os.close(self._read_end)
        if is_ours:
            self._reading.release()
        if self._cancel_until(self._has_ended):
            self._connection.close()

    def _cancel_until(self, reached: Callable[[], bool]) -> bool:
        """Cancel the COPY again and again, for a while: before the server has begun it that does nothing."""
        deadline = time.monotonic() + _END_GRACE_S
        cancelling: threading.Thread | None = None
        while time.monotonic() < deadline:
            # libpq waits for the end of a cancellation without a limit, so that somebody else has to.
            if self._thread.is_alive() and not (cancelling and cancelling.is_alive()):
                cancelling = threading.Thread(target=self._cancel, daemon=True)
                cancelling.start()
            if reached():
                return True
        abandon(self._connection)
        return reached()

    def _cancel(self) -> None:
        with contextlib.suppress(psycopg2.Error):
            self._connection.cancel()

    def _has_ended(self) -> bool:
        self._thread.join(_CANCEL_INTERVAL_S)
        return not self._thread.is_alive()

    def _copy(self, write_end: int) -> None:
        try:
            with os.fdopen(write_end, "wb", _BUFFER_BYTES) as pipe, self._connection.cursor() as cursor:
                cursor.copy_expert(self._range.sql, pipe, _BUFFER_BYTES)
                if cursor.rowcount < 0:
                    raise SnapshotError(f"the copy of {self._range.leaf} did not come to its end")
                _check_name(self._connection, self._range)
        except psycopg2.Error as error:
            self._fail(self._stall() if self._stalled else _failed(error, self._range))
        except PgReplError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the bytes are not all there
            doing = f"copying {self._range.leaf}"
            log_unexpected(log, doing, error)
            self._fail(traced(SourceConnectionError(f"{doing}: {type(error).__name__}"), error))

    def _stall(self) -> SourceConnectionError:
        return SourceConnectionError(
            f"copying {self._range.leaf}: the server has sent nothing for {STALL_LIMIT_S:g} s",
            "the network swallows what is sent, or a lock on an index of the table keeps the copy waiting",
        )

    def _fail(self, error: PgReplError) -> None:
        if not self._stopping:
            self.failure = error


_LOCK_NOT_AVAILABLE = "55P03"
_SNAPSHOT_UNUSABLE = ("22023", "42704", "42P01", "42703", "72000", "55000")


def _failed(error: Any, copy_range: CopyRange) -> PgReplError:
    if error.pgcode == _LOCK_NOT_AVAILABLE:
        return TableSnapshotError(
            f"copying {copy_range.leaf}: a statement of another session waits for a lock on it, or holds one",
            "nothing needs to be done: it is copied again",
        )
    if (error.pgcode or "")[:2] == ROLLED_BACK:
        return TableSnapshotError(f"copying {copy_range.leaf}: {describe(error)}", CONFLICT_HINT)
    if error.pgcode in _SNAPSHOT_UNUSABLE:
        return SnapshotError(
            f"copying {copy_range.leaf}: the snapshot is gone or no longer fits: {describe(error)}",
            "run the snapshot again: it exports a new one at the source",
        )
    return translate(error, f"copying {copy_range.leaf}")
