"""The way back: what the lake holds → the text that PostgreSQL writes for it, under the pinned settings.

A text that was parsed comes back as it was, but for what parsing does not keep: the zeros at the end of a
number that became a wider decimal, and infinities that became null or a sentinel by choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.values.temporal import SECONDS_PER_DAY, date_of

_Texts = list[str | None]
_SPATIAL, _VECTORS = ("geometry", "geography"), "vector"
DAY_US = SECONDS_PER_DAY * 1_000_000
_ARRAY_SPECIAL = r'["\\{}\s]|^$|^null$'
_RECORD_SPECIAL = re.compile(r'["\\(),\s]|^$', re.ASCII)
_RANGE_SPECIAL = re.compile(r'["\\()\[\],\s]|^$', re.ASCII)
_TO_ESCAPE = re.compile(r'(["\\])')
_FIXED_EXPONENTS = {pa.float32(): range(-4, 6), pa.float64(): range(-4, 15)}
"""For which exponents PostgreSQL writes a float without one (f2s.c and d2s.c, of Ryu)."""
_LEAST_HALFWAY = 1e6
"""No float below it has a halfway number of as few digits."""
_FIRST_DAY = -719_162
_LAST_DAY = 2_932_896
"""0001-01-01 and 9999-12-31, between which Arrow writes as PostgreSQL does."""


def texts_of(values: pa.Array, pg_type: PgType) -> pa.Array:
    """`large_string`, null where a value is. `values`: of a lake type that a column of `pg_type` may have."""
    if values.type in (pa.string(), pa.large_string()):
        return values.cast(pa.large_string())
    return pa.array(_texts(values, pg_type.without_domain), pa.large_string())


def _texts(values: pa.Array, pg_type: PgType) -> _Texts:
    kind = values.type
    if pa.types.is_map(kind):
        return [None if pairs is None else _hstore(pairs) for pairs in values.to_pylist()]
    if pa.types.is_struct(kind):
        return _range(values, pg_type) if pg_type.kind == "r" else _composite(values, pg_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list(values, pg_type)
    if pa.types.is_floating(kind):
        return [None if number is None else _float(number, kind) for number in values.to_pylist()]
    if pa.types.is_date(kind):
        return _moments(values, pa.int32(), 1, "")
    if pa.types.is_timestamp(kind):
        return _moments(values, pa.int64(), DAY_US, "+00" if kind.tz else "")
    write = _writer(kind, pg_type)
    return [None if value is None else write(value) for value in values.to_pylist()]


def _writer(kind: pa.DataType, pg_type: PgType) -> Callable[..., str]:
    if pa.types.is_boolean(kind):
        return lambda value: "t" if value else "f"
    if pa.types.is_decimal(kind):
        return _money if pg_type.oid == oids.MONEY else lambda number: format(number, "f")
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _ewkb if pg_type.extension and pg_type.name in _SPATIAL else lambda data: f"\\x{data.hex()}"
    return str


# --- numbers and moments ---


def _float(number: float, kind: pa.DataType) -> str:
    if number != number:
        return "NaN"
    if number in (float("inf"), float("-inf")):
        return "Infinity" if number > 0 else "-Infinity"
    exact = np.float32(number) if kind == pa.float32() else np.float64(number)
    digits, _, exponent = _shortest(exact).partition("e")
    if int(exponent) in _FIXED_EXPONENTS[kind]:
        return format(Decimal(f"{digits}e{exponent}"), "f")
    return f"{digits}e{exponent}"


def _shortest(exact: np.floating[Any]) -> str:
    """The shortest number that lies nearer to a float than to any other. numpy also takes one that lies
    halfway, where reading it back rounds to this float; PostgreSQL does not (d2s.c, "acceptBounds")."""
    found = np.format_float_scientific(exact, unique=True, trim="-", exp_digits=2)
    if abs(exact) < _LEAST_HALFWAY:
        return found
    value, digits = Decimal(float(exact)), len(Decimal(found).as_tuple().digits)
    with np.errstate(over="ignore"):
        others = [Decimal(float(np.nextafter(exact, exact.dtype.type(end)))) for end in ("-inf", "inf")]
    while any(2 * Decimal(found) == value + other for other in others):
        found = np.format_float_scientific(exact, unique=False, precision=digits, trim="-", exp_digits=2)
        digits += 1
    return found


def _money(number: Decimal) -> str:
    return f"{'-' if number < 0 else ''}${abs(number):,.2f}"


def _ewkb(data: bytes) -> str:
    return data.hex().upper()


def _moments(values: pa.Array, counted: pa.DataType, per_day: int, zone: str) -> _Texts:
    """Of dates, which count days, and of timestamps, which count microseconds."""
    counts = values.cast(counted).to_pylist()
    return [None if count is None else moment_text(count, per_day, zone) for count in counts]


def moment_text(count: int, per_day: int, zone: str = "") -> str:
    """A date, or a timestamp, by its count since 1970. `per_day`: 1, or microseconds."""
    days, rest = divmod(count, per_day)
    if _FIRST_DAY <= days <= _LAST_DAY:
        day, era = (date(1970, 1, 1) + timedelta(days)).isoformat(), ""
    else:
        year, month, number = date_of(days)
        # There is no year 0: what is counted as such is 1 BC.
        era = " BC" if year < 1 else ""
        day = f"{year if year > 0 else 1 - year:04}-{month:02}-{number:02}"
    if per_day == 1:
        return day + era
    seconds, fraction = divmod(rest, 1_000_000)
    time = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{day} {time}{f'.{fraction:06}'.rstrip('0') if fraction else ''}{zone}{era}"


# --- types made of types ---


def _list(values: pa.Array, pg_type: PgType) -> _Texts:
    """An array, a multirange, or a vector."""
    if pg_type.kind != "a":
        element = pg_type.only_part if pg_type.kind == "m" else pg_type
        brackets = "{}" if pg_type.kind == "m" else "[]"
        return _joined(values, _texts(values.flatten(), element), brackets, ",")
    element, delimiter = pg_type.only_part.without_domain, pg_type.only_part.delimiter
    if _levels(values.type) > _levels_of(pg_type):
        # Of more than one dimension: its rows are arrays of the same type, and stand without quotes.
        return _joined(values, _list(values.flatten(), pg_type), "{}", delimiter)
    special = re.compile(f"{re.escape(delimiter)}|{_ARRAY_SPECIAL}", re.IGNORECASE | re.ASCII)
    texts = (
        "NULL" if text is None else _quoted(text, special, r"\\\1")
        for text in _texts(values.flatten(), element)
    )
    return _joined(values, texts, "{}", delimiter)


def _levels(kind: pa.DataType) -> int:
    """Lists of lists are two."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return 1 + _levels(kind.value_type) if is_list else 0


def _levels_of(pg_type: PgType) -> int:
    """What a value of the type has, where arrays have one dimension."""
    pg_type = pg_type.without_domain
    if pg_type.kind == "a":
        return 1 + _levels_of(pg_type.only_part)
    return int(pg_type.kind == "m" or pg_type.extension == _VECTORS)


def _joined(values: pa.Array, texts: Iterable[str | None], brackets: str, between: str) -> _Texts:
    """Of each list the texts of its elements; a list that is null has none."""
    rest, found = iter(texts), list[str | None]()
    for count in values.value_lengths().to_pylist():
        if count is None:
            found.append(None)
        else:
            found.append(between.join(str(next(rest)) for _ in range(count)).join(brackets))
    return found


def _composite(values: pa.Array, pg_type: PgType) -> _Texts:
    # By place: fields that differ in nothing but their case are texts, and in no struct.
    parts = [
        _texts(part, of.without_domain) for part, (_, of) in zip(values.flatten(), pg_type.parts, strict=True)
    ]
    return [
        ",".join("" if text is None else _quoted(text, _RECORD_SPECIAL, r"\1\1") for text in row).join("()")
        if is_there
        else None
        for is_there, row in zip(values.is_valid().to_pylist(), zip(*parts, strict=True), strict=True)
    ]


def _range(values: pa.Array, pg_type: PgType) -> _Texts:
    of = pg_type.only_part.without_domain
    lower, upper, *flags = values.flatten()
    bounds = [
        ["" if text is None else _quoted(text, _RANGE_SPECIAL, r"\1\1") for text in _texts(bound, of)]
        for bound in (lower, upper)
    ]
    rows = zip(*bounds, *(flag.to_pylist() for flag in flags), values.is_valid().to_pylist(), strict=True)
    return [
        None if not is_there else "empty" if is_empty else f"{'(['[has_low]}{low},{high}{')]'[has_high]}"
        for low, high, has_low, has_high, is_empty, is_there in rows
    ]


def _hstore(pairs: list[tuple[str, str | None]]) -> str:
    return ", ".join(f"{_always(key)}=>{'NULL' if value is None else _always(value)}" for key, value in pairs)


def _always(text: str) -> str:
    return _TO_ESCAPE.sub(r"\\\1", text).join('""')


def _quoted(text: str, special: re.Pattern[str], escaped: str) -> str:
    """In quotes, if anything in it is special there."""
    return _TO_ESCAPE.sub(escaped, text).join('""') if special.search(text) else text
