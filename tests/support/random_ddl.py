"""Random DDL and random rows for one table, whatever shape it has come to: the same for the same seed.

Each DDL says whether its lake table follows it. The shape is read from the catalog before each step, so that
any DDL may come after any other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import psycopg2
import psycopg2.errors

from tests.support import random_tables
from tests.support.random_oracle import difference, lake_rows, source_rows
from tests.support.random_types import Type
from tests.support.received import Received
from tests.support.replicated import execute, quoted

_IDENTITIES = ("default", "full", "keyless")

_COLUMNS = """
SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull
FROM pg_catalog.pg_attribute a
WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""

_REFUSED = (
    psycopg2.IntegrityError,
    psycopg2.DataError,
    psycopg2.ProgrammingError,
    psycopg2.NotSupportedError,
    psycopg2.errors.ObjectNotInPrerequisiteState,
)


class Following(StrEnum):
    """The certainty with which a lake table follows a DDL statement."""

    SURELY = "surely"
    PERHAPS = "perhaps"
    NEVER = "never"


class Mark(StrEnum):
    """A trace of DDL that makes later DDL hard to distinguish from unsafe DDL."""

    REWRITTEN = "rewritten"
    TOUCHED = "touched"
    GAP = "gap"


Column = tuple[str, str, bool]
"""Name, type, not null."""


Made = tuple[Following, Sequence[str]] | None
Make = Callable[["Shifting", Any], Made]


@dataclass
class Shifting:
    """A table `public.<name>` with the key `id`, that DDL changes and rows are written to."""

    name: str
    chance: random.Random
    following: Following = Following.SURELY
    said: list[str] = field(default_factory=list)
    """The DDL that was applied to it, for analyzing a failure."""
    marks: set[Mark] = field(default_factory=set)
    _numbers: int = 0

    @property
    def sql(self) -> str:
        return f"public.{self.name}"

    @property
    def mood(self) -> str:
        """An enum of its own."""
        return f"public.mood_{self.name}"

    def statements(self, identity: str) -> list[str]:
        """Make it, with replica identity `default`, `full`, or `keyless`."""
        key = "" if identity == "keyless" else " primary key"
        full = [f"alter table {self.sql} replica identity full"] if identity != "default" else []
        return [
            f"create type {self.mood} as enum ('sad', 'fine')",
            f"create table {self.sql} (id int not null{key}, a int, b text, c varchar(8), d numeric(6, 2),"
            f" e real, f {self.mood})",
            *full,
        ]

    def columns(self, cursor: Any) -> list[Column]:
        cursor.execute(_COLUMNS, (self.sql,))
        return [tuple(row) for row in cursor.fetchall()]

    # Rows.

    def write(self, cursor: Any) -> None:
        """Execute one statement. If the table rejects it, nothing is changed."""
        writes = [self._insert] * 4 + [self._update] * 4 + [self._delete] * 2
        chosen = self._truncate if self.chance.random() < 0.03 else self.chance.choice(writes)
        self._try(cursor, lambda: chosen(cursor))

    def _insert(self, cursor: Any) -> None:
        columns = self.columns(cursor)
        for _ in range(self.chance.choice((1, 1, 3))):
            values = [self._value(column) for column in columns]
            cursor.execute(
                f"insert into {self.sql} values ({', '.join(['%s'] * len(values))}) on conflict do nothing",
                values,
            )

    def insert_new(self, cursor: Any) -> None:
        """Insert a row with a new key, unless the table rejects it."""
        values = [self._value(column) for column in self.columns(cursor)[1:]]
        row = ", ".join(["coalesce(max(id), 0) + 1", *["%s"] * len(values)])
        insert = f"insert into {self.sql} select {row} from {self.sql}"
        self._try(cursor, lambda: cursor.execute(insert, values))

    def _update(self, cursor: Any) -> None:
        column = self.chance.choice(self.columns(cursor))
        cursor.execute(
            f"update {self.sql} set {quoted(column[0])} = %s where {self.some()}", (self._value(column),)
        )

    def _delete(self, cursor: Any) -> None:
        cursor.execute(f"delete from {self.sql} where {self.some()}")

    def _truncate(self, cursor: Any) -> None:
        cursor.execute(f"truncate {self.sql}")
        if self.marks and self.following is Following.SURELY:
            self.following = Following.PERHAPS
        self.marks.add(Mark.REWRITTEN)

    def some(self) -> str:
        return f"mod(id, {self.chance.randint(2, 9)}) = {self.chance.randint(0, 3)}"

    def _value(self, column: Column) -> Any:
        name, type_name, not_null = column
        if name == "id":
            return self.chance.randint(1, 40)
        if not not_null and self.chance.random() < 0.2:
            return None
        if "mood" in type_name:
            return self.chance.choice(("sad", "fine"))
        if type_name == "text" or type_name.startswith("character"):
            return "".join(self.chance.choices("abcÄ '\\", k=self.chance.randint(0, 4)))
        if type_name in ("real", "double precision"):
            return self.chance.choice((0.1, -2.5, 1e10, 3.3333333))
        if type_name.startswith("numeric"):
            return self.chance.choice(("0.10", "-12.5", "99.99", "1"))
        if type_name == "date":
            return f"2024-01-{self.chance.randint(1, 28):02}"
        return self.chance.randint(-1000, 1000)

    # DDL.

    def alter(self, cursor: Any, *, safely: bool) -> None:
        """Execute one DDL statement. If the server rejects it, nothing is changed."""
        made = self.chance.choice(self.makes(safely=safely))(self, cursor)
        if made is None:
            return
        following, statements = made
        if self._try(cursor, lambda: [cursor.execute(statement) for statement in statements]):
            self.said += statements
            following = self._doubted(following, statements)
            if following is Following.NEVER or self.following is Following.SURELY:
                self.following = following

    def fixing_statements(self) -> list[str]:
        """Return the statements after which the table can be resnapshotted."""
        return []

    def makes(self, *, safely: bool) -> Sequence[Make]:
        """Return the makers of the DDL statements to choose from."""
        return SAFE if safely else UNSAFE

    def forget_ddl(self) -> None:
        """Forget earlier DDL, because the lake table was resnapshotted."""
        self.following = Following.SURELY
        self.marks = set()
        self.said.append("-- resnapshotted")

    def _doubted(self, following: Following, statements: Sequence[str]) -> Following:
        """A rewrite and a change or drop of another column, or a new column after one that came and went
        unseen, look like what the lake must not follow."""
        text = " ".join(statements)
        doubtful = " add " in text and Mark.GAP in self.marks
        if " drop " in text:
            doubtful |= Mark.REWRITTEN in self.marks
            self.marks.add(Mark.GAP)
        if any(type_ in text for type_ in ("type bigint", "type double", "type numeric(12,3)")):
            doubtful |= bool({Mark.REWRITTEN, Mark.TOUCHED, Mark.GAP} & self.marks)
            self.marks.add(Mark.REWRITTEN)
        elif " alter " in text or " add " in text:
            doubtful |= Mark.REWRITTEN in self.marks
            self.marks.add(Mark.TOUCHED)
        return Following.PERHAPS if doubtful and following is Following.SURELY else following

    def _try(self, cursor: Any, work: Callable[[], Any]) -> bool:
        cursor.execute("savepoint tried")
        try:
            work()
        except _REFUSED:
            cursor.execute("rollback to savepoint tried")
            return False
        cursor.execute("release savepoint tried")
        return True

    def column_of(self, cursor: Any, *types: str) -> Column | None:
        """Return a column other than the key whose type begins with one of `types`, or None."""
        found = [
            column
            for column in self.columns(cursor)
            if column[0] != "id" and (not types or column[1].startswith(types))
        ]
        return self.chance.choice(found) if found else None

    def new_name(self) -> str:
        self._numbers += 1
        return f"n{self._numbers}"


_WIDER = {
    "integer": ("bigint",),
    "real": ("double precision",),
    "character varying(5)": ("varchar(30)", "text", "varchar"),
    "character varying(8)": ("varchar(30)", "text", "varchar"),
    "numeric(6,2)": ("numeric(9,2)", "numeric(12,3)"),
    "numeric(8,3)": ("numeric(12,3)",),
}


@dataclass(frozen=True)
class ShiftingTables:
    """A table of each kind of identity, and transactions that change rows and shapes of them."""

    dsn: str
    chance: random.Random
    tables: list[Shifting]

    @classmethod
    def make(cls, dsn: str, chance: random.Random, *more: Shifting) -> ShiftingTables:
        tables = [Shifting(f"t{number}", chance) for number in range(len(_IDENTITIES))]
        for table, identity in zip(tables, _IDENTITIES, strict=True):
            execute(dsn, *table.statements(identity))
        for table in more:
            execute(dsn, *table.statements("default"))
        return cls(dsn, chance, [*tables, *more])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(table.sql for table in self.tables)

    def take_steps(self, count: int, *, quietly: bool = False) -> None:
        """Run `count` transactions. `quietly`: without DDL."""
        with closing(psycopg2.connect(self.dsn)) as connection:
            for _ in range(count):
                with connection, connection.cursor() as cursor:
                    for _ in range(self.chance.choice((1, 1, 2, 4))):
                        self._take_step(cursor, quietly=quietly)

    def _take_step(self, cursor: Any, *, quietly: bool) -> None:
        table, kind = self.chance.choice(self.tables), self.chance.random()
        if quietly or kind < 0.75:
            table.write(cursor)
        else:
            table.alter(cursor, safely=kind < 0.95)

    def insert_new(self) -> None:
        """Insert a row into each table: the lake gets an added column only with the next row."""
        with closing(psycopg2.connect(self.dsn)) as connection, connection, connection.cursor() as cursor:
            for table in self.tables:
                table.insert_new(cursor)


def lake_difference(received: Received, table: Shifting) -> dict[Any, int]:
    """Rows of the lake less rows of the source, in the columns that the source has; empty when equal."""
    with received.source() as source:
        with source.cursor() as cursor:
            columns = tuple(
                random_tables.Column(name, Type(type_name, lambda _: ""), not_null=False)
                for name, type_name, _ in table.columns(cursor)
            )
        shape = random_tables.Table(table.name, "any", columns)
        return difference(source_rows(source, shape), lake_rows(source, shape, received.lake_rows(table.sql)))


_S, _N, _P = Following.SURELY, Following.NEVER, Following.PERHAPS


def _add(table: Shifting, cursor: Any) -> Made:
    type_ = table.chance.choice(("int", "text", "numeric(8,3)", "real", "date", "varchar(5)", table.mood))
    return _S, [f"alter table {table.sql} add {table.new_name()} {type_}"]


def _add_with_default(table: Shifting, cursor: Any) -> Made:
    type_, default = table.chance.choice(
        (
            ("int", "7"),
            ("text", "'it''s \"x\"'"),
            ("numeric(8,3)", "1.5"),
            ("date", "'2020-02-29'"),
            ("real", "0.1"),
        )
    )
    required = table.chance.choice(("", " not null"))
    return _S, [f"alter table {table.sql} add {table.new_name()} {type_}{required} default {default}"]


def _drop(table: Shifting, cursor: Any) -> Made:
    column = table.column_of(cursor)
    return column and (_S, [f"alter table {table.sql} drop {quoted(column[0])}"])


def widen(table: Shifting, cursor: Any) -> Made:
    column = table.column_of(cursor, "integer", "real", "character varying", "numeric(")
    if column is None:
        return None
    name, type_name, _ = column
    if type_name not in _WIDER:
        return None
    wider = table.chance.choice(_WIDER[type_name])
    return _S, [f"alter table {table.sql} alter {quoted(name)} type {wider}"]


def _no_matter(table: Shifting, cursor: Any) -> Made:
    column = table.column_of(cursor)
    if column is None:
        return None
    name, number = quoted(column[0]), table.new_name()
    return _S, [
        table.chance.choice(
            (
                f"alter table {table.sql} alter {name} drop not null",
                f"alter table {table.sql} alter {name} set not null",
                f"alter table {table.sql} alter {name} set statistics 50",
                f"create index {table.name}_{number} on {table.sql} ({name})",
                f"alter table {table.sql} add constraint {number} check (id is not null)",
                f"analyze {table.sql}",
                f"comment on table {table.sql} is 'x'",
                f"alter table {table.sql} alter {name} set default null",
            )
        )
    ]


def _add_and_drop(table: Shifting, cursor: Any) -> Made:
    name = table.new_name()
    return _S, [f"alter table {table.sql} add {name} int", f"alter table {table.sql} drop {name}"]


def _new_label(table: Shifting, cursor: Any) -> Made:
    return _S, [f"alter type {table.mood} add value '{table.new_name()}'"]


def _rename(table: Shifting, cursor: Any) -> Made:
    column = table.column_of(cursor)
    return column and (_N, [f"alter table {table.sql} rename {quoted(column[0])} to {table.new_name()}"])


def _swap_names(table: Shifting, cursor: Any) -> Made:
    one, other = table.column_of(cursor), table.column_of(cursor)
    if one is None or other is None or one == other:
        return None
    rename = f"alter table {table.sql} rename"
    first, second = quoted(one[0]), quoted(other[0])
    return _N, [f"{rename} {first} to x_", f"{rename} {second} to {first}", f"{rename} x_ to {second}"]


def _drop_and_add(table: Shifting, cursor: Any) -> Made:
    column = table.column_of(cursor)
    if column is None:
        return None
    name, type_name, _ = column
    default = table.chance.choice(("", "", " default null"))
    return _N, [
        f"alter table {table.sql} drop {quoted(name)}",
        f"alter table {table.sql} add {quoted(name)} {type_name}{default}",
    ]


def _change_values(table: Shifting, cursor: Any) -> Made:
    column = table.column_of(cursor, "text", "character varying")
    if column is None:
        return None
    name = quoted(column[0])
    return _N, [f"alter table {table.sql} alter {name} type {column[1]} using upper({name}) || '!'"]


def _narrow(table: Shifting, cursor: Any) -> Made:
    column = table.column_of(cursor, "bigint", "double precision", "integer")
    if column is None:
        return None
    name = quoted(column[0])
    return _N, [f"alter table {table.sql} alter {name} type smallint using ({name}::numeric % 100)::smallint"]


def _add_by_chance(table: Shifting, cursor: Any) -> Made:
    return _N, [f"alter table {table.sql} add {table.new_name()} int default (random() * 1000)::int"]


def _other_identity(table: Shifting, cursor: Any) -> Made:
    identity = table.chance.choice(("full", "default"))
    return _P, [f"alter table {table.sql} replica identity {identity}"]


def _rename_label(table: Shifting, cursor: Any) -> Made:
    return _N, [f"alter type {table.mood} rename value 'sad' to 'sad{table.new_name()}'"]


def recreate(table: Shifting, cursor: Any) -> Made:
    return _N, [
        f"create table {table.sql}_new (like {table.sql} including all)",
        f"drop table {table.sql}",
        f"alter table {table.sql}_new rename to {table.name}",
    ]


def _leave_the_publication(table: Shifting, cursor: Any) -> Made:
    cursor.execute("select quote_ident(pubname) from pg_publication")
    (name,) = cursor.fetchone()
    return _N, [
        f"alter publication {name} drop table {table.sql}",
        f"alter publication {name} add table {table.sql}",
    ]


SAFE = [
    _add,
    _add_with_default,
    _add_with_default,
    _drop,
    widen,
    widen,
    _no_matter,
    _add_and_drop,
    _new_label,
]
UNSAFE = [
    _rename,
    _swap_names,
    _drop_and_add,
    _drop_and_add,
    _change_values,
    _narrow,
    _add_by_chance,
    _other_identity,
    _rename_label,
    recreate,
    _leave_the_publication,
]
