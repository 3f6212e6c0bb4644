"""Random DDL of a partitioned table, and of its partitions: most of it is in no stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.random_ddl import SAFE, UNSAFE, Following, Made, Make, Shifting, recreate, widen


@dataclass
class Partitioned(Shifting):
    """A partitioned table: its partitions are changed directly, and their rewrites cannot be detected."""

    def statements(self, identity: str) -> list[str]:
        mood, make, *more = super().statements(identity)
        return [
            mood,
            f"{make} partition by range (id)",
            f"create table {self.sql}_low partition of {self.sql} for values from (minvalue) to (20)",
            f"create table {self.sql}_high partition of {self.sql} for values from (20) to (maxvalue)"
            " partition by range (id)",
            f"create table {self.sql}_high_1 partition of {self.sql}_high for values from (20) to (30)",
            f"create table {self.sql}_high_2 partition of {self.sql}_high for values from (30) to (60)",
            *more,
        ]

    def leaf(self) -> str:
        return self.chance.choice((f"{self.sql}_low", f"{self.sql}_high_1", f"{self.sql}_high_2"))

    def alter(self, cursor: Any, *, safely: bool) -> None:
        super().alter(cursor, safely=safely and self.chance.random() < 0.5)

    def fixing_statements(self) -> list[str]:
        leaves = [f"{self.sql}_{leaf}" for leaf in ("low", "high_1", "high_2")]
        logged = [f"alter table {leaf} set logged" for leaf in leaves]
        if not any("replica identity full" in text for text in self.said):
            return logged
        # A partition with another replica identity than its table would be rejected.
        return [*logged, *(f"alter table {leaf} replica identity full" for leaf in leaves)]

    def makes(self, *, safely: bool) -> Sequence[Make]:
        if safely:
            return [*SAFE, _new_partition]
        return [make for make in UNSAFE if make is not recreate] + _BEHIND_ITS_BACK

    def _truncate(self, cursor: Any) -> None:
        super()._truncate(cursor)
        if self.following is Following.SURELY:
            self.following = Following.PERHAPS

    def _doubted(self, following: Following, statements: Sequence[str]) -> Following:
        text = " ".join(statements)
        if any(type_ in text for type_ in ("type bigint", "type double", "type numeric(12,3)")):
            return Following.NEVER
        return super()._doubted(following, statements)


def _new_partition(table: Shifting, cursor: Any) -> Made:
    # Beyond all keys, so that the partition is empty.
    bound = 60 + 10 * int(table.new_name()[1:])
    return Following.SURELY, [
        f"create table {table.sql}_{bound} partition of {table.sql}_high"
        f" for values from ({bound}) to ({bound + 10})"
    ]


def _attach_again(table: Shifting, cursor: Any) -> Made:
    bounds = {"low": "(minvalue) to (20)", "high": "(20) to (maxvalue)"}
    name, bound = table.chance.choice(list(bounds.items()))
    between = table.chance.choice((f"delete from {table.sql}_{name} where {table.some()}", "select 1"))
    return Following.NEVER, [
        f"alter table {table.sql} detach partition {table.sql}_{name}",
        between,
        f"alter table {table.sql} attach partition {table.sql}_{name} for values from {bound}",
    ]


def _truncate_leaf(table: Partitioned, cursor: Any) -> Made:
    return Following.NEVER, [f"truncate {table.leaf()}"]


def _truncate_leaf_beside_widening(table: Partitioned, cursor: Any) -> Made:
    widened = widen(table, cursor)
    if widened is None:
        return None
    statements = [f"truncate {table.leaf()}", *widened[1]]
    table.chance.shuffle(statements)
    return Following.NEVER, statements


def _truncate_all_insert_and_truncate_leaf(table: Partitioned, cursor: Any) -> Made:
    return Following.NEVER, [
        f"truncate {table.sql}",
        f"insert into {table.sql} (id) select n from generate_series(1, 50, 7) n",
        f"truncate {table.leaf()}",
    ]


def _unlogged_for_a_while(table: Partitioned, cursor: Any) -> Made:
    leaf = table.leaf()
    return Following.NEVER, [
        f"alter table {leaf} set unlogged",
        f"delete from {leaf} where {table.some()}",
        *table.chance.choice(([f"alter table {leaf} set logged"], [])),
    ]


_BEHIND_ITS_BACK: list[Make] = [
    _attach_again,
    _truncate_leaf,
    _truncate_leaf_beside_widening,
    _truncate_all_insert_and_truncate_leaf,
    _unlogged_for_a_while,
] * 2  # type: ignore[assignment]
