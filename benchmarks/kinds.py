"""The kinds of tables and changes of *apply*: plain rows, unchanged TOAST values, changed keys, no key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import workload
from benchmarks.source import Source

_STEP = workload.ROWS_A_TRANSACTION
_TOAST_CHARACTERS = 8_000


@dataclass(frozen=True)
class Kind:
    """A kind of table with its changes.

    `fill` inserts `inserts` rows and then changes `updates` rows, in transactions of a thousand. `limit`: the
    least share of the plain rate.
    """

    name: str
    title: str
    change: str
    table: str
    create: Callable[[Source], None]
    fill: Callable[[Source, int, int], None]
    inserts: int = 0
    updates: int = 0
    limit: float = 0.0


def _create_toast(source: Source) -> None:
    source.execute("create table public.toast (id bigint primary key, k integer not null, body text)")
    source.execute("alter table public.toast alter body set storage external")


def _fill_toast(source: Source, inserts: int, updates: int) -> None:
    source.execute("set synchronous_commit = off")
    for first in range(1, inserts + 1, _STEP):
        source.execute(
            f"insert into public.toast select g, 0, repeat(md5(g::text), {_TOAST_CHARACTERS // 32})"
            " from generate_series(%s::bigint, %s) g",
            first,
            first + _STEP - 1,
        )
    for number in range(updates // _STEP):
        start = number * _STEP % inserts
        source.execute(
            "update public.toast set k = k + 1 where id between %s and %s", start + 1, start + _STEP
        )


def _fill_keys(source: Source, inserts: int, updates: int) -> None:
    source.execute("set synchronous_commit = off")
    for first in range(1, inserts + 1, _STEP):
        workload.insert(source, first, first + _STEP - 1)
    for number in range(updates // _STEP):
        # Negate the keys, then make them positive again: every update gives its rows unused keys.
        start, turn = number * _STEP % inserts, number * _STEP // inserts
        sign = 1 if turn % 2 == 0 else -1
        source.execute(
            f"update {workload.TABLE} set id = -id where id between %s and %s",
            *sorted((sign * (start + 1), sign * (start + _STEP))),
        )


def _create_keyless(source: Source) -> None:
    workload.create_table(source)
    source.execute(f"alter table {workload.TABLE} drop constraint bench_pkey")
    source.execute(f"create index on {workload.TABLE} (id)")
    source.execute(f"alter table {workload.TABLE} replica identity full")


PLAIN = Kind("plain", "plain rows", "updates", workload.TABLE, workload.create_table, workload.fill)
TOAST = Kind(
    "toast",
    "8 kB of text stored outside the row, unchanged by updates",
    "updates of another column",
    "public.toast",
    _create_toast,
    _fill_toast,
    inserts=20_000,
    updates=100_000,
    limit=0.2,
)
KEYS = Kind(
    "keys",
    "other keys",
    "updates of the key",
    workload.TABLE,
    workload.create_table,
    _fill_keys,
    inserts=200_000,
    updates=400_000,
    limit=0.3,
)
KEYLESS = Kind(
    "keyless",
    "no key, REPLICA IDENTITY FULL",
    "updates",
    workload.TABLE,
    _create_keyless,
    workload.fill,
    inserts=400_000,
    updates=200_000,
    limit=0.3,
)
