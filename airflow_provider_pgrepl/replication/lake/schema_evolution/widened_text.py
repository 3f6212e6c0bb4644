"""The text of a value after its column's type became wider, as PostgreSQL would write it."""

from __future__ import annotations

import math
from fractions import Fraction

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.postgres.relation import Column
from airflow_provider_pgrepl.replication.values.scalars import precision_and_scale

_REAL, _DOUBLE, _NUMERIC = 700, 701, 1700
_FINITE = r"^-?\d"
# From here on double precision is written with an exponent.
_LARGE = 1e15


def widened_text(texts: pa.Array, before: Column, after: Column) -> pa.Array:
    """Texts of a column (`string` or `large_string`) in its new type; most types keep them."""
    was, now = (before.type_oid, before.typmod), (after.type_oid, after.typmod)
    if was[0] == _REAL and now[0] == _DOUBLE:
        return _as_doubles(texts)
    if was != now and was[0] == now[0] == _NUMERIC and was[1] >= 0 and now[1] >= 0:
        return _with_zeros(texts, precision_and_scale(was[1])[1], precision_and_scale(now[1])[1])
    return texts


def _with_zeros(texts: pa.Array, before: int, after: int) -> pa.Array:
    if after <= max(before, 0):
        return texts
    zeros = "." + "0" * after if before <= 0 else "0" * (after - before)
    finite = pc.match_substring_regex(texts, _FINITE)
    longer = pc.binary_join_element_wise(texts, pa.scalar(zeros, texts.type), pa.scalar("", texts.type))
    return pc.if_else(finite, longer, texts)


def _as_doubles(texts: pa.Array) -> pa.Array:
    """Texts of real as the texts of the same numbers in double precision; each different one made once."""
    encoded = texts.dictionary_encode()
    numbers = pc.cast(pc.cast(encoded.dictionary, pa.float32()), pa.float64())
    rewritten = pa.array([_text_of_double(number) for number in numbers.to_pylist()], texts.type)
    return rewritten.take(encoded.indices)


def _text_of_double(number: float | None) -> str | None:
    """The shortest text of exactly this number, in PostgreSQL's notation."""
    if number is None:
        return None
    if not math.isfinite(number):
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    text = repr(number).removesuffix(".0")
    if abs(number) < _LARGE:
        return text
    digits, exponent = _digits(abs(number)), f"{abs(number):.16e}".partition("e")[2]
    return f"{'-' if number < 0 else ''}{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e{exponent}"


def _digits(number: float) -> str:
    """The fewest digits that mean a large number, and lie nearer to it than to any other.

    Python takes those half-way to a neighbour if they are read back as this number; PostgreSQL does not.
    """
    neighbours = (math.nextafter(number, 0), math.nextafter(number, math.inf))
    for count in range(17):
        text = f"{number:.{count}e}"
        if float(text) == number and all(
            2 * Fraction(text) != Fraction(number) + Fraction(other) for other in neighbours
        ):
            return text.partition("e")[0].replace(".", "").rstrip("0")
    raise AssertionError("17 digits tell any two numbers apart")
