"""Typed columns → JSON, a column at a time: the same texts as `json_format` makes of a change's values.

Texts are `large_string`: a row's JSON may be several times as long as the row. NULL stays null until rows are
made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.events.changes import python_values
from airflow_provider_pgrepl.replication.events.formats.json_format import (
    embedded,
    json_string,
    json_value,
    on_one_line,
)

TEXT = pa.large_string()
_QUOTE, _NOTHING = pa.scalar('"', TEXT), pa.scalar("", TEXT)
_TRUE, _FALSE = pa.scalar("true", TEXT), pa.scalar("false", TEXT)
_LINES = r"\x{85}\x{2028}\x{2029}"
_TO_ESCAPE = rf'["\\\x00-\x1f{_LINES}]'
_TO_EMBED = rf"[\r\n{_LINES}]"
_LARGEST_PLAIN_SCALE = 6
"""Above it Arrow writes numbers near 0 with an exponent (Decimal128::ToString), as Java does."""
_DAYS = (-719_162, 2_932_896)
"""Of Python's first and last date, 0001-01-01 and 9999-12-31."""
_DAY_US = 86_400_000_000
_MICROSECONDS = (_DAYS[0] * _DAY_US, (_DAYS[1] + 1) * _DAY_US - 1)
_DATE_CHARACTERS, _SECOND_CHARACTERS = 10, 19
"""So long is `2024-05-01`, and `2024-05-01 12:00:00`."""


def json_texts(values: pa.Array, *, is_json: bool) -> pa.Array:
    """Each value of a typed column as JSON. `is_json`: they are texts that are JSON.

    Raises ValueError or OverflowError for a value that Python has not, as `to_pylist` does.
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
    """Objects, one a row, whose fields have these names."""

    def __init__(self, names: Iterable[str]) -> None:
        keys = [f"{on_one_line(json_string(name))}:" for name in names]
        befores = [f"{',' if number else '{'}{key}" for number, key in enumerate(keys)]
        self._befores = [pa.scalar(before, TEXT) for before in befores]
        self._end = pa.scalar("}", TEXT)

    def of(self, columns: Sequence[pa.Array], count: int) -> pa.Array:
        """Of `count` rows, whose columns are JSON texts."""
        if not columns:
            return pa.array(["{}"] * count, TEXT)
        fields = [one for pair in zip(self._befores, columns, strict=True) for one in pair]
        return joined(*fields, self._end)


def joined(*texts: pa.Array | pa.Scalar) -> pa.Array:
    """Texts one after the other; one that is null is JSON's null."""
    return pc.binary_join_element_wise(*texts, _NOTHING, null_handling="replace", null_replacement="null")


# --- texts ---


def _strings(values: pa.Array) -> pa.Array:
    return _rewritten(_checked(values), _TO_ESCAPE, json_string, quoted=True)


def _checked(values: pa.Array) -> pa.Array:
    """As `large_string`. Raises ArrowInvalid, which is a ValueError, for what is not UTF-8: a database of
    encoding SQL_ASCII has any bytes."""
    return values.cast(pa.large_binary()).cast(TEXT)


def _rewritten(
    texts: pa.Array, pattern: str, write: Callable[[str], str], *, quoted: bool = False
) -> pa.Array:
    """Those in which a pattern is found as `write` has them, on one line; all others as they are, or in
    quotes."""
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
    """As `isoformat` writes them: six digits of a second, or none where they are all 0."""
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
