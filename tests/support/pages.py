"""Parts of the tests of how-to pages: the blocks of a page, changes of the table that its example keeps, and
the state of the copy."""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from tests.support.received import Received
from tests.support.replicated import wait_until


def blocks(page: str, language: str) -> list[str]:
    """The code of that language in a page."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def statement(chance: random.Random) -> str:
    """A change of orders(id, amount), or none."""
    key = chance.randint(1, 40)
    return chance.choice(
        [
            f"insert into orders values ({key}, {chance.random():.4f}) on conflict do nothing",
            f"update orders set amount = {chance.random():.2f} where id % 10 = {key % 10}",
            f"update orders set id = {key + 40} where id = {key}"
            f" and not exists (select from orders where id = {key + 40})",
            f"delete from orders where id = {key}",
            "truncate orders" if chance.random() < 0.02 else "select",
        ]
    )


def rows_of(file: Path, query: str) -> list[tuple[Any, ...]]:
    """The rows that a copy in SQLite has for a query; none while it lacks the table."""
    with closing(sqlite3.connect(file, timeout=120)) as copy:
        try:
            return copy.execute(query).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            return []


def wait_until_applied(
    received: Received, chance: random.Random, since: LSN, applied: Callable[[], int]
) -> None:
    """Wait until a copy has a change that is drawn from those after `since`; `applied`: its last LSN."""
    wanted = chance.choice([lsn for row in received.changelog_rows() if (lsn := row["commit_lsn"]) > since])
    wait_until(lambda: applied() >= wanted, 240, f"the copy to be at {LSN(wanted)}")
