"""The database of a consumer's tables, in which rows and positions change in one transaction.

A target is checked to be the table that the consumer has filled, so that nothing is deleted from another one.
The name alone is no evidence: the owner may have dropped or renamed the table, and created another with that
name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID, uuid4

import psycopg2.extensions
import psycopg2.extras

from airflow_provider_pgrepl.errors import (
    ConfigError,
    FencedError,
    TargetError,
    TargetUnavailableError,
    one_line,
)
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier

from .messages import Row, SnapshotHeader, WalChange
from .table_shape import TableShape, earlier_key, keeps_less

_STATE = """
CREATE SCHEMA IF NOT EXISTS _pgrepl_consumer;
CREATE TABLE IF NOT EXISTS _pgrepl_consumer.streams (
    consumer text, database text, made text NOT NULL, sequence bigint NOT NULL,
    PRIMARY KEY (consumer, database));
CREATE TABLE IF NOT EXISTS _pgrepl_consumer.tables (
    consumer text, database text, source text, target text NOT NULL,
    stamp bigint NOT NULL, change text NOT NULL, sequence bigint NOT NULL, error text NOT NULL,
    PRIMARY KEY (consumer, database, source));
ALTER TABLE _pgrepl_consumer.tables ADD COLUMN IF NOT EXISTS target_oid bigint NOT NULL DEFAULT 0;
ALTER TABLE _pgrepl_consumer.tables ADD COLUMN IF NOT EXISTS missing_after text NOT NULL DEFAULT '';
ALTER TABLE _pgrepl_consumer.streams ADD COLUMN IF NOT EXISTS run text NOT NULL DEFAULT '';
"""
_IS_MADE = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_attribute
               WHERE attrelid = to_regclass('_pgrepl_consumer.streams') AND attname = 'run')
"""
UP_TO_DATE = -1
_TABLES = ("r", "p")
_FOUND = "SELECT oid::bigint, relkind::text FROM pg_catalog.pg_class WHERE oid = pg_catalog.to_regclass(%s)"
_OTHERS = """
SELECT consumer, database, source FROM _pgrepl_consumer.tables
WHERE target = %s AND (consumer, database, source) <> (%s, %s, %s) ORDER BY 1, 2, 3
"""
_OWN = """
SELECT target_oid FROM _pgrepl_consumer.tables
WHERE target = %s AND (consumer, database, source) = (%s, %s, %s)
"""
Applied = tuple[TableName, TableShape, WalChange]
"""A change, with its source table and the columns of its schema."""
_PAGE = 500
_LEFT_OUT = -1
"""The stamp of a table that the consumer no longer keeps current."""
_COLUMNS = """
SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod) FROM pg_catalog.pg_attribute a
WHERE a.attrelid = pg_catalog.to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped
"""


def connect(dsn: str, name: str) -> psycopg2.extensions.connection:
    """Connect to the database. Raises ConfigError, without any part of the DSN, and psycopg2's errors."""
    connection: psycopg2.extensions.connection | None = None
    with suppress(psycopg2.ProgrammingError):
        connection = psycopg2.connect(dsn, application_name=name, client_encoding="UTF8")
    if connection is None:
        raise ConfigError(
            "the connection string of the copy's database cannot be read",
            "give it as postgresql://user:password@host:5432/database; what is special in a password is"
            " percent-encoded",
        )
    return connection


def make_state(cursor: Any) -> None:
    """Create the schema if it is missing or of an earlier version. Raises TargetError if the role lacks the
    privilege."""
    failed = ""
    try:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('_pgrepl_consumer'))")
        cursor.execute(_IS_MADE)
        if cursor.fetchone() == (False,):
            cursor.execute(_STATE)
    except (psycopg2.OperationalError, psycopg2.InterfaceError):
        raise
    except psycopg2.Error as error:
        failed = type(error).__name__
    if failed:
        raise TargetError(
            f"the schema _pgrepl_consumer cannot be made in the copy's database: {failed}",
            "grant CREATE on the database to the consumer's role, for its first start",
        )


@contextmanager
def answering() -> Iterator[None]:
    """Raise TargetUnavailableError if the connection is lost in the block."""
    failed = ""
    try:
        yield
    except (psycopg2.OperationalError, psycopg2.InterfaceError) as error:
        failed = type(error).__name__
    if failed:
        raise TargetUnavailableError(
            f"the database of the copy does not answer: {failed}",
            "check that it runs, and its host and login. Applied changes are kept, and the others are sent"
            " again",
        )


@dataclass(frozen=True)
class AppliedStreamPosition:
    """A position in a stream: all messages up to `sequence` are applied, except those of tables that stopped.
    `made`: when the server created the stream, because a stream that is created again counts from 1 again."""

    made: str = ""
    sequence: int = 0


@dataclass(frozen=True)
class ConsumerTableState:
    """A table and its position. `stamp`: that of the last change in the table. `change`: the highest id of
    the changes in the table, empty if unknown. `sequence`: the message up to which the table is current, if
    that is less than the stream's position; otherwise UP_TO_DATE. `error`: why later changes are not applied.
    `target_oid`: the oid of the table that was filled; 0 if it is not recorded yet. `missing_after`: the id
    of the change whose next one has not arrived though later ones have; empty if none is missing."""

    source: TableName
    target: TableName
    stamp: LSN
    change: str
    sequence: int = UP_TO_DATE
    error: str = ""
    target_oid: int = 0
    missing_after: str = ""

    @property
    def is_behind(self) -> bool:
        """Return True if the table's position is before the stream's."""
        return self.sequence != UP_TO_DATE

    def read_to(self, sequence: int, stream: int) -> ConsumerTableState:
        """Return the table after messages up to `sequence` were read, when the other tables are at
        `stream`."""
        if not self.is_behind or self.error:
            return self
        return replace(self, sequence=UP_TO_DATE if sequence >= stream else sequence)

    def has(self, change: WalChange) -> bool:
        """Return True if a change is in the table. A change that is sent again has a higher stamp, but the
        same id. While a change is missing, all later ones are sent again after it, and none counts as in the
        table: they are applied again in their order."""
        if change.id and self.change:
            return not _is_later(change.id, self.missing_after or self.change)
        return change.lsn <= self.stamp

    def may_have(self, change: WalChange) -> bool:
        """Return True if a change that `has` does not know may be in the table: it is not above the last one,
        and one before them was missing."""
        return bool(change.id and self.missing_after) and not _is_later(change.id, self.change)

    def with_change(self, change: WalChange) -> ConsumerTableState:
        """Return the table after a change was applied. If the stream has rejected the change before it, that
        one is missing."""
        if not change.id:
            return replace(self, stamp=change.lsn)
        last = self.change if self.change and _is_later(self.change, change.id) else change.id
        known = self.missing_after or self.change
        is_missing = bool(known and change.previous) and _is_later(change.previous, known)
        complete = known if is_missing else change.id
        missing = complete if _is_later(last, complete) else ""
        return replace(self, stamp=change.lsn, change=last, missing_after=missing)


def _is_later(change: str, other: str) -> bool:
    """Return True if the id of a change is above another."""
    return EventPosition.parse(change) > EventPosition.parse(other)


class TableFailedError(TargetError):
    """A table rejects a change, or a row of its snapshot."""

    source: TableName


class OutgrownError(TargetError):
    """A change has columns that its table lacks."""

    source: TableName
    shape: TableShape


@contextmanager
def taking(source: TableName, target: TableName, failing: Callable[[], None]) -> Iterator[None]:
    """Raise TableFailedError if the server rejects a statement in the block, after calling `failing`. The
    server's message is left out, because it may hold values."""
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
        f"{target} rejected a change: {type(failed).__name__}{f' ({where})' if where else ''}",
        "read the log of the target's server, fix the table and start the consumer again; or copy"
        f" the whole table again: pgrepl consume FILE.json --resnapshot {target}",
    )


def table_failed(source: TableName, message: str, hint: str) -> TableFailedError:
    """Return the error of one table."""
    error = TableFailedError(message, hint)
    error.source = source
    return error


def check_target(cursor: Any, whose: tuple[str, str], source: TableName, target: TableName) -> None:
    """Raise TableFailedError for a target that another consumer or source fills, that is not a table, or that
    has rows which this consumer has not written.

    If two transactions check a target at the same time, the second waits until the first is finished.
    """
    cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"_pgrepl_consumer {target}",))
    of = (str(target), *whose, str(source))
    cursor.execute(_OTHERS, of)
    if (found := cursor.fetchone()) is not None:
        consumer, database, other = found
        raise table_failed(
            source,
            f"{target} holds the rows of {other} of {database}, which consumer {consumer} keeps there",
            "give each source a target of its own; if that consumer is given up, delete its row from"
            " _pgrepl_consumer.tables",
        )
    cursor.execute(_FOUND, (target.sql,))
    if (found := cursor.fetchone()) is None:
        return
    oid, kind = found
    if kind not in _TABLES:
        raise table_failed(
            source, f"{target} is not a table: nothing was changed", "name another target, or rename that one"
        )
    cursor.execute(_OWN, of)
    recorded = cursor.fetchone()
    cursor.execute(f"SELECT EXISTS (SELECT FROM {target.sql})")  # noqa: S608 - a quoted name
    (has_rows,) = cursor.fetchone()
    if has_rows and recorded is None:
        raise table_failed(
            source,
            f"{target} has rows that no consumer has written: nothing was changed",
            f"name another target; or empty it (TRUNCATE {target}) if its rows are not needed",
        )
    if has_rows and recorded is not None:
        _check_oid(source, target, recorded[0], oid)


def check_kept(cursor: Any, table: ConsumerTableState) -> None:
    """Raise TableFailedError if the target's name now identifies another table than the one that was
    filled."""
    cursor.execute(_FOUND, (table.target.sql,))
    if (found := cursor.fetchone()) is not None:
        _check_oid(table.source, table.target, table.target_oid, found[0])


def _check_oid(source: TableName, target: TableName, recorded: int, oid: int) -> None:
    # A record of an earlier version has 0.
    if recorded in (0, oid):
        return
    raise table_failed(
        source,
        f"{target} is another table (oid {oid}) than the one that the consumer has filled (oid {recorded}),"
        " which was dropped or renamed: nothing was changed",
        f"name another target, or rename that table. If its rows are not needed, TRUNCATE {target}"
        f" and copy the whole table again: pgrepl consume FILE.json --resnapshot {target}. If the consumer"
        f" filled it, as after a restore, set its target_oid in _pgrepl_consumer.tables to {oid}",
    )


class CopyDatabase:
    """The tables that one consumer has of one database. Used by one thread at a time.

    Raises TargetUnavailableError if PostgreSQL does not answer, and FencedError if another process applies
    changes to the same tables.
    """

    def __init__(self, dsn: str, consumer: str, database: str) -> None:
        self._whose, self._run_id = (consumer, database), uuid4().hex
        self._known: dict[TableName, tuple[TableShape, dict[str, str]]] = {}
        self._stream: AppliedStreamPosition | None = None
        with answering():
            self._connection = connect(dsn, f"pgrepl consume {consumer}")
            with self._connection, self._connection.cursor() as cursor:
                cursor.execute("SET TIME ZONE 'UTC'; SET search_path TO pg_catalog; SET DateStyle TO ISO")
                make_state(cursor)

    def close(self) -> None:
        """Close the connection; an open transaction is rolled back."""
        self._connection.close()

    def read(self) -> tuple[AppliedStreamPosition, dict[TableName, ConsumerTableState]]:
        """Return the position in the stream, and the tables by their sources. From then on, other processes
        of the consumer can no longer write."""
        with answering(), self._connection, self._connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO _pgrepl_consumer.streams (consumer, database, made, sequence, run)"
                " VALUES (%s, %s, '', 0, %s) ON CONFLICT (consumer, database) DO UPDATE"
                " SET run = excluded.run RETURNING made, sequence",
                (*self._whose, self._run_id),
            )
            self._stream = AppliedStreamPosition(*cursor.fetchone())
            cursor.execute(
                "SELECT source, target, stamp, change, sequence, error, target_oid, missing_after"
                " FROM _pgrepl_consumer.tables WHERE consumer = %s AND database = %s AND stamp <> %s",
                (*self._whose, _LEFT_OUT),
            )
            tables = [
                ConsumerTableState(TableName.parse(source), TableName.parse(target), LSN(stamp), *rest)
                for source, target, stamp, *rest in cursor.fetchall()
            ]
        return self._stream, {table.source: table for table in tables}

    @contextmanager
    def loading(
        self, source: TableName, target: TableName, shape: TableShape, stream: AppliedStreamPosition
    ) -> Iterator[TableLoad]:
        """Replace all rows of a table in the block. If the block raises, the table is unchanged. `stream`:
        the position in the stream that the block records. Raises what `check_target` raises."""
        with self.transaction() as cursor:
            check_target(cursor, self._whose, source, target)
            with taking(source, target, self.forget_types):
                cursor.execute(shape.create_sql(target))
                for statement in shape.missing_sql(target, self._read_types(cursor, target)):
                    cursor.execute(statement)
                types = self._types(cursor, source, target, shape)
                cursor.execute(f"DELETE FROM {target.sql}")  # noqa: S608 - a quoted name
            yield TableLoad(self, cursor, (source, target), shape.insert_sql(target, types))
        self._stream = stream

    def keep_only(self, sources: Collection[TableName]) -> None:
        """Leave out all other tables: their changes are not applied, and if they are named again they are
        loaded from a snapshot. Their records are kept, as evidence that the consumer has written their
        rows."""
        with self.transaction() as cursor:
            cursor.execute(
                "UPDATE _pgrepl_consumer.tables SET stamp = %s WHERE consumer = %s AND database = %s"
                " AND NOT source = ANY (%s)",
                (_LEFT_OUT, *self._whose, list(map(str, sources))),
            )

    def apply(
        self,
        kept: Mapping[TableName, ConsumerTableState],
        changes: Sequence[Applied],
        sequence: int,
        stream: AppliedStreamPosition,
    ) -> dict[TableName, ConsumerTableState]:
        """Apply all changes in order, in one transaction, and return the changed records of tables after
        messages up to `sequence` were read. Raises TableFailedError or OutgrownError, and then applies
        nothing."""
        after = {
            source: table.read_to(sequence, stream.sequence)
            for source, table in kept.items()
            if table.is_behind and not table.error
        }
        with self.transaction() as cursor:
            for source in {source for source, _, _ in changes}:
                check_kept(cursor, kept[source])
            for source, shape, change in changes:
                table = after.get(source, kept[source])
                if not table.has(change):
                    self._run(cursor, table, shape, change)
                    table = table.with_change(change)
                after[source] = table
            after = {source: self.write_table(cursor, table) for source, table in after.items()}
            self.write_stream(cursor, stream)
        self._stream = stream
        return after

    def write_failed(self, table: ConsumerTableState) -> None:
        """Record a table to which no more changes are applied."""
        with self.transaction() as cursor:
            self.write_table(cursor, table)

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """Run the block in a transaction. Raises FencedError before the block if another process has begun
        since `read`, or has changed the position in the stream."""
        with answering(), self._connection, self._connection.cursor() as cursor:
            cursor.execute(
                "SELECT run, made, sequence FROM _pgrepl_consumer.streams"
                " WHERE consumer = %s AND database = %s FOR UPDATE",
                self._whose,
            )
            run, *position = cursor.fetchone() or ("", "", 0)
            # An earlier version writes no run. The position alone does not differ while a table is behind.
            if run != self._run_id or AppliedStreamPosition(*position) != self._stream:
                consumer, database = self._whose
                raise FencedError(
                    f"another process of consumer {consumer} has begun to apply the stream of {database}",
                    "keep one of the two: if both are restarted, they replace each other. A consumer with"
                    " another name needs other target tables",
                )
            yield cursor

    def write_stream(self, cursor: Any, stream: AppliedStreamPosition) -> None:
        cursor.execute(
            "UPDATE _pgrepl_consumer.streams SET (made, sequence) = (%s, %s)"
            " WHERE consumer = %s AND database = %s",
            (stream.made, stream.sequence, *self._whose),
        )

    def write_table(self, cursor: Any, table: ConsumerTableState) -> ConsumerTableState:
        """Record a table, and return it with its target's oid."""
        place = (str(table.target), int(table.stamp), table.change)
        progress = (table.sequence, table.error, table.missing_after)
        cursor.execute(
            "INSERT INTO _pgrepl_consumer.tables"
            " (consumer, database, source, target, stamp, change, sequence, error, missing_after, target_oid)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s,"
            " coalesce(nullif(%s, 0), pg_catalog.to_regclass(%s)::oid::bigint, 0))"
            " ON CONFLICT (consumer, database, source) DO UPDATE"
            " SET (target, stamp, change, sequence, error, missing_after, target_oid) = (excluded.target,"
            " excluded.stamp, excluded.change, excluded.sequence, excluded.error, excluded.missing_after,"
            " excluded.target_oid) RETURNING target_oid",
            (*self._whose, str(table.source), *place, *progress, table.target_oid, table.target.sql),
        )
        return replace(table, target_oid=cursor.fetchone()[0])

    def _types(self, cursor: Any, source: TableName, target: TableName, shape: TableShape) -> dict[str, str]:
        """Return the SQL types of a target's columns. Raises OutgrownError if columns are missing,
        TableFailedError if a column may lose part of a value."""
        known = self._known.get(target)
        if known is None or known[0] is not shape:
            held = self._read_types(cursor, target)
            if missing := [column.name for column in shape.columns if column.name not in held]:
                error = OutgrownError(
                    f"{target} is taken whole again, for it lacks {', '.join(missing)}",
                    f"check that the publisher of {source} runs and that its lake has the column; to copy"
                    f" the table again: pgrepl consume FILE.json --resnapshot {target}",
                )
                error.source, error.shape = source, shape
                raise error
            for column in shape.columns:
                if keeps_less(column.pg_type, held[column.name]):
                    raise table_failed(
                        source,
                        f"{target}: {column.name} is {held[column.name]}, and keeps less than"
                        f" {column.pg_type}",
                        f"ALTER TABLE {target.sql} ALTER COLUMN {quote_identifier(column.name)} TYPE"
                        f" {column.pg_type}; then start the consumer again",
                    )
            known = self._known[target] = shape, held
        return known[1]

    def forget_types(self) -> None:
        """Forget the types of columns, because added columns are rolled back."""
        self._known.clear()

    def _run(self, cursor: Any, table: ConsumerTableState, shape: TableShape, change: WalChange) -> None:
        target = table.target
        if not shape.keys and table.may_have(change):
            raise table_failed(
                table.source,
                f"{target} has no key, and a change of it arrives after later ones: those cannot be applied"
                " again",
                f"copy it again: pgrepl consume FILE.json --resnapshot {target}",
            )
        with taking(table.source, target, self.forget_types):
            if change.op == "t":
                cursor.execute(f"TRUNCATE {target.sql}")
                return
            types = self._types(cursor, table.source, target, shape)
            if change.op == "c" and change.unchanged:
                raise table_failed(
                    table.source,
                    f"a row of {table.source} was moved into the publication's row filter, and the source"
                    f" did not send {', '.join(map(one_line, change.unchanged))}",
                    "give the source's table REPLICA IDENTITY FULL, with which the source sends such values;"
                    f" then copy it again: pgrepl consume FILE.json --resnapshot {target}",
                )
            # Without a key, `u` is of a table whose index has all columns: FULL sends `u_pk`.
            before = change.before if change.op in ("d", "u_pk") or not shape.keys else None
            if shape.keys and change.after and change.op != "d" and (before or change.unchanged):
                # Update the row instead of deleting and inserting it: the values that were not sent stay in
                # it.
                key = before or {one.field: change.after[one.field] for one in shape.keys}
                values = adapted({**change.after, **earlier_key(key)})
                cursor.execute(shape.update_key_sql(target, types, change.unchanged), values)
                if cursor.rowcount:
                    return
            elif before is not None:
                cursor.execute(shape.delete_sql(target, types), adapted(before))
                if not shape.keys and not cursor.rowcount:
                    raise table_failed(
                        table.source,
                        f"{target} has no row that is as the source says it was",
                        f"copy it again: pgrepl consume FILE.json --resnapshot {target}",
                    )
            if change.op != "d" and change.after is not None:
                cursor.execute(shape.insert_sql(target, types, change.unchanged), adapted(change.after))

    @staticmethod
    def _read_types(cursor: Any, target: TableName) -> dict[str, str]:
        cursor.execute(_COLUMNS, (target.sql,))
        return dict(cursor.fetchall())


class TableLoad:
    """A table whose rows are replaced within a transaction by the rows that are added."""

    def __init__(self, copy: CopyDatabase, cursor: Any, of: tuple[TableName, TableName], insert: str) -> None:
        self._copy, self._cursor, self._insert = copy, cursor, insert
        self._source, self._target = of

    def add(self, rows: Sequence[Row]) -> None:
        """Insert rows. Raises TableFailedError."""
        with taking(self._source, self._target, self._copy.forget_types):
            psycopg2.extras.execute_batch(self._cursor, self._insert, list(map(adapted, rows)), _PAGE)

    def finish(
        self, header: SnapshotHeader, stream: AppliedStreamPosition, sequence: int
    ) -> ConsumerTableState:
        """Record the table's position, and the stream's, in the transaction of the rows, and return the
        table."""
        table = ConsumerTableState(self._source, self._target, header.lsn, header.position, sequence)
        table = self._copy.write_table(self._cursor, table)
        self._copy.write_stream(self._cursor, stream)
        return table


def adapted(row: Row) -> dict[str, Any]:
    """Return the values as psycopg2 accepts them."""
    return {field: _plain(value) for field, value in row.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, UUID):
        return str(value)
    return [_plain(one) for one in value] if isinstance(value, list) else value
