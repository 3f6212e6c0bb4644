"""Random tables of random types: keyed in all the ways that there are, or not at all."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.support import random_types
from tests.support.random_types import KEY_TYPES, TYPES, Type
from tests.support.replicated import quoted

KINDS = ("key", "composite key", "key, all of the old row", "unique index", "keyless", "insert only")
KEY_POOL = 8

_NAMES = ("v", "Größe", 'a "quoted" one', "order", "x.y", "with space", "_", "ÄÖ")


@dataclass(frozen=True)
class Column:
    """A column; `pool` are the values that it takes when it is of a key."""

    name: str
    type: Type
    not_null: bool
    pool: tuple[str, ...] = ()
    external: bool = False

    @property
    def sql(self) -> str:
        return quoted(self.name)

    @property
    def definition(self) -> str:
        storage = " storage external" if self.external else ""
        return f"{self.sql} {self.type.sql}{storage}{' not null' if self.not_null else ''}"

    def value(self, chance: random.Random) -> str | None:
        if self.pool:
            return chance.choice(self.pool)
        return self.type.make(chance) if self.not_null or chance.random() > 0.2 else None


@dataclass(frozen=True)
class Table:
    """A table of one of KINDS; the key's columns may stand anywhere."""

    name: str
    kind: str
    columns: tuple[Column, ...]

    @property
    def sql(self) -> str:
        return f"public.{self.name}"

    @property
    def key(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.pool)

    @property
    def rest(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if not column.pool)

    @property
    def may_change(self) -> bool:
        return self.kind != "insert only"

    def statements(self) -> list[str]:
        columns = ", ".join(column.definition for column in self.columns)
        made, key = f"create table {self.sql} ({columns}", ", ".join(column.sql for column in self.key)
        if not key:
            full = [f"alter table {self.sql} replica identity full"] if self.kind == "keyless" else []
            return [f"{made})", *full]
        if self.kind == "unique index":
            return [
                f"{made})",
                f"create unique index {self.name}_key on {self.sql} ({key})",
                f"alter table {self.sql} replica identity using index {self.name}_key",
            ]
        full = [f"alter table {self.sql} replica identity full"] if "old row" in self.kind else []
        return [f"{made}, primary key ({key}))", *full]


def random_tables(chance: random.Random, count: int, kinds: tuple[str, ...] = KINDS) -> list[Table]:
    """Return `count` random tables, of different kinds as far as there are enough."""
    chosen = chance.sample(kinds, len(kinds)) * (count // len(kinds) + 1)
    return [_table(chance, f"t{number}", kind) for number, kind in enumerate(chosen[:count])]


def _table(chance: random.Random, name: str, kind: str) -> Table:
    keys = {"insert only": 0, "keyless": 0, "composite key": chance.randint(2, 3)}.get(kind, 1)
    names = [f"{chance.choice(_NAMES)}{number}" for number in range(20)]
    columns = [
        Column(names.pop(), (type_ := chance.choice(KEY_TYPES)), True, tuple(_pool(chance, type_)))
        for _ in range(keys)
    ]
    for _ in range(chance.randint(0 if keys else 1, 6)):
        type_ = chance.choice(TYPES)
        external = type_.is_large and chance.random() < 0.7
        columns.append(Column(names.pop(), type_, chance.random() < 0.2, external=external))
    chance.shuffle(columns)
    return Table(name, kind, tuple(columns))


def _pool(chance: random.Random, type_: Type) -> list[str]:
    # A key must fit into an index, so it is never large.
    return [text for text in type_.pool(chance, KEY_POOL) if len(text) < 500] or ["7"]


def statements(tables: list[Table]) -> list[str]:
    return [*random_types.SETUP, *(statement for table in tables for statement in table.statements())]
