"""CopyDatabase: the tables that are kept, and where each is, in one transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID

import psycopg2
import psycopg2.extensions
import psycopg2.extras

from airflow_provider_pgrepl.errors import FencedError
from airflow_provider_pgrepl.replication.creek.connection import answering, connect, make_state
from airflow_provider_pgrepl.replication.creek.failures import OutgrownError, table_failed, taking
from airflow_provider_pgrepl.replication.creek.kept_table import KeptStream, KeptTable
from airflow_provider_pgrepl.replication.creek.messages import Row, SnapshotHeader, WalChange
from airflow_provider_pgrepl.replication.creek.narrower import keeps_less
from airflow_provider_pgrepl.replication.creek.table_shape import TableShape, before_moving
from airflow_provider_pgrepl.replication.creek.target_check import check_kept, check_target
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName

Applied = tuple[TableName, TableShape, WalChange]
"""A change, with the source that it is of."""
_PAGE = 500
_LEFT_OUT = -1
"""The stamp of a table that the consumer has kept, and does not keep now."""
_COLUMNS = """
SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod) FROM pg_catalog.pg_attribute a
WHERE a.attrelid = pg_catalog.to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped
"""


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
