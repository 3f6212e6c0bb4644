"""Translation of a table's changes (text values) and lake rows (typed values) from one relation to the next.

These are pure functions. Columns are matched by attnum. Values change as in PostgreSQL: existing rows get the
`missing` value of an added column, a wider type has the same value in its own text form, and a dropped column
keeps its values in the lake.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import DriftError
from airflow_provider_pgrepl.replication.lake.merge.changes import (
    TEXTS,
    Bools,
    RowImages,
    array_of,
    unchanged_pairs,
)
from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.names import show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import TypedColumn, typed_columns
from airflow_provider_pgrepl.replication.values.scalars import precision_and_scale

_FINITE = r"^-?\d"
# From this number on, PostgreSQL writes double precision with an exponent.
_LARGE = 1e15
_ROWS = ["I", "U", "D"]


def widened_text(texts: pa.Array, before: Column, after: Column) -> pa.Array:
    """Return the text values of a column (`string` or `large_string`) in its new type. Most do not change."""
    was, now = (before.type_oid, before.typmod), (after.type_oid, after.typmod)
    if was[0] == oids.FLOAT4 and now[0] == oids.FLOAT8:
        return _as_doubles(texts)
    if was != now and was[0] == now[0] == oids.NUMERIC and was[1] >= 0 and now[1] >= 0:
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
    """Convert text values of type real to the text of the same numbers in double precision.

    Each different value is converted once.
    """
    encoded = texts.dictionary_encode()
    numbers = pc.cast(pc.cast(encoded.dictionary, pa.float32()), pa.float64())
    rewritten = pa.array([_text_of_double(number) for number in numbers.to_pylist()], texts.type)
    return rewritten.take(encoded.indices)


def _text_of_double(number: float | None) -> str | None:
    """Return the shortest text of exactly this number, in PostgreSQL's notation."""
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
    """Return the fewest digits of a large number that are nearer to it than to any other number.

    Python also accepts digits half-way to a neighbor if they are parsed as this number; PostgreSQL does not.
    """
    neighbours = (math.nextafter(number, 0), math.nextafter(number, math.inf))
    for count in range(17):
        text = f"{number:.{count}e}"
        if float(text) == number and all(
            2 * Fraction(text) != Fraction(number) + Fraction(other) for other in neighbours
        ):
            return text.partition("e")[0].replace(".", "").rstrip("0")
    raise AssertionError("17 digits tell any two numbers apart")


def translated(changes: pa.Table, before: Relation, after: Relation) -> pa.Table:
    """Translate changelog rows of `before` to what they would be if the table had always been `after`.

    `new`, `old` and `unchanged` are converted to the published columns of `after`, in their order. The values
    of a dropped column are removed. An added column has its `missing` value in each `new`, and in `old` if
    that is the whole row (replica identity FULL). Rows of other ops (TRUNCATE, relations) are not changed.
    Raises DriftError if rows do not have the columns of `before`.
    """
    if _layout(before) == _layout(after) or changes.num_rows == 0:
        return changes
    of_rows = pc.is_in(changes["op"], pa.array(_ROWS)).combine_chunks().to_numpy(zero_copy_only=False)
    if not of_rows.all():
        rows, others = changes.filter(pa.array(of_rows)), changes.filter(pa.array(~of_rows))
        order = np.argsort(np.concatenate([np.flatnonzero(of_rows), np.flatnonzero(~of_rows)]))
        return pa.concat_tables([translated(rows, before, after), others]).take(pa.array(order))
    whole_old = before.replica_identity == "f"
    new = _rebuilt(array_of(changes, "new", TEXTS), before, after, whole=True)
    old = _rebuilt(array_of(changes, "old", TEXTS), before, after, whole=whole_old)
    unchanged = _moved(array_of(changes, "unchanged", pa.list_(pa.int16())), before, after)
    for name, values in (("new", new), ("old", old), ("unchanged", unchanged)):
        index = changes.schema.get_field_index(name)
        field = changes.schema.field(index)
        changes = changes.set_column(index, field, values.cast(field.type))
    return changes


def is_same_layout(before: Relation, after: Relation) -> bool:
    """Return True if changes of both relations have the same columns, in attnum, type and order."""
    return _layout(before) == _layout(after)


def _layout(relation: Relation) -> list[tuple[int, int, int]]:
    return [(column.attnum, column.type_oid, column.typmod) for column in relation.columns]


def _places(relation: Relation) -> dict[int, int]:
    return {column.attnum: index for index, column in enumerate(relation.columns)}


def _rebuilt(lists: pa.Array, before: Relation, after: Relation, *, whole: bool) -> pa.Array:
    read = RowImages(lists, len(before.columns), before.table)
    places = _places(before)
    columns = []
    for column in after.columns:
        place = places.get(column.attnum)
        if place is None:
            fill = column.missing if whole else None
            columns.append(pa.repeat(pa.scalar(fill, pa.large_string()), read.count))
        else:
            columns.append(widened_text(read.column(place), before.columns[place], column))
    return _listed(columns, read.present, read.count)


def _listed(columns: list[pa.Array], present: Bools, count: int) -> pa.Array:
    """Return a list of one value of each column for each row that is present; null for the other rows."""
    width = len(columns)
    order = (np.arange(width)[None, :] * count + np.arange(count)[:, None]).ravel()
    texts = pa.concat_arrays([pa.array([], pa.large_string()), *columns]).take(pa.array(order))
    offsets = np.concatenate([[0], np.cumsum(present, dtype=np.int64)]) * width
    return pa.LargeListArray.from_arrays(pa.array(offsets), texts, TEXTS, mask=pa.array(~present))


def _moved(unchanged: pa.Array, before: Relation, after: Relation) -> pa.Array:
    """Return the indexes of unchanged columns in the new order, without those of dropped columns."""
    rows, indexes = unchanged_pairs(unchanged)
    places = _places(after)
    there = np.array([places.get(column.attnum, -1) for column in before.columns], np.int64)
    moved = there[indexes]
    rows, moved = rows[moved >= 0], moved[moved >= 0]
    counts = np.bincount(rows, minlength=len(unchanged))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets),
        pa.array(moved.astype(np.int16)),
        pa.list_(pa.int16()),
        mask=pa.array(counts == 0),
    )


def evolved(rows: pa.Table, before: Relation, after: Relation, options: TableOptions) -> pa.Table:
    """Convert rows of the lake table for `before` to rows of the lake table for `after`.

    Values are cast exactly, added columns have the typed `missing` value, and dropped ones are kept. Columns
    that are not of the relation (bookkeeping, a version's lifetime) are unchanged and come last. Raises
    DriftError for a value that cannot be cast, ConfigError, ValueRangeError.
    """
    known = {typed.column.attnum: typed for typed in typed_columns(before, options)}
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    for typed in typed_columns(after, options):
        own = known.pop(typed.column.attnum, None)
        columns[typed.name] = (
            added_values(typed, len(rows)) if own is None else _widened(rows[own.name], own, typed)
        )
    return pa.table({**columns, **{name: rows[name] for name in rows.column_names if name not in columns}})


def added_values(typed: TypedColumn, count: int) -> pa.Array:
    """Return `count` copies of the typed value that rows from before a column was added have in it."""
    if typed.column.missing is None:
        return pa.nulls(count, typed.lake_type)
    value = typed.parse(pa.array([typed.column.missing], pa.large_string()))
    return value.take(pa.array(np.zeros(count, np.int64)))


def _widened(values: pa.ChunkedArray, before: TypedColumn, after: TypedColumn) -> pa.ChunkedArray:
    if values.type == after.lake_type:
        return values
    try:
        return values.cast(after.lake_type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        # Ignore Arrow's message: it has the value in it.
        pass
    raise DriftError(
        f"column {show_identifier(after.name)} cannot go from lake type {before.lake_type} to"
        f" {after.lake_type}",
        errors.resnapshot(after.table),
    )
