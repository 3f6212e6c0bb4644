"""Every built-in scalar type: random values of it, and how the lake's value is shown again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from json import dumps
from typing import Any

import numpy as np
from hypothesis import strategies as st

_PG_FIRST_DAY, _PG_LAST_DAY = -2_440_588, 2_145_042_905  # 4714-11-24 BC, 5874897-12-31
_LAKE_LAST_DAY = 2**63 // 86_400_000_000 - 1
DAY = 86_400_000_000


@dataclass(frozen=True)
class Case:
    """A type: texts to insert it from, SQL from text `x` to it, and SQL text of an Arrow value."""

    type_sql: str
    inputs: st.SearchStrategy[str]
    insert: str = ""
    back: str = "x"
    show: Callable[[Any], str] = str

    @property
    def insert_sql(self) -> str:
        return self.insert or f"x::{self.type_sql}"


def _moments() -> st.SearchStrategy[str]:
    edges = st.sampled_from(
        [-719_528, -719_529, -719_162, 2_932_896, 2_932_897, _PG_FIRST_DAY, _LAKE_LAST_DAY]
    )
    days = edges | st.integers(_PG_FIRST_DAY, _LAKE_LAST_DAY) | st.integers(-800_000, 3_000_000)
    micros = st.integers(0, DAY - 1) | st.sampled_from([0, 1, 100_000, DAY - 1])
    return st.tuples(days, micros).map(lambda pair: f"{pair[0]} {pair[1]}")


def _days() -> st.SearchStrategy[str]:
    edges = st.sampled_from([-719_528, -719_529, -719_162, 2_932_896, 2_932_897])
    return (edges | st.integers(_PG_FIRST_DAY, _PG_LAST_DAY) | st.integers(-800_000, 3_000_000)).map(str)


def _moment(base: str) -> str:
    return (
        f"{base} + make_interval(days => split_part(x, ' ', 1)::int)"
        " + interval '1 microsecond' * split_part(x, ' ', 2)::bigint"
    )


_TIMESTAMP = _moment("timestamp '1970-01-01'")
_TIMESTAMPTZ = _moment("timestamptz '1970-01-01 00:00:00+00'")


def _decimal_text(number: int, scale: int) -> str:
    sign, digits = ("-" if number < 0 else ""), str(abs(number)).zfill(scale + 1)
    return f"{sign}{digits[: len(digits) - scale]}.{digits[len(digits) - scale :]}"


def _numeric(precision: int, scale: int) -> Case:
    numbers = st.integers(-(10**precision) + 1, 10**precision - 1) | st.sampled_from(
        [0, 1, -1, 10**precision - 1]
    )
    return Case(
        f"numeric({precision},{scale})",
        numbers.map(lambda number: _decimal_text(number, scale)),
        back=f"(x::numeric({precision},{scale}))::text",
        show=lambda value: f"{value:f}",
    )


def _float(type_sql: str, width: int, dtype: type[np.floating[Any]]) -> Case:
    edges = st.sampled_from(
        [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1.0, 1e15, 0.1 if width == 64 else 0.5]
    )
    return Case(
        type_sql,
        (st.floats(width=width) | edges).map(lambda number: str(dtype(number))),
        back=f"(x::{type_sql})::text",
        show=lambda value: str(dtype(value)),
    )


_CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
_TEXTS = st.text(_CHARACTERS, max_size=40) | st.text('",\\\n\r\t .\ufeffNtf0', max_size=8)


def _timetz(time: object, seconds: int) -> str:
    """Return a time with an offset of whole seconds, which PostgreSQL allows."""
    minutes, second = divmod(abs(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{time}{'-' if seconds < 0 else '+'}{hour:02}:{minute:02}:{second:02}"


def _intervals() -> st.SearchStrategy[str]:
    parts = (st.integers(-10_000, 10_000), st.integers(-10_000, 10_000), st.integers(-(10**15), 10**15))
    return st.builds("{} months {} days {} microseconds".format, *parts)


def _network(address: IPv4Address | IPv6Address, bits: int) -> str:
    return f"{address}/{min(bits, address.max_prefixlen)}"


def _floats() -> st.SearchStrategy[str]:
    return st.floats(allow_nan=False, allow_infinity=False).map(repr)


def _geometric(template: str) -> st.SearchStrategy[str]:
    return st.tuples(*[_floats()] * template.count("{}")).map(lambda numbers: template.format(*numbers))


_UNSIGNED_32 = st.integers(0, 2**32 - 1) | st.just(2**32 - 1)
_JSONS = st.sampled_from(['"\\ud800"', '{"a":1,"a":1e400}', " [ 1.0,\t-0 ] ", '"\\u00e9 \U0001f600"'])

CASES = [
    Case("smallint", st.integers(-(2**15), 2**15 - 1).map(str)),
    Case("integer", st.integers(-(2**31), 2**31 - 1).map(str)),
    Case("bigint", st.integers(-(2**63), 2**63 - 1).map(str)),
    _float("real", 32, np.float32),
    _float("double precision", 64, np.float64),
    _numeric(1, 0),
    _numeric(10, 2),
    _numeric(18, 18),
    _numeric(19, 4),
    _numeric(38, 0),
    _numeric(38, 19),
    _numeric(38, 38),
    Case(
        "numeric",
        st.decimals(allow_nan=False, allow_infinity=False).map(lambda number: f"{number:E}")
        | st.sampled_from(["NaN", "Infinity", "-Infinity", "1e-400", "-1.500", "9" * 60]),
    ),
    Case("numeric(50,5)", st.integers(-(10**44), 10**44).map(str)),
    Case("boolean", st.sampled_from(["t", "f"]), show=lambda value: "t" if value else "f"),
    Case("text", _TEXTS),
    Case("varchar(50)", _TEXTS),
    Case("char(50)", _TEXTS),
    Case(
        "bytea", st.binary(max_size=40).map(lambda b: "\\x" + b.hex()), show=lambda value: "\\x" + value.hex()
    ),
    Case("date", _days(), "date '1970-01-01' + x::int", "(date '1970-01-01' + x::int)::text"),
    Case("timestamp", _moments(), _TIMESTAMP, f"({_TIMESTAMP})::text"),
    Case("timestamptz", _moments(), _TIMESTAMPTZ, f"({_TIMESTAMPTZ})::text"),
    Case("time", st.times().map(str) | st.just("24:00:00")),
    Case("timetz", st.builds(_timetz, st.times(), st.integers(-57_540, 57_540)) | st.just("24:00:00+00")),
    Case("interval", _intervals()),
    Case("uuid", st.uuids().map(str)),
    Case("json", _TEXTS.map(lambda text: '{"a" : ' + dumps(text) + ', "a":1}') | _JSONS),
    Case("jsonb", st.sampled_from(['{"b": 1, "a": [1.10, null]}', '"x"', "12345678901234567890.5", "1e400"])),
    Case("jsonpath", st.sampled_from(["$.a[*] ? (@.b > 1)", 'strict $."x y"', "lax $"])),
    Case("name", st.text(_CHARACTERS, max_size=15)),
    Case('"char"', st.integers(-128, 127).map(str), 'x::int::"char"', back="x"),
    Case("bit(8)", st.text("01", min_size=8, max_size=8)),
    Case("varbit", st.text("01", max_size=70)),
    Case("inet", st.builds(_network, st.ip_addresses(), st.integers(0, 128))),
    Case("cidr", st.builds(_network, st.ip_addresses(), st.integers(0, 128)), "network(x::inet)"),
    Case("macaddr", st.binary(min_size=6, max_size=6).map(bytes.hex)),
    Case("macaddr8", st.binary(min_size=8, max_size=8).map(bytes.hex)),
    Case("point", _geometric("({},{})")),
    Case("lseg", _geometric("[({},{}),({},{})]")),
    Case("path", _geometric("(({},{}),({},{}))") | _geometric("[({},{}),({},{}),({},{})]")),
    Case("box", _geometric("(({},{}),({},{}))")),
    Case("polygon", _geometric("(({},{}),({},{}),({},{}))")),
    Case("line", _floats().map("{{1,{},3}}".format)),
    Case("circle", st.builds("<({},{}),{}>".format, _floats(), _floats(), st.integers(0, 99))),
    Case("tsvector", _TEXTS, "to_tsvector('simple', x)", back="x::tsvector::text"),
    Case("tsquery", _TEXTS, "plainto_tsquery('simple', x)", back="x::tsquery::text"),
    Case(
        "money",
        st.integers(-(2**63), 2**63 - 1).map(lambda n: _decimal_text(n, 2)),
        "x::numeric::money",
        back="x::numeric::money::text",
    ),
    Case("oid", _UNSIGNED_32.map(str)),
    Case("xid", _UNSIGNED_32.map(str)),
    Case("cid", _UNSIGNED_32.map(str)),
    Case("xid8", (st.integers(0, 2**64 - 1) | st.just(2**64 - 1)).map(str)),
    Case("tid", st.builds("({},{})".format, _UNSIGNED_32, st.integers(0, 2**16 - 1))),
    Case("pg_lsn", st.builds("{:X}/{:X}".format, _UNSIGNED_32, _UNSIGNED_32)),
    Case("pg_snapshot", st.sampled_from(["1:1:", "10:20:10,14,15"])),
    Case("txid_snapshot", st.sampled_from(["1:1:", "10:20:10,14,15"])),
    Case(
        "regclass",
        st.sampled_from(["pg_class", "public.t", "4294967295", "0"]),
        r"case when x ~ '^\d' then x::oid::regclass else to_regclass(x) end",
    ),
    Case("regtype", st.sampled_from(["integer", "4294967295", "-"])),
    Case("regrole", st.sampled_from(["pg_monitor", "4294967295", "-"])),
    Case("aclitem", st.sampled_from(["pg_monitor=r/pg_monitor", "=r*/pg_monitor"])),
    Case("refcursor", _TEXTS),
    Case("int2vector", st.sampled_from(["", "1", "1 -2 3"])),
    Case("oidvector", st.sampled_from(["", "1", "1 4294967295"])),
]
