"""Transfers between accounts that are spread over five tables, by several sessions at once.

Every transaction has a number of its own, which it writes into `ledger` and into each account that it
touches. Numbers are given out before the transaction begins, so their order is not that of the commits.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2
import psycopg2.errors

from tests.support.replicated import wait_until

ACCOUNTS = tuple(f"public.accounts_{letter}" for letter in "abcde")
TABLES = (*ACCOUNTS, "public.ledger")
PER_TABLE = 20
TOTAL = len(ACCOUNTS) * PER_TABLE * 100
SETUP = (
    *(
        statement
        for table in ACCOUNTS
        for statement in (
            f"create table {table}(id int primary key, balance bigint not null, tx int)",
            f"insert into {table} select g, 100 from generate_series(1, {PER_TABLE}) g",
        )
    ),
    "create table public.ledger(tx int primary key, transfers int not null, kind text)",
)
NEVER = -1
"""The number that only what is rolled back writes."""
_EXPECTED = (psycopg2.errors.DeadlockDetected, psycopg2.errors.LockNotAvailable)


class Bank:
    """Sessions that transfer as much as asked for, until stopped; `committed` are the numbers of what was."""

    def __init__(self, dsn: str, seed: int, sessions: int) -> None:
        self._dsn = dsn
        self._numbers = itertools.count(1)
        self._stop = threading.Event()
        self._allowed = 0
        self.committed: set[int] = set()
        self.error: BaseException | None = None
        chances = [random.Random(seed * 100 + number) for number in range(sessions)]
        self._threads = [
            threading.Thread(target=self._run, args=(chance,), daemon=True) for chance in chances
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        if self.error is not None:
            raise self.error

    def make(self, transactions: int) -> None:
        """Commit at least `transactions` more. No session begins another one once they are committed."""
        self._allowed += transactions
        wait_until(lambda: len(self.committed) >= self._allowed or self.error is not None)

    def _run(self, chance: random.Random) -> None:
        connection = psycopg2.connect(self._dsn, options="-c deadlock_timeout=20ms -c lock_timeout=1s")
        try:
            while not self._stop.wait(chance.random() * 0.02):
                if len(self.committed) >= self._allowed:
                    continue
                try:
                    self._transaction(connection, chance, next(self._numbers))
                except _EXPECTED:
                    connection.rollback()
        except BaseException as error:
            self.error = error
        finally:
            connection.close()

    def _transaction(self, connection: Any, chance: random.Random, number: int) -> None:
        with connection.cursor() as cursor:
            transfers = chance.randint(1, 4)
            for _ in range(transfers):
                self._transfer(cursor, chance, number, chance.randint(1, 50))
                if chance.random() < 0.3:
                    cursor.execute("savepoint s")
                    self._spoil(cursor, chance)
                    cursor.execute("rollback to savepoint s")
            cursor.execute("insert into public.ledger values (%s, %s, 'transfer')", (number, transfers))
            if chance.random() < 0.15:
                self._spoil(cursor, chance)
                connection.rollback()
                return
        connection.commit()
        self.committed.add(number)

    def _transfer(self, cursor: Any, chance: random.Random, number: int, amount: int) -> None:
        for signed in (-amount, amount):
            cursor.execute(
                f"update {chance.choice(ACCOUNTS)} set balance = balance + %s, tx = %s where id = %s",
                (signed, number, chance.randint(1, PER_TABLE)),
            )

    def _spoil(self, cursor: Any, chance: random.Random) -> None:
        """Make changes that break the sum and are visible in `ledger`; the caller rolls them back."""
        table, id_ = chance.choice(ACCOUNTS), chance.randint(1, PER_TABLE)
        cursor.execute(f"update {table} set balance = balance + 1000000, tx = {NEVER} where id = {id_}")
        cursor.execute(f"insert into public.ledger values ({NEVER}, 1, 'never')")


@contextmanager
def transfers(dsn: str, seed: int, sessions: int = 4) -> Iterator[Bank]:
    """Transfers until the end of the block."""
    bank = Bank(dsn, seed, sessions)
    bank.start()
    try:
        yield bank
    finally:
        bank.stop()
