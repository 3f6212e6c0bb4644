"""Conversion of lake values to the texts that PostgreSQL writes for them, under the pinned settings.

A parsed text is restored exactly, except for what parsing does not keep: trailing zeros of a number that
became a decimal of another scale, and infinities that the settings turn into null or a sentinel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions

from .parser import Writer
from .registry import parser_of, writer_of
from .scalars import precision_and_scale
from .temporal import SECONDS_PER_DAY, date_of

_Texts = list[str | None]
_PGVECTOR = "vector"
DAY_US = SECONDS_PER_DAY * 1_000_000
_ARRAY_SPECIAL = r'["\\{}\s]|^$|^null$'
_RECORD_SPECIAL = re.compile(r'["\\(),\s]|^$', re.ASCII)
_RANGE_SPECIAL = re.compile(r'["\\()\[\],\s]|^$', re.ASCII)
_TO_ESCAPE = re.compile(r'(["\\])')
_FIXED_EXPONENTS = {pa.float32(): range(-4, 6), pa.float64(): range(-4, 15)}
"""The exponents for which PostgreSQL writes a float without an exponent (Ryu: f2s.c and d2s.c)."""
_LEAST_HALFWAY = 1e6
"""Below this limit, no number with as few digits as a float's shortest text is halfway to the next float."""
_WITH_INFINITY = (oids.DATE, oids.TIMESTAMP, oids.TIMESTAMPTZ)
_LEAST_FIXED = 1e-4
_FIXED_SCALE = 6
_FIRST_DAY = -719_162
_LAST_DAY = 2_932_896
"""0001-01-01 and 9999-12-31, the range of Python's date, whose ISO format equals PostgreSQL's."""


def texts_of(values: pa.Array, pg_type: PgType) -> pa.Array:
    """Return the texts of values as `large_string`; null stays null.

    `values`: of a lake type that a column of `pg_type` may have.
    """
    if values.type in (pa.string(), pa.large_string()):
        return values.cast(pa.large_string())
    pg_type = pg_type.without_domain
    found = None if writer_of(pg_type) else _texts_by_arrow(values)
    return pa.array(_texts(values, pg_type), pa.large_string()) if found is None else found


def _texts_by_arrow(values: pa.Array) -> pa.Array | None:
    """Return the texts of scalar values as Arrow writes them, in a tenth of the time; None if PostgreSQL may
    write other texts."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return pc.if_else(values, *(pa.scalar(text, pa.large_string()) for text in "tf"))
    # Arrow writes decimals below 10⁻⁶ with an exponent.
    if pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and 0 <= kind.scale <= _FIXED_SCALE):
        return values.cast(pa.large_string())
    if not (pa.types.is_date(kind) or pa.types.is_timestamp(kind)) or not _has_short_years(values):
        return None
    if pa.types.is_date(kind):
        return values.cast(pa.large_string())
    texts = values.cast(pa.timestamp("us")).cast(pa.large_string())
    texts = pc.utf8_rtrim(pc.utf8_rtrim(texts, "0"), ".")
    zone = pa.scalar("+00" if kind.tz else "", pa.large_string())
    return pc.binary_join_element_wise(texts, zone, pa.scalar("", pa.large_string()))


def _has_short_years(values: pa.Array) -> bool:
    """Return True if all dates or timestamps are in the years 1 to 9999."""
    per_day = 1 if pa.types.is_date(values.type) else DAY_US
    least, most = pc.min_max(values.view(pa.int32() if per_day == 1 else pa.int64())).values()
    return not least.is_valid or (
        least.as_py() >= _FIRST_DAY * per_day and most.as_py() < (_LAST_DAY + 1) * per_day
    )


def unwritable(pg_type: PgType, options: ColumnOptions) -> str:
    """Return why a column's values in the lake do not have the texts of the source, as a sentence.

    Empty if each has exactly the text from which it was parsed.
    """
    pg_type = pg_type.without_domain
    lake_type = parser_of(pg_type, options).lake_type
    if lake_type == pa.string():
        return ""
    if pg_type.oid == oids.NUMERIC:
        if options.numeric_nan != "error":
            return f"numeric_nan {options.numeric_nan} replaces values of the source"
        if pg_type.typmod < 0 or precision_and_scale(pg_type.typmod)[1] != lake_type.scale:
            return "its decimals do not keep the zeros at the end of a number"
    if pg_type.oid in _WITH_INFINITY and options.infinity != "error":
        return f"infinity {options.infinity} replaces values of the source"
    of_parts = replace(options, lake_type=None)
    return next(filter(None, (unwritable(part, of_parts) for _, part in pg_type.parts)), "")


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


def _writer(kind: pa.DataType, pg_type: PgType) -> Writer:
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return str
    if (own := writer_of(pg_type)) is not None:
        return own
    if pa.types.is_boolean(kind):
        return lambda value: "t" if value else "f"
    if pa.types.is_decimal(kind):
        return lambda number: format(number, "f")
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return lambda data: f"\\x{data.hex()}"
    return str


# --- numbers, dates and timestamps ---


def _float(number: float, kind: pa.DataType) -> str:
    if number != number:
        return "NaN"
    if number in (float("inf"), float("-inf")):
        return "Infinity" if number > 0 else "-Infinity"
    if kind == pa.float64() and _LEAST_FIXED <= abs(number) < _LEAST_HALFWAY:
        return repr(number).removesuffix(".0")
    exact = np.float32(number) if kind == pa.float32() else np.float64(number)
    digits, _, exponent = _shortest(exact).partition("e")
    if int(exponent) in _FIXED_EXPONENTS[kind]:
        return format(Decimal(f"{digits}e{exponent}"), "f")
    return f"{digits}e{exponent}"


def _shortest(exact: np.floating[Any]) -> str:
    """Return the shortest decimal number that is nearer to a float than to any other float.

    numpy also accepts a number that is halfway, if reading it rounds to this float. PostgreSQL does not
    (d2s.c, "acceptBounds").
    """
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


def _moments(values: pa.Array, counted: pa.DataType, per_day: int, zone: str) -> _Texts:
    """Return the texts of dates (`counted` in days) or timestamps (in microseconds)."""
    counts = values.cast(counted).to_pylist()
    return [None if count is None else moment_text(count, per_day, zone) for count in counts]


def moment_text(count: int, per_day: int, zone: str = "") -> str:
    """Return the text of a date or timestamp. `count`: since 1970; `per_day`: 1, or microseconds of a day."""
    days, rest = divmod(count, per_day)
    if _FIRST_DAY <= days <= _LAST_DAY:
        day, era = (date(1970, 1, 1) + timedelta(days)).isoformat(), ""
    else:
        year, month, number = date_of(days)
        # The algorithm's year 0 is 1 BC.
        era = " BC" if year < 1 else ""
        day = f"{year if year > 0 else 1 - year:04}-{month:02}-{number:02}"
    if per_day == 1:
        return day + era
    seconds, fraction = divmod(rest, 1_000_000)
    time = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{day} {time}{f'.{fraction:06}'.rstrip('0') if fraction else ''}{zone}{era}"


# --- types with component types ---


def _list(values: pa.Array, pg_type: PgType) -> _Texts:
    """Return the texts of arrays, multiranges or vectors."""
    if pg_type.kind != "a":
        element = pg_type.only_part if pg_type.kind == "m" else pg_type
        brackets = "{}" if pg_type.kind == "m" else "[]"
        return _joined(values, _texts(values.flatten(), element), brackets, ",")
    element, delimiter = pg_type.only_part.without_domain, pg_type.only_part.delimiter
    if _levels(values.type) > _levels_of(pg_type):
        # The array has several dimensions: its rows are arrays of the same type, written without quotes.
        return _joined(values, _list(values.flatten(), pg_type), "{}", delimiter)
    special = re.compile(f"{re.escape(delimiter)}|{_ARRAY_SPECIAL}", re.IGNORECASE | re.ASCII)
    texts = (
        "NULL" if text is None else _quoted(text, special, r"\\\1")
        for text in _texts(values.flatten(), element)
    )
    return _joined(values, texts, "{}", delimiter)


def _levels(kind: pa.DataType) -> int:
    """Return the number of nested lists of a type: 2 for a list of lists, 0 for no list."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return 1 + _levels(kind.value_type) if is_list else 0


def _levels_of(pg_type: PgType) -> int:
    """Return the number of nested lists of a type whose arrays all have one dimension."""
    pg_type = pg_type.without_domain
    if pg_type.kind == "a":
        return 1 + _levels_of(pg_type.only_part)
    return int(pg_type.kind == "m" or pg_type.extension == _PGVECTOR)


def _joined(values: pa.Array, texts: Iterable[str | None], brackets: str, between: str) -> _Texts:
    """Return the text of each list, from the texts of the elements of all lists; null for a null list."""
    rest, found = iter(texts), list[str | None]()
    for count in values.value_lengths().to_pylist():
        if count is None:
            found.append(None)
        else:
            found.append(between.join(str(next(rest)) for _ in range(count)).join(brackets))
    return found


def _composite(values: pa.Array, pg_type: PgType) -> _Texts:
    # Match by position. A composite whose field names differ only in case is stored as text, not as a struct.
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
    """Return a text in quotes if it matches `special`, else unchanged."""
    return _TO_ESCAPE.sub(escaped, text).join('""') if special.search(text) else text
