"""Changes to replicate: transactions of many rows, created in the server so that the client uses no CPU."""

from __future__ import annotations

import hashlib
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import psycopg2

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from benchmarks.source import Source

TABLE = "public.bench"
ROWS_A_TRANSACTION = 1_000

_CREATE = """create table {table} (
    id {type} primary key, k integer not null, v text, amt numeric(12,2), ts timestamptz
)"""
_ROW = (
    "{key}, (g %% 1000)::int, 'value of the row ' || g, (g %% 100000) / 100.0,"
    " timestamptz '2024-01-01' + g * interval '1 second'"
)
_INSERT = f"insert into {{table}} select {_ROW} from generate_series(%s::bigint, %s) g"
_ROWS_AT_ONCE = 500_000
_UPDATE = (
    "update {table} set k = k + 1, v = 'changed ' || id, amt = amt + 1"
    " where id in (select 1 + %s + (%s + g * %s) %% %s from generate_series(0, %s) g)"
)


@dataclass(frozen=True)
class Keys:
    """A kind of primary key.

    `expression`: the key of row number `g` in SQL. `of`: the key of a row number in Python.
    """

    type: str
    expression: str
    of: Callable[[int], int | str]


BIGINT = Keys("bigint", "g", int)
UUIDS = Keys(
    "uuid",
    "md5(g::text)::uuid",
    lambda number: str(UUID(hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest())),
)
"""Keys without order, like random ones."""


def create_table(source: Source, table: str = TABLE, keys: Keys = BIGINT) -> None:
    """Create the table of the workload."""
    source.execute(_CREATE.format(table=table, type=keys.type))


def insert(source: Source, first: int, last: int, table: str = TABLE, keys: Keys = BIGINT) -> None:
    """Insert the rows with these numbers in one transaction."""
    source.execute(_INSERT.format(table=table, key=keys.expression), first, last)


def make_table(source: Source, rows: int, table: str = TABLE, keys: Keys = BIGINT) -> None:
    """Create a table with the rows 1 to `rows`. Call this before replication starts."""
    create_table(source, table, keys)
    source.execute("set synchronous_commit = off")
    for first in range(1, rows + 1, _ROWS_AT_ONCE):
        insert(source, first, min(rows, first + _ROWS_AT_ONCE - 1), table, keys)
    source.execute("set synchronous_commit = on")
    source.execute(f"vacuum analyze {table}")


def fill(source: Source, inserts: int, updates: int, tables: Sequence[str] = (TABLE,)) -> None:
    """Insert `inserts` rows and then update `updates` rows, spread over all of them, in each of the tables.

    A transaction changes a thousand rows of one table. The tables take turns.
    """
    step = ROWS_A_TRANSACTION
    source.execute("set synchronous_commit = off")
    for first in range(1, inserts + 1, step):
        for table in tables:
            insert(source, first, first + step - 1, table)
    for number in range(updates // step):
        for table in tables:
            update(source, number, 0, inserts, table)


def update(source: Source, number: int, start: int, span: int, table: str = TABLE) -> None:
    """Update a thousand rows in one transaction, spread evenly over ids start + 1 … start + span."""
    rows = ROWS_A_TRANSACTION
    source.execute(_UPDATE.format(table=table), start, number * 7919, span // rows, span, rows - 1)


def touch(source: Source, tables: Sequence[str]) -> LSN:
    """Change a row in each table in one transaction.

    Its commit also flushes all earlier ones to the server's disk. Returns an LSN that is at or before this
    commit, and after all earlier commits.
    """
    statements = (
        "select set_config('synchronous_commit', 'on', true)",  # for this transaction
        *(f"update {table} set k = k + 1 where id = 1" for table in tables),
        "select pg_current_wal_insert_lsn()",
    )
    # Statements that are sent together are one transaction, which ends after the last one.
    return LSN.parse(source.fetch("; ".join(statements))[0])


@dataclass
class Committed:
    """The transactions of a generator: the WAL's end after each, its time, and the changes up to it."""

    lsns: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)

    def add(self, lsn: int, changes: int) -> None:
        self.changes.append((self.changes[-1] if self.changes else 0) + changes)
        self.times.append(time.time())
        self.lsns.append(lsn)

    @property
    def total(self) -> int:
        return self.changes[-1] if self.changes else 0

    def applied(self, lsn: int) -> int:
        """Return the number of changes at or before an LSN."""
        count = bisect_right(self.lsns, lsn)
        return self.changes[count - 1] if count else 0

    def lag_s(self, lsn: int, now: float) -> float:
        """Return the age in seconds of the oldest transaction after an LSN, or 0 if there is none."""
        count = bisect_right(self.lsns, lsn)
        return max(0.0, now - self.times[count]) if count < len(self.times) else 0.0


class SteadyLoad(threading.Thread):
    """A thread that commits transactions of a thousand rows at a steady rate.

    Two transactions insert rows, then one updates rows. Updates are spread over the newest 100,000 rows,
    because applications mostly change recent rows.
    """

    _RECENT = 100_000

    def __init__(self, source: Source, first_id: int, changes_per_s: float, seconds: float) -> None:
        super().__init__(name="bench-load", daemon=True)
        self._own = Source(source.server)
        self._next_id = first_id
        self._interval = ROWS_A_TRANSACTION / changes_per_s
        self._count = int(seconds / self._interval)
        self.committed = Committed()
        self.seconds = 0.0
        self.error: psycopg2.Error | None = None

    def run(self) -> None:
        started = time.monotonic()
        try:
            self._own.execute("set synchronous_commit = off")
            for number in range(self._count):
                time.sleep(max(0.0, started + number * self._interval - time.monotonic()))
                self._commit(number)
        except psycopg2.Error as error:
            self.error = error
        finally:
            self.seconds = time.monotonic() - started
            self._own.connection.close()

    def _commit(self, number: int) -> None:
        if number % 3 == 2:
            update(self._own, number, self._next_id - 1 - self._RECENT, self._RECENT)
        else:
            insert(self._own, self._next_id, self._next_id + ROWS_A_TRANSACTION - 1)
            self._next_id += ROWS_A_TRANSACTION
        lsn = LSN.parse(self._own.fetch("select pg_current_wal_insert_lsn()")[0])
        self.committed.add(lsn, ROWS_A_TRANSACTION)
