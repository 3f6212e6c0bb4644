"""Random transactions of several sessions on random tables, the same ones for the same seed.

One thread drives all sessions, a statement at a time, so that a seed gives the same history again. A session
that would wait for another gives up that statement, as a savepoint allows. Between two statements no session
commits, so the rows that the source shows then belong to its LSN.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import psycopg2
import psycopg2.errors
import psycopg2.extensions

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source.connection import connect, rows
from tests.support.random_oracle import Rows, source_rows
from tests.support.random_tables import Column, Table
from tests.support.replicated import wait_until

_EXPECTED = (
    psycopg2.errors.LockNotAvailable,
    psycopg2.errors.DeadlockDetected,
    psycopg2.errors.UniqueViolation,
    # A session with few digits rounds the largest float up to a number that is out of range.
    psycopg2.errors.NumericValueOutOfRange,
)
_SETTINGS = (
    "set timezone = 'Asia/Kathmandu'",
    "set datestyle = 'SQL, DMY'",
    "set intervalstyle = 'sql_standard'",
    "set bytea_output = 'escape'",
    "set extra_float_digits = -10",
)


@dataclass(frozen=True)
class Moment:
    """The rows of the source when its WAL was at an LSN: those of all earlier commits, and no others."""

    lsn: LSN
    rows: dict[str, Rows]


@dataclass
class Session:
    """A session of the source, in a transaction or not."""

    connection: psycopg2.extensions.connection
    left: int = 0
    savepoints: list[int] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)


class Workload:
    """Sessions that write. `moments`: the states that were seen; `messages`: those committed, in order."""

    def __init__(self, dsn: str, tables: list[Table], seed: int, sessions: int = 3) -> None:
        self._tables = tables
        self._chance = random.Random(seed)
        self._sessions = [Session(psycopg2.connect(dsn)) for _ in range(sessions)]
        for session in self._sessions:
            with session.connection, session.connection.cursor() as cursor:
                cursor.execute("set lock_timeout = '5ms'")
                cursor.execute(self._chance.choice(_SETTINGS))
        self._observer = connect(dsn, "observe")
        with self._observer.cursor() as cursor:
            cursor.execute("set lock_timeout = '5ms'")
        self._stop = threading.Event()
        self._allowed, self._ends_all = 0, False
        self._emitted = 0
        self.steps = 0
        self.moments: list[Moment] = []
        self.messages: list[bytes] = []
        self.error: BaseException | None = None

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Take steps in a thread until the end of the block. Raises the thread's error."""
        self._stop.clear()
        thread = threading.Thread(target=self._run_until_stopped, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(60)
        if self.error is not None:
            raise self.error

    def allow(self, steps: int) -> None:
        """Take `steps` more steps, and leave no transaction open after them: creating a slot waits for open
        transactions."""
        self._allowed, self._ends_all = self.steps + steps, True

    def wait_for_more(self, steps: int) -> None:
        """Take `steps` more steps; transactions may be open after them."""
        self._allowed, self._ends_all = self.steps + steps, False
        wait_until(lambda: self.steps >= self._allowed or self.error is not None)

    def end(self) -> None:
        """End all transactions, one way or the other, and see what is there."""
        self._end_transactions()
        self.observe()
        for session in self._sessions:
            session.connection.close()
        self._observer.close()

    def observe(self) -> None:
        with contextlib.suppress(psycopg2.errors.LockNotAvailable):
            lsn = LSN.parse(str(rows(self._observer, "select pg_current_wal_insert_lsn()::text")[0][0]))
            shown = {table.name: source_rows(self._observer, table) for table in self._tables}
            self.moments.append(Moment(lsn, shown))

    def _run_until_stopped(self) -> None:
        try:
            while not self._stop.wait(0.002):
                if self.steps < self._allowed:
                    self._step()
                elif self._ends_all:
                    self._end_transactions()
        except BaseException as error:
            self.error = error

    def _step(self) -> None:
        self.steps += 1
        if self._chance.random() < 0.04:
            self.observe()
        session = self._chance.choice(self._sessions)
        if session.left == 0:
            self._end_transaction(session)
            session.left = self._chance.choice((1, 1, 2, 3, 5, 8))
            return
        session.left -= 1
        with session.connection.cursor() as cursor:
            if self._chance.random() < 0.15:
                self._use_savepoint(cursor, session)
            cursor.execute("savepoint statement")
            try:
                self._write(cursor, session)
            except _EXPECTED:
                cursor.execute("rollback to savepoint statement")
            cursor.execute("release savepoint statement")

    def _end_transactions(self) -> None:
        for session in self._sessions:
            session.left = 0
            self._end_transaction(session)

    def _end_transaction(self, session: Session) -> None:
        if self._chance.random() < 0.15:
            session.connection.rollback()
        else:
            session.connection.commit()
            self.messages += session.messages
        session.savepoints, session.messages = [], []

    def _use_savepoint(self, cursor: psycopg2.extensions.cursor, session: Session) -> None:
        if session.savepoints and self._chance.random() < 0.6:
            depth = self._chance.randrange(len(session.savepoints))
            cursor.execute(f"rollback to savepoint s{depth}")
            del session.messages[session.savepoints[depth] :]
            del session.savepoints[depth + 1 :]
        else:
            cursor.execute(f"savepoint s{len(session.savepoints)}")
            session.savepoints.append(len(session.messages))

    def _write(self, cursor: psycopg2.extensions.cursor, session: Session) -> None:
        if self._chance.random() < 0.05:
            self._emit(cursor, session)
            return
        table = self._chance.choice(self._tables)
        writes = [self._insert] * 4
        if table.may_change:
            writes += [self._update] * 4 + [self._delete] * 2
        if table.key:
            writes += [self._move_key] * 2 + [self._insert_or_update] + [self._delete_and_insert]
        else:
            writes += [self._double]
        if self._chance.random() < 0.02:
            self._truncate(cursor, table)
        else:
            self._chance.choice(writes)(cursor, table)

    def _emit(self, cursor: psycopg2.extensions.cursor, session: Session) -> None:
        self._emitted += 1
        content = f"message {self._emitted}"
        cursor.execute("select pg_logical_emit_message(true, 'random', %s)", (content,))
        session.messages.append(content.encode())

    def _insert(self, cursor: psycopg2.extensions.cursor, table: Table, clause: str = "") -> None:
        if table.key and not clause and self._chance.random() < 0.7:
            clause = " on conflict do nothing"
        new = [self._row(table) for _ in range(self._chance.choice((1, 1, 1, 2, 5)))]
        holders = ", ".join(f"%s::{column.type.sql}" for column in table.columns)
        cursor.execute(
            f"insert into {table.sql} values {', '.join([f'({holders})'] * len(new))}{clause}",
            [value for row in new for value in row],
        )

    def _row(self, table: Table) -> list[str | None]:
        return [column.value(self._chance) for column in table.columns]

    def _insert_or_update(self, cursor: psycopg2.extensions.cursor, table: Table) -> None:
        if not table.rest:
            return
        key = ", ".join(column.sql for column in table.key)
        chosen = self._chance.choice(table.rest).sql
        holders = ", ".join(f"%s::{column.type.sql}" for column in table.columns)
        cursor.execute(
            f"insert into {table.sql} values ({holders})"
            f" on conflict ({key}) do update set {chosen} = excluded.{chosen}",
            self._row(table),
        )

    def _update(self, cursor: psycopg2.extensions.cursor, table: Table) -> None:
        if not table.rest:
            return
        chosen = self._chance.sample(table.rest, self._chance.randint(1, len(table.rest)))
        self._set(cursor, table, chosen, self._chance.choice((1, 1, 2, 30)))

    def _move_key(self, cursor: psycopg2.extensions.cursor, table: Table) -> None:
        chosen = self._chance.sample(table.key, self._chance.randint(1, len(table.key)))
        if table.rest and self._chance.random() < 0.3:
            chosen.append(self._chance.choice(table.rest))
        self._set(cursor, table, chosen, 1)

    def _set(
        self, cursor: psycopg2.extensions.cursor, table: Table, columns: list[Column], limit: int
    ) -> None:
        changes, values = [], []
        for column in columns:
            if self._chance.random() < 0.1:
                changes.append(f"{column.sql} = {column.sql}")
            else:
                changes.append(f"{column.sql} = %s::{column.type.sql}")
                values.append(column.value(self._chance))
        picked, salt = self._picked(table, limit)
        cursor.execute(f"update {table.sql} set {', '.join(changes)} where {picked}", [*values, *salt])

    def _delete(self, cursor: psycopg2.extensions.cursor, table: Table) -> None:
        picked, salt = self._picked(table, self._chance.choice((1, 1, 2, 30)))
        cursor.execute(f"delete from {table.sql} where {picked}", salt)

    def _delete_and_insert(self, cursor: psycopg2.extensions.cursor, table: Table) -> None:
        """A row goes, and comes back with its key and other values."""
        picked, salt = self._picked(table, 1)
        key = ", ".join(f"{column.sql}::text" for column in table.key)
        cursor.execute(f"delete from {table.sql} where {picked} returning {key}", salt)
        for old in cursor.fetchall():
            known = dict(zip((column.name for column in table.key), old, strict=True))
            new = [known.get(column.name, column.value(self._chance)) for column in table.columns]
            holders = ", ".join(f"%s::{column.type.sql}" for column in table.columns)
            cursor.execute(f"insert into {table.sql} values ({holders})", new)

    def _double(self, cursor: psycopg2.extensions.cursor, table: Table) -> None:
        """The same rows once more; a table without a key may hold them."""
        picked, salt = self._picked(table, 3)
        cursor.execute(f"insert into {table.sql} select * from {table.sql} where {picked}", salt)

    def _truncate(self, cursor: psycopg2.extensions.cursor, table: Table) -> None:
        others = self._chance.sample(self._tables, self._chance.randint(0, 2))
        names = ", ".join(sorted({table.sql, *(other.sql for other in others)}))
        cursor.execute(f"truncate {names}{self._chance.choice(('', ' restart identity', ' cascade'))}")

    def _picked(self, table: Table, limit: int) -> tuple[str, list[str]]:
        """A condition that some rows fulfil, by chance, but the same ones each time."""
        chosen = f"select ctid from {table.sql} order by md5(ctid::text || %s) limit {limit}"
        return f"ctid = any(array({chosen}))", [str(self._chance.random())]
