"""Random traffic on three tables, under which sums that whole transactions keep never change.

`accounts` has a key that changes and values large enough to be stored out of line, `savings` a composite key,
`ledger` none. Changes that a rollback or a savepoint undoes would break the sums.
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

TABLES = ("public.accounts", "public.savings", "public.ledger")
INSERT_ONLY = ("public.ledger",)
SETUP = (
    "create table accounts(id bigint primary key, owner text, balance bigint not null, note text)",
    "alter table accounts alter note set storage external",
    "create table savings(branch text, no int, balance bigint not null, primary key (branch, no))",
    "create table ledger(tx text, steps int, amount bigint, at timestamptz default clock_timestamp())",
    "insert into accounts select g, 'owner ' || g, 1000, repeat('n', 3000) from generate_series(1, 300) g",
    "insert into savings select chr(65 + g % 5), g, 0 from generate_series(1, 100) g",
)
SUMS = """
select (select sum(balance) from public.accounts) + (select sum(balance) from public.savings) as total,
    (select sum(balance) from public.savings)
        - (select coalesce(sum(amount), 0) from public.ledger) as gap,
    (select count(*) from (
        select tx from public.ledger group by tx, steps having count(*) <> steps)) as torn
"""
"""At every moment between transactions: total 300000, gap 0, torn 0."""
WHOLE = {"total": 300_000, "gap": 0, "torn": 0}

_BREAKS_THE_SUMS = (
    "insert into ledger(tx, steps, amount) values ('never', 7, 1000000)",
    "update accounts set balance = balance + 1000000 where id % 50 = 1",
    "insert into accounts values (-1, 'never', 1000000)",
    "delete from savings where no = 3",
)
_PAUSE_S = 0.15
"""The longest between two transactions of a session: others need the time to get on."""
_EXPECTED = (
    psycopg2.errors.DeadlockDetected,
    psycopg2.errors.UniqueViolation,
)


class Traffic:
    """Sessions that write until stopped."""

    def __init__(self, dsn: str, seed: int, sessions: int = 3) -> None:
        self._dsn, self._seed = dsn, seed
        self._stop = threading.Event()
        # No other traffic on the same tables uses these keys, nor the names of the transactions.
        self._keys = itertools.count(1000 + seed * 1_000_000)
        self.committed = 0
        self.error: BaseException | None = None
        self._threads = [
            threading.Thread(
                target=self._run, args=(random.Random(seed * 1000 + number), number), daemon=True
            )
            for number in range(sessions)
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

    def wait_for_more(self, transactions: int) -> None:
        """Wait until `transactions` more transactions are committed."""
        wanted = self.committed + transactions
        wait_until(
            lambda: self.committed >= wanted or self.error is not None,
            what=f"{transactions} more transactions",
        )

    def _run(self, chance: random.Random, session: int) -> None:
        connection = psycopg2.connect(self._dsn)
        try:
            with connection.cursor() as cursor:
                for number in itertools.count():
                    if self._stop.wait(chance.random() * _PAUSE_S):
                        return
                    self._transaction(cursor, chance, f"{self._seed}.{session}.{number}")
        except BaseException as error:
            self.error = error
        finally:
            connection.close()

    def _transaction(self, cursor: Any, chance: random.Random, name: str) -> None:
        try:
            steps = chance.randint(1, 4)
            for _ in range(steps):
                if chance.random() < 0.3:
                    self._take_back(cursor, chance)
                chance.choice((self._note, self._move_key, self._open_account))(cursor, chance)
                self._transfer(cursor, chance, name, steps)
            if chance.random() < 0.2:
                cursor.execute(chance.choice(_BREAKS_THE_SUMS))
                cursor.connection.rollback()
            else:
                cursor.connection.commit()
                self.committed += 1
        except _EXPECTED:
            cursor.connection.rollback()

    def _take_back(self, cursor: Any, chance: random.Random) -> None:
        cursor.execute("savepoint s")
        cursor.execute(chance.choice(_BREAKS_THE_SUMS))
        cursor.execute("rollback to savepoint s")

    def _note(self, cursor: Any, chance: random.Random) -> None:
        size = chance.choice((1, 10, 4000))
        cursor.execute(
            "update accounts set note = repeat(%s, %s) where id = %s",
            (chance.choice("abc"), size, chance.randint(1, 300)),
        )

    def _move_key(self, cursor: Any, chance: random.Random) -> None:
        cursor.execute(
            "update accounts set id = %s where id = %s", (next(self._keys), chance.randint(1, 300))
        )

    def _open_account(self, cursor: Any, chance: random.Random) -> None:
        cursor.execute(
            "insert into accounts values (%s, 'new', 0) on conflict do nothing", (chance.randint(1, 300),)
        )

    def _transfer(self, cursor: Any, chance: random.Random, name: str, steps: int) -> None:
        """Move money from an account to a savings book, or all of it, and delete the account."""
        ending = chance.random() < 0.3
        cursor.execute(
            "delete from accounts where id ="
            " (select id from accounts order by random() limit 1) returning balance"
            if ending
            else "update accounts set balance = balance - 7 where id ="
            " (select id from accounts order by random() limit 1) returning 7"
        )
        amount = sum(row[0] for row in cursor.fetchall())
        cursor.execute(
            "with book as (select branch, no from savings order by random() limit 1)"
            " update savings set balance = balance + %s where (branch, no) = (select branch, no from book)"
            " returning 1",
            (amount,),
        )
        assert cursor.rowcount == 1
        cursor.execute("insert into ledger(tx, steps, amount) values (%s, %s, %s)", (name, steps, amount))


@contextmanager
def traffic(dsn: str, seed: int, sessions: int = 3) -> Iterator[Traffic]:
    """Traffic until the end of the block."""
    running = Traffic(dsn, seed, sessions)
    running.start()
    try:
        yield running
    finally:
        running.stop()
