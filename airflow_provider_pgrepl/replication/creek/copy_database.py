"""CopyDatabase: the tables that are kept, and where each is, in one transaction.

Checks that a target is the table that a consumer has filled: nothing is deleted from another one.
A name is no evidence: the owner may have dropped or renamed the table, and made another one of that name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import psycopg2
import psycopg2.extensions
import psycopg2.extras

from airflow_provider_pgrepl.errors import ConfigError, FencedError, TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.creek.messages import Row, SnapshotHeader, WalChange
from airflow_provider_pgrepl.replication.creek.table_shape import TableShape, before_moving
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName

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
"""
_IS_MADE = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_attribute
               WHERE attrelid = to_regclass('_pgrepl_consumer.tables') AND attname = 'target_oid')
"""
UP_TO_DATE = -1
_INTEGERS = frozenset({"smallint", "integer", "bigint", "int2", "int4", "int8"})
_FLOATS = frozenset({"real", "double precision", "float4", "float8"})
_MOMENTS = ("timestamp", "time")
_SIZED = re.compile(r"(?P<name>[a-z0-9 _\"]+?)(\((?P<first>\d+)(,(?P<second>-?\d+))?\))?(?P<zone> with.*)?")
_SHORT = {"decimal": "numeric", "timestamp without time zone": "timestamp"}
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
"""A change, with the source that it is of."""
_PAGE = 500
_LEFT_OUT = -1
"""The stamp of a table that the consumer has kept, and does not keep now."""
_COLUMNS = """
SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod) FROM pg_catalog.pg_attribute a
WHERE a.attrelid = pg_catalog.to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped
"""


def connect(dsn: str, name: str) -> psycopg2.extensions.connection:
    """Raises ConfigError, which shows nothing of the DSN, and psycopg2's errors."""
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
    """Make the schema where it is missing, or of an earlier version. Raises TargetError without the right."""
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
    """Raises TargetUnavailableError for what a lost connection raises."""
    failed = ""
    try:
        yield
    except (psycopg2.OperationalError, psycopg2.InterfaceError) as error:
        failed = type(error).__name__
    if failed:
        raise TargetUnavailableError(
            f"the database of the copy does not answer: {failed}",
            "is it there, and are host and login right? What is applied is kept, and the rest comes again",
        )


@dataclass(frozen=True)
class KeptStream:
    """All messages up to `sequence` are applied, but for tables that failed. `made`: when the server made the
    stream, since one that is made anew counts from 1 again."""

    made: str = ""
    sequence: int = 0


@dataclass(frozen=True)
class KeptTable:
    """`stamp`: of the last change in it; `change`: its id, empty when that is not known. `sequence`: up to
    which message it is, where that is less than the stream, else UP_TO_DATE. `error`: why nothing after that
    is applied. `target_oid`: of the table that was filled; 0 if it is not recorded yet."""

    source: TableName
    target: TableName
    stamp: LSN
    change: str
    sequence: int = UP_TO_DATE
    error: str = ""
    target_oid: int = 0

    @property
    def is_behind(self) -> bool:
        """Whether it has yet to come to where the stream is."""
        return self.sequence != UP_TO_DATE

    def read_to(self, sequence: int, stream: int) -> KeptTable:
        """Once messages up to one were read, where others are at `stream`."""
        if not self.is_behind or self.error:
            return self
        return replace(self, sequence=UP_TO_DATE if sequence >= stream else sequence)

    def has(self, change: WalChange) -> bool:
        """Whether a change is in the table. One that is sent again has a higher stamp, and the same id."""
        if change.id and self.change:
            return EventPosition.parse(change.id) <= EventPosition.parse(self.change)
        return change.lsn <= self.stamp


def keeps_less(source: str, target: str) -> bool:
    """Whether a column of type `target` may keep less of a value than what one of `source` has. Both as SQL
    writes them: `pg_catalog."numeric"(10,2)`, `timestamp(0) with time zone`."""
    (name, size, scale, zone), (of, limit, to, to_zone) = _parts(source), _parts(target)
    if of in _INTEGERS:
        return name == "numeric" or name in _FLOATS
    if of == "numeric" and limit is not None:
        return name in _FLOATS or (name == "numeric" and (scale is None or (to or 0) < scale))
    if of in ("real", "float4"):
        return name == "numeric" or name in ("double precision", "float8")
    if of in ("double precision", "float8"):
        return name == "numeric"
    if of == "date":
        return name.startswith("timestamp")
    if of.startswith(_MOMENTS):
        is_moment = name.startswith(_MOMENTS)
        return is_moment and ((limit is not None and size is None) or of[:5] != name[:5] or zone != to_zone)
    return False


def _parts(text: str) -> tuple[str, int | None, int | None, bool]:
    """Name, length or precision, scale, and whether a moment has a zone."""
    found = _SIZED.fullmatch(text.replace("pg_catalog.", "").replace('"', "").lower())
    if found is None:
        return text, None, None, False
    first, second = (None if found[key] is None else int(found[key]) for key in ("first", "second"))
    name = found["name"]
    has_zone = name.endswith("tz") or (found["zone"] or "").startswith(" with time zone")
    scale = (second or 0) if first is not None else None
    return _SHORT.get(name, name).removesuffix("tz"), first, scale, has_zone


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


def check_target(cursor: Any, whose: tuple[str, str], source: TableName, target: TableName) -> None:
    """Raise TableFailedError for a target that another consumer or source keeps, that is no table, or that
    has rows which this consumer has not written.

    Of two that take one target at once, the second waits for the first to be recorded or to fail.
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
            f"name another target; or empty it (TRUNCATE {target}) if nobody needs its rows",
        )
    if has_rows and recorded is not None:
        _check_oid(source, target, recorded[0], oid)


def check_kept(cursor: Any, table: KeptTable) -> None:
    """Raise TableFailedError if a table of the target's name is another one than was filled."""
    cursor.execute(_FOUND, (table.target.sql,))
    if (found := cursor.fetchone()) is not None:
        _check_oid(table.source, table.target, table.target_oid, found[0])


def _check_oid(source: TableName, target: TableName, recorded: int, oid: int) -> None:
    # 0: an earlier version has not recorded it.
    if recorded in (0, oid):
        return
    raise table_failed(
        source,
        f"{target} is another table (oid {oid}) than the one that the consumer has filled (oid {recorded}),"
        " which was dropped or renamed: nothing was changed",
        f"name another target, or rename that table. If nobody needs its rows, TRUNCATE {target} and take it"
        f" whole: --resnapshot {target}. If the consumer filled it, as after a restore, set"
        f" its target_oid in _pgrepl_consumer.tables to {oid}",
    )


class CopyDatabase:
    """One consumer's tables of one database; used by one thread at a time.

    Raises TargetUnavailableError when PostgreSQL is away, and FencedError when another process moves the same
    tables.
    """

    def __init__(self, dsn: str, consumer: str, database: str) -> None:
        self._whose = consumer, database
        self._known: dict[TableName, tuple[TableShape, dict[str, str]]] = {}
        self._stream: KeptStream | None = None
        with answering():
            self._connection = connect(dsn, f"pgrepl consume {consumer}")
            with self._connection, self._connection.cursor() as cursor:
                cursor.execute("SET TIME ZONE 'UTC'; SET search_path TO pg_catalog; SET DateStyle TO ISO")
                make_state(cursor)

    def close(self) -> None:
        """End the connection; what is not committed is undone."""
        self._connection.close()

    def read(self) -> tuple[KeptStream, dict[TableName, KeptTable]]:
        """Where the stream is, and the tables by their sources."""
        with answering(), self._connection, self._connection.cursor() as cursor:
            cursor.execute(
                "SELECT made, sequence FROM _pgrepl_consumer.streams WHERE consumer = %s AND database = %s",
                self._whose,
            )
            found = cursor.fetchone()
            self._stream = KeptStream(*found) if found else KeptStream()
            if not found:
                # So that of two who begin one waits for the other.
                self.write_stream(cursor, self._stream)
            cursor.execute(
                "SELECT source, target, stamp, change, sequence, error, target_oid"
                " FROM _pgrepl_consumer.tables WHERE consumer = %s AND database = %s AND stamp <> %s",
                (*self._whose, _LEFT_OUT),
            )
            tables = [
                KeptTable(TableName.parse(source), TableName.parse(target), LSN(stamp), *rest)
                for source, target, stamp, *rest in cursor.fetchall()
            ]
        return self._stream, {table.source: table for table in tables}

    @contextmanager
    def loading(
        self, source: TableName, target: TableName, shape: TableShape, stream: KeptStream
    ) -> Iterator[Loading]:
        """A table is taken whole in the block; when that raises, it is what it was. `stream`: where the
        stream is then. Raises what `check_target` does."""
        with self.transaction() as cursor:
            check_target(cursor, self._whose, source, target)
            with taking(source, target, self.forget_types):
                cursor.execute(shape.create_sql(target))
                for statement in shape.missing_sql(target, self._read_types(cursor, target)):
                    cursor.execute(statement)
                types = self._types(cursor, source, target, shape)
                cursor.execute(f"DELETE FROM {target.sql}")  # noqa: S608 - a quoted name
            yield Loading(self, cursor, (source, target), shape.insert_sql(target, types))
        self._stream = stream

    def keep_only(self, sources: Collection[TableName]) -> None:
        """Leave all other tables out: what comes for them is not applied, so they are taken whole when they
        are named again. Their records stay, as the evidence whose rows these are."""
        with self.transaction() as cursor:
            cursor.execute(
                "UPDATE _pgrepl_consumer.tables SET stamp = %s WHERE consumer = %s AND database = %s"
                " AND NOT source = ANY (%s)",
                (_LEFT_OUT, *self._whose, list(map(str, sources))),
            )

    def apply(
        self,
        kept: Mapping[TableName, KeptTable],
        changes: Sequence[Applied],
        sequence: int,
        stream: KeptStream,
    ) -> dict[TableName, KeptTable]:
        """All changes in one transaction, in their order; where tables are then, once messages up to
        `sequence` were read. Raises TableFailedError, OutgrownError; nothing is applied then."""
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
                    table = replace(table, stamp=change.lsn, change=change.id or table.change)
                after[source] = table
            for table in after.values():
                self.write_table(cursor, table)
            self.write_stream(cursor, stream)
        self._stream = stream
        return after

    def write_failed(self, table: KeptTable) -> None:
        """Write down that nothing more is applied to a table."""
        with self.transaction() as cursor:
            self.write_table(cursor, table)

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """One that whoever else has moved the stream makes fail, before anything is written."""
        with answering(), self._connection, self._connection.cursor() as cursor:
            cursor.execute(
                "SELECT made, sequence FROM _pgrepl_consumer.streams WHERE consumer = %s AND database = %s"
                " FOR UPDATE",
                self._whose,
            )
            found = cursor.fetchone()
            if found is None or KeptStream(*found) != self._stream:
                consumer, database = self._whose
                raise FencedError(
                    f"another process of consumer {consumer} has moved on the tables of {database}",
                    "end that one, or give this one another name",
                )
            yield cursor

    def write_stream(self, cursor: Any, stream: KeptStream) -> None:
        cursor.execute(
            "INSERT INTO _pgrepl_consumer.streams (consumer, database, made, sequence)"
            " VALUES (%s, %s, %s, %s) ON CONFLICT (consumer, database) DO UPDATE"
            " SET (made, sequence) = (excluded.made, excluded.sequence)",
            (*self._whose, stream.made, stream.sequence),
        )

    def write_table(self, cursor: Any, table: KeptTable) -> None:
        place = (str(table.target), int(table.stamp), table.change, table.sequence, table.error)
        cursor.execute(
            "INSERT INTO _pgrepl_consumer.tables"
            " (consumer, database, source, target, stamp, change, sequence, error, target_oid)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s,"
            " coalesce(nullif(%s, 0), pg_catalog.to_regclass(%s)::oid::bigint, 0))"
            " ON CONFLICT (consumer, database, source) DO UPDATE"
            " SET (target, stamp, change, sequence, error, target_oid) = (excluded.target, excluded.stamp,"
            " excluded.change, excluded.sequence, excluded.error, excluded.target_oid)",
            (*self._whose, str(table.source), *place, table.target_oid, table.target.sql),
        )

    def _types(self, cursor: Any, source: TableName, target: TableName, shape: TableShape) -> dict[str, str]:
        """SQL of the types of a target's columns. Raises OutgrownError, TableFailedError."""
        known = self._known.get(target)
        if known is None or known[0] is not shape:
            held = self._read_types(cursor, target)
            if missing := [column.name for column in shape.columns if column.name not in held]:
                error = OutgrownError(
                    f"{target} is taken whole again, for it lacks {', '.join(missing)}",
                    f"is its publisher running, and has the lake the column? Or: --resnapshot {target}",
                )
                error.source, error.shape = source, shape
                raise error
            for column in shape.columns:
                if keeps_less(column.pg_type, held[column.name]):
                    raise table_failed(
                        source,
                        f"{target}: {column.name} is {held[column.name]}, and keeps less than"
                        f" {column.pg_type}",
                        f"ALTER TABLE {target} ALTER {column.name} TYPE one that keeps all, then start again",
                    )
            known = self._known[target] = shape, held
        return known[1]

    def forget_types(self) -> None:
        """What was added is undone."""
        self._known.clear()

    def _run(self, cursor: Any, table: KeptTable, shape: TableShape, change: WalChange) -> None:
        target = table.target
        with taking(table.source, target, self.forget_types):
            if change.op == "t":
                cursor.execute(f"TRUNCATE {target.sql}")
                return
            types = self._types(cursor, table.source, target, shape)
            before = change.before if change.op in ("d", "u_pk") else None
            if shape.keys and change.after and change.op != "d" and (before or change.unchanged):
                # Not deleted and made again: what was not sent stays with the row.
                key = before or {one.field: change.after[one.field] for one in shape.keys}
                values = adapted({**change.after, **before_moving(key)})
                cursor.execute(shape.move_sql(target, types, change.unchanged), values)
                if cursor.rowcount:
                    return
            elif before is not None:
                cursor.execute(shape.delete_sql(target, types), adapted(before))
                if not shape.keys and not cursor.rowcount:
                    raise table_failed(
                        table.source,
                        f"{target} has no row that is as the source says it was",
                        f"take it whole: --resnapshot {target}",
                    )
            if change.op != "d" and change.after is not None:
                cursor.execute(shape.insert_sql(target, types, change.unchanged), adapted(change.after))

    @staticmethod
    def _read_types(cursor: Any, target: TableName) -> dict[str, str]:
        cursor.execute(_COLUMNS, (target.sql,))
        return dict(cursor.fetchall())


class Loading:
    """A table that is taken whole, within a transaction: its rows are then those that were added."""

    def __init__(self, copy: CopyDatabase, cursor: Any, of: tuple[TableName, TableName], insert: str) -> None:
        self._copy, self._cursor, self._insert = copy, cursor, insert
        self._source, self._target = of

    def add(self, rows: Sequence[Row]) -> None:
        """Raises TableFailedError."""
        with taking(self._source, self._target, self._copy.forget_types):
            psycopg2.extras.execute_batch(self._cursor, self._insert, list(map(adapted, rows)), _PAGE)

    def finish(self, header: SnapshotHeader, stream: KeptStream, sequence: int) -> KeptTable:
        """Where the table is, which is written down with its rows."""
        table = KeptTable(self._source, self._target, header.lsn, header.position, sequence)
        self._copy.write_table(self._cursor, table)
        self._copy.write_stream(self._cursor, stream)
        return table


def adapted(row: Row) -> dict[str, Any]:
    """Values as the driver takes them."""
    return {field: _plain(value) for field, value in row.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, UUID):
        return str(value)
    return [_plain(one) for one in value] if isinstance(value, list) else value
