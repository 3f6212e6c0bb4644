"""One COPY as a stream of bytes. It ends at the end of the table's range, or raises an error."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import logging
import os
import select
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import psycopg2.errors

from airflow_provider_pgrepl.errors import (
    PgReplError,
    SnapshotError,
    SourceConnectionError,
    TableSnapshotError,
)
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.partitions import Leaf, read_leaves
from airflow_provider_pgrepl.replication.source.catalog.relations import COLUMN_LISTS_SINCE
from airflow_provider_pgrepl.replication.source.connection import (
    Connection,
    abandon,
    connect,
    limit_idleness,
    row,
    rows,
)
from airflow_provider_pgrepl.replication.source.server_errors import (
    ROLLED_BACK,
    describe,
    source_errors,
    translate,
)
from airflow_provider_pgrepl.trace import log_unexpected, traced

from .imported_snapshot import CONFLICT_HINT, WAITER_HINT
from .lock_watch import copy_role

_SIZES = """
SELECT c.oid::bigint, pg_catalog.pg_relation_size(c.oid), pg_catalog.pg_table_size(c.oid),
    c.reltuples::float8, pg_catalog.current_setting('block_size')::int,
    coalesce((SELECT amname FROM pg_catalog.pg_am a WHERE a.oid = c.relam), 'heap') = 'heap',
    EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0
        AND a.attgenerated <> '' AND a.attname = ANY (%(columns)s)),
    coalesce(pg_catalog.pg_relation_filenode(c.oid), 0)::bigint,
    (SELECT pg_catalog.string_agg(pg_catalog.concat_ws(' ', a.attnum, a.attname, a.xmin), ',' ORDER BY attnum)
        FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0)
FROM pg_catalog.pg_class c WHERE c.oid = ANY (%(oids)s::oid[])
"""

_ROW_FILTER = """
SELECT pg_catalog.pg_get_expr(m.prqual, m.prrelid) FROM pg_catalog.pg_publication_rel m
WHERE m.oid = %s AND m.prpubid = %s AND m.prrelid = %s
"""

_NO_ROWS = "SELECT WHERE false"
log = logging.getLogger(__name__)
_BUFFER_BYTES = 1 << 20
# pg_dump sets this as well, if the server knows the setting.
_REFUSE_VIEWS = """
SELECT pg_catalog.set_config(name, 'view, foreign-table', false) FROM pg_catalog.pg_settings
WHERE name = 'restrict_nonsystem_relation_kind'
"""
# The function to_regclass looks the name up in the current catalog, not in the snapshot.
_FOUND = "SELECT coalesce(pg_catalog.to_regclass(%s)::oid::bigint, -1)"
_END_GRACE_S = 10.0
_CANCEL_INTERVAL_S = 0.25
_UNREAD_LIMIT_S = 60
"""The idle limit, as `tcp_user_timeout`: the server may send the last bytes long before they are read."""
_MOST_CHECKED_BYTES = 2 << 30
STALL_LIMIT_S = 300.0
"""The seconds that a COPY may send nothing. A filter may leave out most of a range, which has 128 MB."""
_LOCK_NOT_AVAILABLE = "55P03"
_SNAPSHOT_UNUSABLE = ("22023", "42704", "42P01", "42703", "72000", "55000")


@dataclass(frozen=True)
class CopiedRange:
    """A range that an earlier copy has read, and its number of rows.

    `start`, `end`: the first page of the leaf's file, and the one after the last. `filenode`: the file, which
    another one replaces when the table is rewritten. `query`: a hash of the SELECT of the leaf's rows, and of
    its columns. `xmin`: that of the copy's snapshot, with the epoch of transaction IDs; all transactions with
    a lower ID had ended.
    """

    leaf_oid: int
    filenode: int
    start: int
    end: int
    query: str
    rows: int
    xmin: int


@dataclass(frozen=True)
class CopyRange:
    """A part of one table that one task copies: the COPY that reads it, and its number of pages.

    `leaf_oid`: the oid that the table with the leaf's name must have; 0 for no check. `is_planned`: the COPY
    contains a SELECT, which can run code of the table's owner (see `owner_code.py`). `select`: that SELECT.
    `rows`: the planner's estimate of the range's rows, None if there is none. `bytes`: the range's share of
    the leaf, with TOAST. `start`: the first page. `filenode`: the leaf's file, 0 if it is no heap. `copied`:
    an earlier copy of the same pages, which `check` compares with the snapshot. `query`: as in CopiedRange.
    """

    relation_oid: int
    leaf: TableName
    sql: str
    pages: int
    leaf_oid: int = 0
    is_planned: bool = False
    rows: int | None = None
    bytes: int = 0
    select: str = ""
    start: int = 0
    filenode: int = 0
    query: str = ""
    copied: CopiedRange | None = None
    check: str = ""

    def as_copied(self, rows: int, xmin: int) -> CopiedRange:
        """Return the record of a copy of the range at a snapshot with this xmin."""
        end = self.start + self.pages
        return CopiedRange(self.leaf_oid, self.filenode, self.start, end, self.query, rows, xmin)

    def computing(self, compute: Callable[[str], str]) -> CopyRange:
        """Return the range with a COPY of a query. `compute`: makes that query of the SELECT of its rows."""
        return replace(self, sql=_copied(compute(self.select)))


@dataclass(frozen=True)
class Sample:
    """A random choice of a table's pages. The same `seed` chooses the same pages of a snapshot again."""

    percent: float
    seed: int

    @property
    def sql(self) -> str:
        return f"TABLESAMPLE pg_catalog.system ({self.percent:.6f}) REPEATABLE ({self.seed})"


def plan_ranges(
    connection: Connection,
    relation: Relation,
    range_bytes: int,
    *,
    whole: bool = False,
    sample: Sample | None = None,
    selects: bool = False,
    copied: Sequence[CopiedRange] = (),
) -> list[CopyRange]:
    """Split a table into ranges of about `range_bytes` (TOAST included), at least one. The last has no end.

    `whole`: each leaf is one range. `sample`: the same, with some of its pages only. `selects`: each range
    has a SELECT. `copied`: ranges of earlier copies, which keep their bounds if they are of the leaves'
    files; of two that overlap the newer one is taken. Over a keeper's connection, the leaves are those of the
    snapshot. Raises SourceError.
    """
    row_filter = _row_filter(connection, relation)
    leaves = read_leaves(connection, relation.oid)
    wanted = {"oids": [leaf.oid for leaf in leaves], "columns": [column.name for column in relation.columns]}
    with source_errors(f"measuring {relation.table}"):
        sizes = {oid: tuple(more) for oid, *more in rows(connection, _SIZES, wanted)}
    copied_of = defaultdict[int, list[CopiedRange]](list)
    for one in copied:
        copied_of[one.leaf_oid].append(one)
    ranges = [
        part
        for leaf in leaves
        for part in _leaf_ranges(
            relation,
            leaf,
            sizes[leaf.oid],
            None if whole or sample else range_bytes,
            row_filter,
            sample,
            copied_of[leaf.oid],
            selects=selects,
        )
    ]
    # A partitioned table without partitions has no rows.
    return ranges or [CopyRange(relation.oid, relation.table, _copied(_NO_ROWS), 0, rows=0, select=_NO_ROWS)]


def _leaf_ranges(
    relation: Relation,
    leaf: Leaf,
    size: tuple[Any, ...],
    range_bytes: int | None,
    row_filter: str | None,
    sample: Sample | None,
    copied: Sequence[CopiedRange],
    *,
    selects: bool,
) -> list[CopyRange]:
    main_bytes, total_bytes, tuples, block_size, is_heap, is_generated, filenode, columns = size
    pages = -(-main_bytes // block_size)
    wanted = min(pages, -(-total_bytes // range_bytes)) if is_heap and range_bytes else 1
    step = max(1, -(-pages // max(1, wanted)))
    filters = [f"({row_filter})"] if row_filter else []
    # A partition can be altered while it is detached: its columns have their own definitions.
    query = _hash(_select_rows(relation, leaf.table, filters, None), columns)
    usable = [
        one
        for one in copied
        if is_heap
        and (one.filenode, one.query) == (filenode, query)
        and one.end <= pages
        # The check of a range sends nothing until it has read all of it.
        and (one.end - one.start) * block_size <= _MOST_CHECKED_BYTES
    ]
    pieces = _pieces(pages, step, usable)
    ranges = []
    for start, end, earlier in pieces:
        bounds = [f"ctid >= '({start},0)'"] if len(pieces) > 1 else []
        bounds += [] if end is None else [f"ctid < '({end},0)'"]
        bounds += filters
        covered = (pages if end is None else end) - start
        # COPY of a table accepts no condition, no generated columns and no empty column list.
        is_planned = bool(bounds) or is_generated or not relation.columns or selects or sample is not None
        select = _select_rows(relation, leaf.table, bounds, sample) if is_planned else ""
        sql = _copied(select) if is_planned else _copy_table(relation, leaf.table)
        share = covered / pages if pages else 1.0
        # The estimate is -1 until the first ANALYZE, and includes rows that a filter leaves out.
        is_known = not row_filter and (tuples >= 0 or not pages)
        ranges.append(
            CopyRange(
                relation.oid,
                leaf.table,
                sql,
                covered,
                leaf.oid,
                is_planned,
                round(max(tuples, 0) * share) if is_known else None,
                round(total_bytes * share),
                select,
                start,
                filenode if is_heap else 0,
                query,
                earlier,
                "" if earlier is None else _count_rows(leaf.table, bounds, earlier.xmin),
            )
        )
    return ranges


def _pieces(
    pages: int, step: int, copied: Sequence[CopiedRange]
) -> list[tuple[int, int | None, CopiedRange | None]]:
    """Return first page, end and earlier copy of each range: `copied` ones, and parts of what is between
    them."""
    chosen: list[CopiedRange] = []
    for one in sorted(copied, key=lambda one: one.start):
        if not chosen or chosen[-1].end <= one.start:
            chosen.append(one)
        elif one.xmin > chosen[-1].xmin:
            chosen[-1] = one
    pieces: list[tuple[int, int | None, CopiedRange | None]] = []
    at = 0
    for one in chosen:
        pieces += [(start, min(start + step, one.start), None) for start in range(at, one.start, step)]
        pieces.append((one.start, one.end, one))
        at = one.end
    starts = range(at, max(pages, at + 1), step)
    return pieces + [(start, None if start == starts[-1] else start + step, None) for start in starts]


def _hash(*texts: str | None) -> str:
    return hashlib.blake2b(repr(texts).encode(), digest_size=8).hexdigest()


def _copy_table(relation: Relation, leaf: TableName) -> str:
    return f"COPY {leaf.sql} ({_columns(relation)}) TO STDOUT (FORMAT csv)"


def _copied(query: str) -> str:
    return f"COPY ({query}) TO STDOUT (FORMAT csv)"


def _select_rows(relation: Relation, leaf: TableName, bounds: list[str], sample: Sample | None) -> str:
    select = f"SELECT {_columns(relation)}" if relation.columns else "SELECT"
    where = f" WHERE {' AND '.join(bounds)}" if bounds else ""
    some = "" if sample is None else f" {sample.sql}"
    return f"{select} FROM ONLY {leaf.sql}{some}{where}"


def _count_rows(leaf: TableName, bounds: list[str], xmin: int) -> str:
    """Return the SELECT of the number of rows, and of those written by transactions below `xmin`.

    A system column has the 32 bits of a transaction ID, also of a frozen row. `age` compares them with the
    next ID, at most 2^31 back; IDs of frozen rows further back look like later ones.
    """
    is_older = f"pg_catalog.age(xmin) > pg_catalog.age('{xmin % 2**32}'::pg_catalog.xid)"
    counts = f"pg_catalog.count(*), pg_catalog.count(*) FILTER (WHERE {is_older})"
    return f"SELECT {counts} FROM ONLY {leaf.sql} WHERE {' AND '.join(bounds)}"  # noqa: S608 - no values


def _columns(relation: Relation) -> str:
    # Name the columns: a partition may have them in another order than its partitioned table.
    return ", ".join(quote_identifier(column.name) for column in relation.columns)


def _row_filter(connection: Connection, relation: Relation) -> str | None:
    """Return the publication's row filter for this table, or None. Rows that it excludes are not copied."""
    if connection.server_version < COLUMN_LISTS_SINCE:
        return None
    member = (relation.membership_oid, relation.publication_oid, relation.oid)
    with source_errors(f"reading the row filter of {relation.table}"):
        found = rows(connection, _ROW_FILTER, member)
    return found[0][0] if found else None


@contextlib.contextmanager
def open_copy(dsn: str, snapshot: str, copy_range: CopyRange) -> Iterator[BinaryIO]:
    """Yield a reader of the CSV bytes of one range as of the snapshot, over a new connection.

    If the COPY fails, raises SnapshotError, SourceConnectionError or PrivilegeError at the read that would
    return the end of the file, and again at the end of the block. So a failed copy never looks like a short
    table. Leaving the block early ends the COPY.
    """
    source = _CopyBytes(_connect(dsn, snapshot, copy_range), copy_range)
    reader = io.BufferedReader(source, _BUFFER_BYTES)
    try:
        yield reader
    except Exception:
        source.stop()
        if source.failure is not None:  # the block's error is only a consequence of this failure
            raise source.failure from None
        raise
    finally:
        source.stop()
    if source.failure is not None:
        raise source.failure


def is_unchanged(dsn: str, snapshot: str, copy_range: CopyRange) -> bool:
    """Return True if the range's rows at the snapshot are those that its earlier copy has read."""
    return unchanged(dsn, snapshot, [copy_range]) == [copy_range]


def unchanged(dsn: str, snapshot: str, ranges: Sequence[CopyRange]) -> list[CopyRange]:
    """Return those of these ranges of one leaf whose rows at the snapshot are those that their earlier copies
    have read.

    A row version never changes. If all versions that are visible now were written by transactions that had
    ended before the earlier snapshot, that snapshot saw each of them as well, and if there are as many of
    them as it copied, it saw no others. A transaction that had begun, but not ended, counts as a change.
    Raises what `open_copy` raises.
    """
    checks = " UNION ALL ".join(
        f"SELECT {place}, of_range.* FROM ({one.check}) AS of_range"  # noqa: S608 - no values
        for place, one in enumerate(ranges)
    )
    with open_copy(dsn, snapshot, replace(ranges[0], sql=_copied(checks))) as stream:
        counts = [tuple(map(int, line.split(b","))) for line in stream.read().splitlines()]
    return [
        ranges[place]
        for place, rows, older in counts
        if (copied := ranges[place].copied) is not None and rows == older == copied.rows
    ]


def checked_together(ranges: Sequence[CopyRange], at_once: int) -> list[list[CopyRange]]:
    """Return the ranges that earlier copies have read, in groups to give to `unchanged`: at least `at_once`
    groups if there are as many ranges."""
    copied = [one for one in ranges if one.copied is not None]
    # The server sends nothing until it has read all of a group.
    most = min(_MOST_CHECKED_BYTES, sum(one.bytes for one in copied) // at_once)
    groups: list[list[CopyRange]] = []
    for one in copied:
        last = groups[-1] if groups else []
        if last and last[0].leaf_oid == one.leaf_oid and sum(part.bytes for part in last) + one.bytes <= most:
            last.append(one)
        else:
            groups.append([one])
    return groups


def _connect(dsn: str, snapshot: str, copy_range: CopyRange) -> Connection:
    connection = connect(dsn, copy_role(snapshot))
    try:
        with connection.cursor() as cursor:
            cursor.execute(_REFUSE_VIEWS)
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            limit_idleness(connection, _UNREAD_LIMIT_S)
            # Lock first, then import the snapshot: this shows that the session that holds the table still
            # exists. NOWAIT: a statement ahead in the queue may wait for that session, and so for this copy.
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
    """Raise SnapshotError if another table has the leaf's name now, because schemas were renamed."""
    found = row(connection, _FOUND, (copy_range.leaf.sql,))[0] if copy_range.leaf_oid else 0
    if found != copy_range.leaf_oid:
        raise SnapshotError(
            f"copying {copy_range.leaf}: a schema was renamed, and another table has this name now",
            "run the command again; rename no schema while a snapshot runs",
        )


class _CopyBytes(io.RawIOBase):
    """The read end of a pipe into which a thread copies."""

    def __init__(self, connection: Connection, copy_range: CopyRange) -> None:
        super().__init__()
        self.failure: PgReplError | None = None
        self._connection = connection
        self._range = copy_range
        self._stopping = False
        self._stopped = False
        self._stalled = False
        # Held during a read, so that another thread does not close the pipe.
        self._reading = threading.Lock()
        self._read_end, write_end = os.pipe()
        with contextlib.suppress(OSError):  # a larger pipe is faster, but not required
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
        """End the COPY at any point. The wait for a server that does not answer is limited."""
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
        """Cancel the COPY until `reached` returns True, for up to 10 s; then abandon the connection.

        Cancels repeatedly, because a cancel has no effect before the server has begun the COPY.
        """
        deadline = time.monotonic() + _END_GRACE_S
        cancelling: threading.Thread | None = None
        while time.monotonic() < deadline:
            # libpq waits for the end of a cancel without a limit, so another thread sends it.
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
            "check whether a firewall drops packets between this host and the source, and whether"
            " another session holds a lock on an index of the table",
        )

    def _fail(self, error: PgReplError) -> None:
        if not self._stopping:
            self.failure = error


def _failed(error: Any, copy_range: CopyRange) -> PgReplError:
    if error.pgcode == _LOCK_NOT_AVAILABLE:
        return TableSnapshotError(
            f"copying {copy_range.leaf}: a statement of another session waits for a lock on it, or holds one",
            WAITER_HINT,
        )
    if (error.pgcode or "")[:2] == ROLLED_BACK:
        return TableSnapshotError(f"copying {copy_range.leaf}: {describe(error)}", CONFLICT_HINT)
    if error.pgcode in _SNAPSHOT_UNUSABLE:
        return SnapshotError(
            f"copying {copy_range.leaf}: the snapshot is gone or no longer fits: {describe(error)}",
            "run the snapshot again: it exports a new one at the source",
        )
    return translate(error, f"copying {copy_range.leaf}")
