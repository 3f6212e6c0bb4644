"""Conversion of typed columns to JSON, a column at a time.

The results equal the texts that `to_json` makes of a change's values. They are `large_string`, because the
JSON of a row may be several times as long as the row. NULL stays null until rows are joined from them.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.events.changes import Change, python_values

json_string: Callable[[str], str] = json.encoder.encode_basestring
"""Returns a string as JSON. Pass the result to `on_one_line` before writing it as part of a line."""
_BREAKS = str.maketrans("\r\n", "  ")
_LINES = {0x85: r"\u0085", 0x2028: r"\u2028", 0x2029: r"\u2029"}
"""Characters that some readers take for a line end, and their escapes. In JSON they occur in strings only."""
TEXT = pa.large_string()
_QUOTE, _NOTHING = pa.scalar('"', TEXT), pa.scalar("", TEXT)
_TRUE, _FALSE = pa.scalar("true", TEXT), pa.scalar("false", TEXT)
_LINE_ENDS = r"\x{85}\x{2028}\x{2029}"
_TO_ESCAPE = rf'["\\\x00-\x1f{_LINE_ENDS}]'
_TO_EMBED = rf"[\r\n{_LINE_ENDS}]"
_LARGEST_PLAIN_SCALE = 6
"""Above this scale Arrow writes numbers near 0 with an exponent (Decimal128::ToString), like Java."""
_DAYS = (-719_162, 2_932_896)
"""Python's first and last date, 0001-01-01 and 9999-12-31, in days since 1970."""
_DAY_US = 86_400_000_000
_MICROSECONDS = (_DAYS[0] * _DAY_US, (_DAYS[1] + 1) * _DAY_US - 1)
_DATE_CHARACTERS, _SECOND_CHARACTERS = 10, 19
"""The lengths of `2024-05-01` and of `2024-05-01 12:00:00`."""


def to_json(change: Change) -> str:
    """Return a change as one line of JSON.

    The keys are `table`, `op`, `data`, `old`, `id`, `commit_lsn`, `commit_ts` and `xid`, and `unchanged` if
    an update left out large values.

    Integers and finite floats are numbers. `numeric`, and NaN and infinite floats, are strings. bytea is
    base64. Timestamps are ISO 8601, with time zone in UTC with `Z`. json and jsonb are embedded. Arrays are
    arrays, and values with fields are objects.

    :param change: the change, as `Lake.changes` returns it
    """
    row, json_columns = change.data, change.json_columns
    unchanged = f',"unchanged":{json_value(change.unchanged)}' if change.unchanged else ""
    text = (
        f'{{"table":{json_string(change.table)},"op":"{change.op}","data":{_row(row, json_columns)}'
        f',"old":{_row(change.old, json_columns)},"id":"{change.id}","commit_lsn":"{change.commit_lsn}"'
        f',"commit_ts":{_commit_ts(change.commit_ts)},"xid":{change.xid}{unchanged}}}'
    )
    return on_one_line(text)


def on_one_line(text: str) -> str:
    """Return JSON with the characters escaped that some readers take for a line end."""
    return text if text.isascii() else text.translate(_LINES)


def to_json_object(row: Mapping[str, Any], json_columns: Collection[str] = ()) -> str:
    """Return some columns of a row as a JSON object, as in `data`."""
    text = _row(row, json_columns)
    return text if text.isascii() else text.translate(_LINES)


def _row(row: Mapping[str, Any] | None, json_columns: Collection[str]) -> str:
    if row is None:
        return "null"
    if not json_columns:
        return _object(row)
    values = (
        embedded(value) if name in json_columns and value is not None else json_value(value)
        for name, value in row.items()
    )
    fields = [f"{json_string(name)}:{value}" for name, value in zip(row, values, strict=True)]
    return "{" + ",".join(fields) + "}"


def embedded(text: str) -> str:
    """Return JSON that PostgreSQL has validated, with line breaks replaced by spaces.

    Type json keeps line breaks, which can only occur between tokens.
    """
    return text.translate(_BREAKS)


def _object(fields: Mapping[str, Any]) -> str:
    written = [f"{json_string(name)}:{json_value(value)}" for name, value in fields.items()]
    return "{" + ",".join(written) + "}"


def json_value(value: Any) -> str:
    """Return any value of a change as JSON."""
    write = _WRITERS.get(type(value))
    return _other(value) if write is None else write(value)


def _float(value: float) -> str:
    """Return a float as JSON. NaN and infinities become strings as PostgreSQL writes them."""
    if math.isfinite(value):
        return repr(value)
    return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'


def _moment(value: datetime) -> str:
    if value.tzinfo is None:
        return f'"{value.isoformat()}"'
    return f'"{value.astimezone(UTC).replace(tzinfo=None).isoformat()}Z"'


@lru_cache(1_000)
def _commit_ts(value: datetime) -> str:
    """Return a commit time as JSON. It is cached, because all changes of a transaction share it."""
    return _moment(value)


_WRITERS: dict[type, Callable[[Any], str]] = {
    str: json_string,
    int: int.__repr__,
    UUID: lambda value: f'"{value}"',
    bool: lambda value: "true" if value else "false",
    type(None): lambda _: "null",
    float: _float,
    Decimal: lambda value: f'"{value:f}"',
    datetime: _moment,
    date: lambda value: f'"{value.isoformat()}"',
    bytes: lambda value: f'"{base64.b64encode(value).decode()}"',
}


def _other(value: Any) -> str:
    """Return an array, a value with fields, or a subclass of a known type, as JSON."""
    if isinstance(value, Mapping):
        return _object({str(name): one for name, one in value.items()})
    for kind, write in _WRITERS.items():
        if isinstance(value, kind):
            return write(value)
    return "[" + ",".join(map(json_value, value)) + "]"


def json_texts(values: pa.Array, *, is_json: bool) -> pa.Array:
    """Return each value of a typed column as JSON. `is_json`: the values are strings that contain JSON.

    Raises ValueError or OverflowError for a value that Python cannot represent, like `to_pylist`.
    """
    kind = values.type
    if is_json:
        return _rewritten(_checked(values), _TO_EMBED, embedded)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _strings(values)
    if pa.types.is_integer(kind):
        return values.cast(TEXT)
    if pa.types.is_boolean(kind):
        return pc.if_else(values, _TRUE, _FALSE)
    if pa.types.is_decimal128(kind):
        return _decimals(values)
    if pa.types.is_date32(kind):
        return _dates(values)
    if kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        return _moments(values)
    return _written(python_values(values), json_value)


class JsonRows:
    """Makes a JSON object of each row, with these names as keys."""

    def __init__(self, names: Iterable[str]) -> None:
        keys = [f"{on_one_line(json_string(name))}:" for name in names]
        befores = [f"{',' if number else '{'}{key}" for number, key in enumerate(keys)]
        self._befores = [pa.scalar(before, TEXT) for before in befores]
        self._end = pa.scalar("}", TEXT)

    def of(self, columns: Sequence[pa.Array], count: int) -> pa.Array:
        """Return the objects of `count` rows. `columns`: the values as JSON."""
        if not columns:
            return pa.array(["{}"] * count, TEXT)
        fields = [one for pair in zip(self._befores, columns, strict=True) for one in pair]
        return joined(*fields, self._end)


def joined(*texts: pa.Array | pa.Scalar) -> pa.Array:
    """Concatenate texts element by element. A null element becomes JSON's null."""
    return pc.binary_join_element_wise(*texts, _NOTHING, null_handling="replace", null_replacement="null")


# --- texts ---


def _strings(values: pa.Array) -> pa.Array:
    return _rewritten(_checked(values), _TO_ESCAPE, json_string, quoted=True)


def _checked(values: pa.Array) -> pa.Array:
    """Return the texts as `large_string`.

    Raises ArrowInvalid, which is a ValueError, for text that is not UTF-8: a database with encoding SQL_ASCII
    may contain any bytes.
    """
    return values.cast(pa.large_binary()).cast(TEXT)


def _rewritten(
    texts: pa.Array, pattern: str, write: Callable[[str], str], *, quoted: bool = False
) -> pa.Array:
    """Return the texts, with those that match `pattern` replaced by the result of `write`, on one line.

    Other texts are unchanged, or quoted with `quoted`.
    """
    odd = pc.fill_null(pc.match_substring_regex(texts, pattern), False)
    plain = _quoted(texts) if quoted else texts
    if not pc.any(odd).as_py():
        return plain
    return pc.replace_with_mask(plain, odd, _written(texts.filter(odd).to_pylist(), write))


def _quoted(texts: pa.Array, end: str = '"') -> pa.Array:
    return pc.binary_join_element_wise(_QUOTE, texts, pa.scalar(end, TEXT), _NOTHING)


def _written(values: Iterable[Any], write: Callable[[Any], str]) -> pa.Array:
    return pa.array([None if value is None else on_one_line(write(value)) for value in values], TEXT)


# --- numbers and moments ---


def _decimals(values: pa.Array) -> pa.Array:
    texts = values.cast(TEXT)
    if values.type.scale > _LARGEST_PLAIN_SCALE:
        odd = pc.fill_null(pc.match_substring(texts, "E"), False)
        plain = [f"{number:f}" for number in values.filter(odd).to_pylist()]
        texts = pc.replace_with_mask(texts, odd, pa.array(plain, TEXT))
    return _quoted(texts)


def _dates(values: pa.Array) -> pa.Array:
    _check_range(values.view(pa.int32()), _DAYS)
    return _quoted(values.cast(TEXT))


def _moments(values: pa.Array) -> pa.Array:
    """Return timestamps like `isoformat`: with six fractional digits, or with none if they are all 0."""
    _check_range(values.view(pa.int64()), _MICROSECONDS)
    texts = values.view(pa.timestamp("us")).cast(TEXT)
    texts = pc.binary_replace_slice(texts, _DATE_CHARACTERS, _DATE_CHARACTERS + 1, "T")
    is_whole = pc.ends_with(texts, ".000000")
    if pc.any(is_whole).as_py():
        texts = pc.if_else(is_whole, pc.utf8_slice_codeunits(texts, 0, _SECOND_CHARACTERS), texts)
    return _quoted(texts, 'Z"' if values.type.tz else '"')


def _check_range(counts: pa.Array, within: tuple[int, int]) -> None:
    found = pc.min_max(counts).as_py()
    if found["min"] is not None and not within[0] <= found["min"] <= found["max"] <= within[1]:
        raise OverflowError("a moment that Python has not")
