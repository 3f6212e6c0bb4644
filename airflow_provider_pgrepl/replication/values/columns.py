"""The partition of a lake table's row: a text, made from the value of one column.

It is a column of its own, and the user's column stays in the data files: Delta has a partition's value as
text in its log, and some of its readers take an empty one for NULL. So an empty text is null here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import TableError, one_line
from airflow_provider_pgrepl.replication.postgres.names import show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.partition_by import PARTITION, PartitionBy
from airflow_provider_pgrepl.replication.settings.tables import TableChoices
from airflow_provider_pgrepl.replication.values.typed_column import TypedColumn, typed_column

CHANGE_IT = "change partition_by of the table in per_table, or take it out"

TEXT_BYTES = 64
"""Of how many bytes of a text there are partitions at most: deltalake and Spark make folders of them where
they write such a table, three bytes for one, and a folder's name has 255."""

_MOST_CONDITIONS = 1000
# The second is what deltalake and Spark call the folder of those without value.
_LIKE_NONE = ["", "__HIVE_DEFAULT_PARTITION__"]
_PLAIN = {16, 20, 21, 23, 25, 1043, 1082, 2950}
_DATED = {1082, 1114, 1184}
_MICROSECONDS_A_DAY = 86_400_000_000
_DAY, _MONTH, _YEAR = "datetime64[D]", "datetime64[M]", "datetime64[Y]"

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Partitioning:
    """How the rows of one table are told apart."""

    typed: TypedColumn
    unit: str

    def of_rows(self, rows: pa.Table) -> set[str | None] | None:
        """The partitions of rows in the lake that have these values; None: they may be in any."""
        if self.typed.name not in rows.column_names:
            return None
        return set(self.texts(rows[self.typed.name]).unique().to_pylist())

    def conditions(self, keys: pa.Table) -> Iterator[str]:
        """SQL that holds of the lake's rows `t` under these keys, by which deltalake leaves files out. By
        equality with a column of the other side it would not."""
        known = self.of_rows(keys.drop_null())
        if known is None or len(known) > _MOST_CONDITIONS:
            return
        named = ", ".join(f"'{name.replace(chr(39), chr(39) * 2)}'" for name in sorted(filter(None, known)))
        either = [f"t.{PARTITION} in ({named})"] if named else []
        either += [f"t.{PARTITION} is null"] if None in known else []
        if either:
            yield f"({' or '.join(either)})"

    def texts(self, values: pa.Array | pa.ChunkedArray) -> pa.Array:
        """The partitions of rows that have these values, typed as the lake has them; null of none."""
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        kind = values.type
        if pa.types.is_date32(kind):
            return _dates(values, pa.int32(), 1, self.unit or "day")
        if pa.types.is_timestamp(kind):
            return _dates(values, pa.int64(), _MICROSECONDS_A_DAY, self.unit)
        if pa.types.is_boolean(kind):
            return pc.if_else(values, pa.scalar("true"), pa.scalar("false"))
        if pa.types.is_integer(kind):
            return values.cast(pa.string())
        return _short(values)


def partitioning(relation: Relation, choices: TableChoices) -> Partitioning | None:
    """How the table is partitioned; None: it is not to be.

    Raises TableError for a column by which it cannot be; ConfigError.
    """
    by = choices.policy.partition
    if by is None:
        return None
    problem = _missing(relation, choices, by)
    column = next((column for column in relation.columns if column.name == by.column), None)
    if problem or column is None:
        raise TableError(
            f"partition_by names column {show_identifier(by.column)}, {problem}", _hint(relation)
        )
    index = relation.columns.index(column)
    found = typed_column(column, relation.table, choices, index)
    if unfit := _unfit(column, found.lake_type, by):
        raise TableError(f"partition_by: {by}: {unfit}", _hint(relation))
    return Partitioning(found, by.unit)


def _hint(relation: Relation) -> str:
    copied = hints.resnapshot(relation.table)
    return f"{CHANGE_IT}; if the table was copied before, then {copied}"


def _missing(relation: Relation, choices: TableChoices, by: PartitionBy) -> str:
    if choices.column(by.column).excluded:
        return "which exclude_columns leaves out"
    published = {column.name: column.attnum for column in relation.columns}
    if by.column in published:
        return "which is left out since it came" if published[by.column] in relation.ignored else ""
    if any(column.name == by.column for column in relation.unpublished):
        return "whose values the publication does not carry"
    if any(column.name == by.column for column in relation.dropped):
        return "which was dropped"
    return "which the table does not have"


def _unfit(column: Column, lake_type: pa.DataType, by: PartitionBy) -> str:
    """What keeps values of a column from telling partitions."""
    base = column.pg_type.without_domain
    shown = one_line(column.type_name)
    if by.unit:
        if base.oid not in _DATED:
            return f"{shown} has no {by.unit}; date, timestamp and timestamp with time zone have"
        if not (pa.types.is_date32(lake_type) or pa.types.is_timestamp(lake_type)):
            return f"the column's lake type is {lake_type}, of which no {by.unit} can be told"
        return ""
    if base.oid in _PLAIN or base.kind == "e":
        return ""
    plain = "boolean, integer types, date, text, varchar, uuid and enums"
    times = "; write year(…), month(…) or day(…) of it" if base.oid in _DATED else ""
    return f"rows cannot be kept apart by whole values of type {shown}, only by {plain}{times}"


def _dates(values: pa.Array, counted_in: pa.DataType, a_day: int, unit: str) -> pa.Array:
    """Years beyond four digits, and those before Christ, are numbers like others: year 0 is 1 B.C."""
    numbers: Ints = values.cast(counted_in).fill_null(0).to_numpy().astype(np.int64) // a_day
    days = numbers.astype(_DAY)
    shown: Callable[[int], str] = {"day": _day, "month": _month, "year": _year}[unit]
    of_unit = {"day": numbers, "month": days.astype(_MONTH).astype(np.int64)}.get(unit)
    if of_unit is None:
        of_unit = days.astype(_YEAR).astype(np.int64)
    distinct, place = np.unique(of_unit, return_inverse=True)
    texts = pa.array([shown(number) for number in distinct.tolist()], pa.string())
    missing = values.is_null().to_numpy(zero_copy_only=False)
    return texts.take(pa.array(place.astype(np.int64), mask=missing))


def _year(number: int) -> str:
    year = 1970 + number
    return f"{year:04d}" if year >= 0 else f"-{-year:04d}"


def _month(number: int) -> str:
    years, month = divmod(number, 12)
    return f"{_year(years)}-{month + 1:02d}"


def _day(number: int) -> str:
    month = np.datetime64(number, "D").astype(_MONTH)
    first = int(month.astype(_DAY).astype(np.int64))
    return f"{_month(int(month.astype(np.int64)))}-{number - first + 1:02d}"


def _short(texts: pa.Array) -> pa.Array:
    beginnings = pc.utf8_slice_codeunits(texts, 0, TEXT_BYTES).cast(pa.string())
    if pc.any(pc.greater(pc.binary_length(beginnings), TEXT_BYTES)).as_py():
        encoded = beginnings.dictionary_encode()
        cut = [text.encode()[:TEXT_BYTES].decode(errors="ignore") for text in encoded.dictionary.to_pylist()]
        beginnings = pa.array(cut, pa.string()).take(encoded.indices)
    nothing = pc.is_in(beginnings, value_set=pa.array(_LIKE_NONE))
    return pc.if_else(nothing, pa.scalar(None, pa.string()), beginnings)
