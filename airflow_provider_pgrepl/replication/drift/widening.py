"""Wider types: what a column may become without any of its values being another one in the lake. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, PgType
from airflow_provider_pgrepl.replication.settings.tables import TableChoices
from airflow_provider_pgrepl.replication.values import typed_column
from airflow_provider_pgrepl.replication.values.scalars import precision_and_scale

_INTEGERS = {21: 0, 23: 1, 20: 2}
_REAL, _DOUBLE = 700, 701
_TEXT, _VARCHAR, _VARBIT, _NUMERIC = 25, 1043, 1562, 1700
_WITH_FRACTIONS = frozenset({1083, 1114, 1184, 1266})  # time, timestamp, both also with time zone
_ALL_FRACTIONS = 6

_EXACT_CASTS = frozenset(
    {
        (pa.int16(), pa.int32()),
        (pa.int16(), pa.int64()),
        (pa.int32(), pa.int64()),
        (pa.float32(), pa.float64()),
    }
)


@dataclass(frozen=True)
class Widening:
    """A type that holds all values of another.

    `rewrites`: ALTER COLUMN … TYPE writes the table anew for it. `keeps_text`: each value reads as before.
    """

    rewrites: bool
    keeps_text: bool


def find_widening(before: Column, now: Column) -> Widening | None:
    """How the type now is wider than the one before; None when it is another.

    A domain and what it is made of have the same values. PostgreSQL keeps the file where neither USING nor
    the constraints of a domain need it written anew, so that values are known to be the same.
    """
    was, is_now = before.pg_type.without_domain, now.pg_type.without_domain
    if "d" not in (before.pg_type.kind, now.pg_type.kind):
        return _of_types(was, is_now)
    if _is_same(was, is_now):
        return Widening(False, True)
    widening = _of_types(was, is_now)
    return widening if widening == Widening(False, True) else None


def _is_same(one: PgType, other: PgType) -> bool:
    """Whether two types are one, whatever is known of their names."""
    return (
        (one.oid, one.typmod, one.kind, one.labels) == (other.oid, other.typmod, other.kind, other.labels)
        and [name for name, _ in one.parts] == [name for name, _ in other.parts]
        and all(_is_same(mine, theirs) for (_, mine), (_, theirs) in zip(one.parts, other.parts, strict=True))
    )


def is_exact_in_lake(
    before: Column, now: Column, table: TableName, choices: TableChoices, widening: Widening
) -> bool:
    """Whether lake values of the type before are, cast, those that the type now would have given."""
    try:
        old = typed_column(before, table, choices).lake_type
        new = typed_column(now, table, choices).lake_type
    except ConfigError:
        return False
    return _is_exact(old, new, widening)


def _is_exact(old: pa.DataType, new: pa.DataType, widening: Widening) -> bool:
    if pa.types.is_list(old) and pa.types.is_list(new):
        return _is_exact(old.value_type, new.value_type, widening)
    if pa.types.is_decimal(old) and pa.types.is_decimal(new):
        return bool(old.scale <= new.scale and old.precision - old.scale <= new.precision - new.scale)
    if pa.types.is_string(old) and pa.types.is_string(new):
        return widening.keeps_text
    return old == new or (old, new) in _EXACT_CASTS


def _of_types(before: PgType, now: PgType) -> Widening | None:
    if before.kind == now.kind == "a":
        return _of_elements(before.only_part, now.only_part)
    if before.kind != "b" or now.kind != "b":
        return None
    if before.oid in _INTEGERS and now.oid in _INTEGERS:
        return Widening(True, True) if _INTEGERS[before.oid] < _INTEGERS[now.oid] else None
    if (before.oid, now.oid) == (_REAL, _DOUBLE):
        return Widening(True, False)
    if before.oid == now.oid == _NUMERIC:
        return _of_numerics(before.typmod, now.typmod)
    return Widening(False, True) if _holds_more(before, now) else None


def _of_elements(before: PgType, now: PgType) -> Widening | None:
    element = _of_types(before, now)
    if element is None or not element.keeps_text:
        return None
    # The element's type stands in every stored array, and a limit is checked in each of them.
    only_freed = before.oid == now.oid and now.typmod < 0
    return Widening(rewrites=not only_freed, keeps_text=True)


def _of_numerics(before: int, now: int) -> Widening | None:
    if now < 0:
        return Widening(False, True)
    if before < 0:
        return None
    (digits, scale), (more_digits, larger_scale) = precision_and_scale(before), precision_and_scale(now)
    if scale > larger_scale or digits - scale > more_digits - larger_scale:
        return None
    return Widening(scale != larger_scale, scale == larger_scale)


def _holds_more(before: PgType, now: PgType) -> bool:
    """Whether the type now has only a larger limit than the one before, or none."""
    if before.oid in (_TEXT, _VARCHAR) and now.oid in (_TEXT, _VARCHAR):
        unlimited = now.oid == _TEXT or now.typmod < 0
        return unlimited or (before.oid == _VARCHAR and 0 <= before.typmod <= now.typmod)
    if before.oid != now.oid:
        return False
    if now.oid == _VARBIT:
        return now.typmod < 0 or 0 <= before.typmod <= now.typmod
    if now.oid in _WITH_FRACTIONS:
        return now.typmod < 0 or now.typmod >= _ALL_FRACTIONS or 0 <= before.typmod <= now.typmod
    return False
