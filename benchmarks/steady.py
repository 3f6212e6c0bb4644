"""Loads of small transactions at a steady rate, from one connection."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg2

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from benchmarks.visibility import Commits
from benchmarks.workload import BIGINT, Keys

Transaction = Callable[[int], tuple[str, Any]]
"""A function that returns the statements and values of a transaction, by its number from 0 on."""

CHANGES = 10
"""The number of changes of a transaction of `random_updates` and of `updates_in_turn`."""


class SteadyLoad:
    """A thread that commits transactions at a steady rate.

    `commits`: for each transaction, an LSN before its commit record and the time when COMMIT returned.
    """

    def __init__(self, dsn: str, transactions_per_s: float, transaction: Transaction) -> None:
        self._dsn = dsn
        self._pause = 1 / transactions_per_s
        self._transaction = transaction
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: Exception | None = None
        self.commits: list[tuple[int, float]] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> Commits:
        """End after the current transaction, and return `commits`. Raises the error that ended the load."""
        self._stopping.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.commits

    def _run(self) -> None:
        connection = psycopg2.connect(self._dsn)
        try:
            with connection.cursor() as cursor:
                self._commit_steadily(connection, cursor)
        except psycopg2.Error as error:
            self._error = error
        finally:
            connection.close()

    def _commit_steadily(
        self, connection: psycopg2.extensions.connection, cursor: psycopg2.extensions.cursor
    ) -> None:
        started, number = time.monotonic(), 0
        while not self._stopping.wait(max(0.0, started + number * self._pause - time.monotonic())):
            statements, values = self._transaction(number)
            cursor.execute(f"{statements}; select pg_current_wal_insert_lsn()", values)
            lsn = LSN.parse(cursor.fetchone()[0])
            connection.commit()
            self.commits.append((lsn, time.time()))
            number += 1


def inserts_and_updates(tables: Sequence[str], rows: int, first_id: int = 0) -> Transaction:
    """Return transactions that insert one row and update one of ids 1 to `rows` in every table.

    `first_id`: the id of the first inserted row, by default `rows` + 1.
    """
    statements = "; ".join(
        f"insert into {table} values (%(id)s, 1, 'new', 1.5, now());"
        f" update {table} set k = k + 1 where id = %(old)s"
        for table in tables
    )
    first = first_id or rows + 1
    return lambda number: (statements, {"id": first + number, "old": 1 + number * 7919 % rows})


def random_updates(table: str, numbers: range, keys: Keys = BIGINT) -> Transaction:
    """Return transactions that update ten random rows of one table, among those with these numbers."""
    chance = random.Random(1)  # noqa: S311 - rows of a load
    statement = (
        f"update {table} set k = k + 1, v = 'changed ' || id where id = any(%s::text[]::{keys.type}[])"
    )
    return lambda _number: (statement, ([str(keys.of(row)) for row in chance.sample(numbers, CHANGES)],))


def updates_in_turn(tables: Sequence[str], rows: int) -> Transaction:
    """Return transactions that update one row of ids 1 to `rows` in ten tables, each in the next ten."""

    def transaction(number: int) -> tuple[str, Any]:
        statements = "; ".join(
            f"update {table} set k = k + 1, v = 'changed ' || id where id = %(id)s"
            for table in tables_of(tables, number)
        )
        return statements, {"id": 1 + number * 7919 % rows}

    return transaction


def tables_of(tables: Sequence[str], number: int) -> Sequence[str]:
    """Return the tables of a transaction of `updates_in_turn`. The number of tables is a multiple of ten."""
    first = number * CHANGES % len(tables)
    return tables[first : first + CHANGES]
