"""Random types made of other types, and random values of them as SQL expressions.

The expressions are built by constructors (`array[…]`, `row(…)`, `int4range(…)`), so that no test has to know
how PostgreSQL quotes one value within another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

Values = st.SearchStrategy[str]

_CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
TEXTS = st.text(_CHARACTERS, max_size=12) | st.text('",\\{}()[];=>\n\t NULL', max_size=6)


@dataclass(frozen=True)
class Made:
    """A type's name in SQL, and SQL of its values."""

    sql: str
    values: Values


@dataclass
class Declared:
    """The types made so far in schema `s`, by the statements that make them."""

    statements: list[str] = field(default_factory=list)

    def add(self, kind: str, definition: str) -> str:
        name = f"s.{kind}{len(self.statements)}"
        self.statements.append(definition.format(name=name))
        return name


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _scalar(sql: str, texts: st.SearchStrategy[Any]) -> Made:
    return Made(sql, texts.map(lambda text: f"{literal(str(text))}::{sql}"))


_NUMBERS = st.integers(-(2**31) + 1, 2**31 - 2)
_DATES = st.dates()
_MOMENTS = st.datetimes()
SCALARS = [
    _scalar("int", _NUMBERS),
    _scalar("boolean", st.booleans()),
    _scalar("text", TEXTS),
    _scalar("varchar(30)", TEXTS),
    _scalar("numeric(12,3)", st.decimals(-(10**8), 10**8, places=3)),
    _scalar("numeric", st.decimals(allow_nan=False, allow_infinity=False, places=5) | st.just("NaN")),
    _scalar("double precision", st.floats()),
    _scalar("real", st.floats(width=32)),
    _scalar("bytea", st.binary(max_size=6).map(lambda data: "\\x" + data.hex())),
    _scalar("date", _DATES),
    _scalar("timestamp", _MOMENTS),
    _scalar("timestamptz", _MOMENTS.map(lambda moment: f"{moment}+00")),
    _scalar("box", st.tuples(*[st.integers(0, 9)] * 4).map(lambda n: f"({n[0]},{n[1]}),({n[2]},{n[3]})")),
    _scalar("uuid", st.uuids()),
    _scalar("jsonb", st.sampled_from(['{"a": [1, null], "b": "x, \\"y\\""}', '"é"', "null"])),
]
_BUILT_IN_RANGES = [
    ("int4range", _scalar("int", _NUMBERS)),
    ("numrange", _scalar("numeric", st.decimals(allow_nan=False, allow_infinity=False, places=2))),
    ("daterange", _scalar("date", _DATES)),
    ("tsrange", _scalar("timestamp", _MOMENTS)),
    ("tstzrange", _scalar("timestamptz", _MOMENTS.map(lambda moment: f"{moment}+00"))),
]


def or_null(made: Made) -> Values:
    return st.just(f"null::{made.sql}") | made.values


def array_of(element: Made) -> Made:
    def expression(items: list[str]) -> str:
        return f"array[{', '.join(items)}]::{element.sql}[]"

    return Made(f"{element.sql}[]", st.lists(or_null(element), max_size=3).map(expression))


def composite_of(attributes: list[Made], declared: Declared) -> Made:
    names = [f'"a {index}"' if index % 2 else f"a{index}" for index in range(len(attributes))]
    of = ", ".join(f"{name} {made.sql}" for name, made in zip(names, attributes, strict=True))
    name = declared.add("composite", f"create type {{name}} as ({of})")
    rows = st.tuples(*map(or_null, attributes)).map(lambda values: f"row({', '.join(values)})::{name}")
    return Made(name, rows)


def domain_of(base: Made, declared: Declared) -> Made:
    name = declared.add("domain", f"create domain {{name}} as {base.sql}")
    return Made(name, base.values.map(lambda value: f"({value})::{name}"))


def enum(labels: list[str], declared: Declared) -> Made:
    name = declared.add("enum", f"create type {{name}} as enum ({', '.join(map(literal, labels))})")
    return _scalar(name, st.sampled_from(labels))


def range_of(declared: Declared) -> st.SearchStrategy[Made]:
    return st.sampled_from([None, *_BUILT_IN_RANGES]).map(
        lambda built_in: _range(*(built_in or (_text_range(declared), SCALARS[2])))
    )


def _text_range(declared: Declared) -> str:
    return declared.add("range", 'create type {name} as range (subtype = text, collation = "C")')


def _range(name: str, bound: Made) -> Made:
    collate = ' collate "C"' if bound.sql == "text" else ""

    def expression(drawn: tuple[str, str, str, bool, bool]) -> str:
        first, second, brackets, from_start, to_end = drawn
        lower, upper = (f"{of}({first}{collate}, {second}{collate})" for of in ("least", "greatest"))
        return (
            f"{name}({'null' if from_start else lower}, {'null' if to_end else upper}, {literal(brackets)})"
        )

    brackets = st.sampled_from(["[]", "[)", "(]", "()"])
    drawn = st.tuples(bound.values, bound.values, brackets, st.booleans(), st.booleans())
    return Made(name, drawn.map(expression) | st.just(f"'empty'::{name}"))


def multirange_of(of: Made) -> Made:
    name = of.sql.replace("range", "multirange", 1)
    return Made(name, st.lists(of.values, max_size=3).map(lambda items: f"{name}({', '.join(items)})"))


def hstore() -> Made:
    pairs = st.dictionaries(TEXTS, st.none() | TEXTS, max_size=3)

    def expression(of: dict[str, str | None]) -> str:
        keys = ", ".join(map(literal, of))
        values = ", ".join("null" if value is None else literal(value) for value in of.values())
        return f"public.hstore(array[{keys}]::text[], array[{values}]::text[])"

    return Made("public.hstore", pairs.map(expression))


@st.composite
def made_types(draw: Callable[..., Any], declared: Declared, scalars: list[Made], depth: int = 2) -> Made:
    """A scalar, or something made of such types."""
    if depth == 0:
        return draw(st.sampled_from(scalars))
    part = made_types(declared, scalars, depth - 1)
    kind = draw(st.sampled_from(["array", "composite", "domain", "range", "multirange", "enum"]))
    if kind == "array":
        element = draw(part)
        # PostgreSQL has no array of arrays, and takes one in a domain apart.
        return element if element.sql.endswith("[]") or "domain" in element.sql else array_of(element)
    if kind == "composite":
        return composite_of(draw(st.lists(part, min_size=1, max_size=3)), declared)
    if kind == "domain":
        return domain_of(draw(part), declared)
    if kind == "enum":
        return enum(["a", 'b "c', "d, e", "NULL", " "], declared)
    found = draw(range_of(declared))
    return found if kind == "range" else multirange_of(found)
