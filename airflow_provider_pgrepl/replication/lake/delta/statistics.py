"""Statistics of data files: the columns that have bounds, and the JSON of a Delta `add` action.

A bound may be wider than the values, but never narrower, because readers skip files by it. So types whose
bounds need rules about rounding or truncation (text, bytes, decimals, floats with NaN, timestamps without
time zone) have none. Timestamps whose year does not have four digits have none either, since the JSON parsers
of some readers do not accept them.

A table property declares the columns that have bounds in all files of a lake table. deltalake's Arrow dataset
assumes that a declared column without bounds in a file matches no condition there, and loses the file's rows.
So the property names only columns that had bounds in every file when all files were written. An added column
has none in older files, and a column that gets a value without bounds is removed from the property.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import ColumnProperties, DeltaTable, WriterProperties

MOST_COLUMNS = 32
"""Maximum number of columns with bounds in a table: each adds some bytes to every log entry."""

_EPOCH_DAY = date(1970, 1, 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MICROSECOND = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
_OWN = "_pgrepl_"

Bound = int | str
Show = Callable[[int, bool], Bound | None]
_PROPERTY = "delta.dataSkippingStatsColumns"
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"`((?:[^`]|``)*)`|([^,`]+)")


def boundable_columns(schema: pa.Schema) -> list[str]:
    """Return the columns that may have bounds, in the schema's order, at most MOST_COLUMNS.

    These are this package's own columns, and then the first ones of the source table.
    """
    names = [field.name for field in schema if _shower(field.type)]
    first = set(islice(sorted(names, key=lambda name: not name.startswith(_OWN)), MOST_COLUMNS))
    return [name for name in names if name in first]


def writer_properties(bounded: Iterable[str], **options: Any) -> WriterProperties:
    """Return properties with which deltalake writes statistics for the `bounded` columns only.

    For other columns it would leave out NaN, round or truncate decimals, copy whole text values into the log,
    and panic at a year that it cannot format.
    """
    with_bounds = ColumnProperties(statistics_enabled="CHUNK")
    return WriterProperties(
        default_column_properties=ColumnProperties(statistics_enabled="NONE"),
        column_properties=dict.fromkeys(bounded, with_bounds),
        **options,
    )


def columns_with_statistics(schema: pa.Schema) -> list[str]:
    """Return the columns for which pyarrow writes statistics into Parquet files: not nested, not floats.

    Statistics of floats would leave out NaN, which readers that skip by them treat as the greatest value.
    """
    return [
        field.name
        for field in schema
        if not pa.types.is_nested(field.type) and not pa.types.is_floating(field.type)
    ]


def delta_statistics(metadata: pq.FileMetaData, schema: pa.Schema) -> str:
    """Return the JSON statistics of a Parquet file for its `add` action.

    They have `numRecords`, and `nullCount`, `minValues` and `maxValues` of the columns that may have bounds.
    """
    least: dict[str, Bound] = {}
    most: dict[str, Bound] = {}
    nulls: dict[str, int] = {}
    places = column_places(metadata)
    for name in boundable_columns(schema):
        groups = [
            metadata.row_group(group).column(places[name]).statistics
            for group in range(metadata.num_row_groups)
        ]
        if any(group is None or not group.has_null_count for group in groups):
            continue
        nulls[name] = sum(group.null_count for group in groups)
        bounds = _bounds(groups, schema.field(name).type)
        if bounds:
            least[name], most[name] = bounds
    statistics = {"numRecords": metadata.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}
    return json.dumps(statistics, separators=(",", ":"))


def bounded_in_all(schema: pa.Schema, statistics: Sequence[str]) -> list[str]:
    """Return the columns that, by the `delta_statistics` of every file, have bounds or hold only nulls."""
    files = [json.loads(text) for text in statistics]
    return [name for name in boundable_columns(schema) if all(_tells(file, name) for file in files)]


def _tells(file: Mapping[str, Any], name: str) -> bool:
    is_empty = file.get("nullCount", {}).get(name) == file["numRecords"]
    return name in file.get("minValues", {}) or is_empty


def column_places(metadata: pq.FileMetaData) -> dict[str, int]:
    """Return the Parquet column index of each column that is not nested.

    A nested column has as many indexes as it has leaves.
    """
    columns = (metadata.schema.column(index) for index in range(metadata.num_columns))
    # The path of a leaf has its names separated by dots, but the name of a plain column may have dots, too.
    return {column.name: index for index, column in enumerate(columns) if column.path == column.name}


def _bounds(groups: list[Any], arrow_type: pa.DataType) -> tuple[Bound, Bound] | None:
    """Return the least and the greatest bound over the row groups.

    Returns None if the type has no safe bounds, if no group has values, if a group with values has no minimum
    and maximum, or if a bound cannot be formatted.
    """
    show, filled = _shower(arrow_type), [group for group in groups if group.num_values]
    if show is None or not filled or not all(group.has_min_max for group in filled):
        return None
    least = show(min(group.min_raw for group in filled), False)
    most = show(max(group.max_raw for group in filled), True)
    return None if least is None or most is None else (least, most)


def _shower(arrow_type: pa.DataType) -> Show | None:
    """Return the function that formats this type's physical integer as a bound; None without safe bounds."""
    if pa.types.is_signed_integer(arrow_type):
        return _integer
    if pa.types.is_date32(arrow_type):
        return _date
    if pa.types.is_timestamp(arrow_type) and arrow_type.tz == "UTC":
        return _timestamp
    return None


def has_safe_bounds(values: pa.ChunkedArray) -> bool:
    """Return True if the least and the greatest of these values can be formatted as bounds."""
    show = _shower(values.type)
    if show is None:
        return False
    if pa.types.is_signed_integer(values.type):
        return True
    numbers = values.cast(pa.int32() if pa.types.is_date32(values.type) else pa.int64())
    bounds = pc.min_max(numbers)
    least, most = bounds["min"].as_py(), bounds["max"].as_py()
    return least is None or (show(least, False) is not None and show(most, True) is not None)


def _integer(number: int, upper: bool) -> int:  # noqa: ARG001
    return number


def _date(days: int, upper: bool) -> str | None:  # noqa: ARG001
    try:
        return (_EPOCH_DAY + timedelta(days=days)).isoformat()
    except OverflowError:
        return None


def _timestamp(microseconds: int, upper: bool) -> str | None:
    """Return a timestamp as text in whole milliseconds, as some readers keep no more digits.

    It is rounded down, with `upper` up, but not past the year 9999. Returns None if the year is out of range.
    """
    outwards = -(-microseconds // 1000) * 1000 if upper else microseconds // 1000 * 1000
    if microseconds <= _LAST_MICROSECOND < outwards:
        outwards = _LAST_MICROSECOND
    try:
        moment = _EPOCH + timedelta(microseconds=outwards)
    except OverflowError:
        return None
    precision = "microseconds" if outwards % 1000 else "milliseconds"
    return moment.isoformat(timespec=precision).replace("+00:00", "Z")


def declaration(columns: Iterable[str]) -> dict[str, str]:
    """Return the table property which declares that these columns have bounds in all files."""
    return {_PROPERTY: ",".join(map(_quoted, columns))}


def declared_columns(table: DeltaTable) -> list[str] | None:
    """Return the columns that the table property declares; None for a table without the property."""
    text = table.metadata().configuration.get(_PROPERTY)
    if text is None:
        return None
    return [quoted.replace("``", "`") or plain.strip() for quoted, plain in _NAME.findall(text)]


def columns_found_bounded(table: DeltaTable) -> list[str]:
    """Return the columns that, by the log of the table, have bounds in all files or hold only nulls."""
    files = pa.table(table.get_add_actions(flatten=True))
    columns = boundable_columns(pa.schema(table.schema().to_arrow()))
    return [name for name in columns if _is_bounded(files, name)]


def _is_bounded(files: pa.Table, column: str) -> bool:
    if files.num_rows == 0:
        return True
    told = [f"{which}.{column}" for which in ("null_count", "min", "max")]
    if not set(told) <= set(files.column_names):
        return False
    nulls, least, most = (files[name] for name in told)
    is_empty = pc.fill_null(pc.equal(nulls, files["num_records"]), False)
    has_both = pc.and_(pc.is_valid(least), pc.is_valid(most))
    every = pc.all(pc.or_(is_empty, has_both)).as_py()
    return bool(every and has_safe_bounds(least) and has_safe_bounds(most))


def _quoted(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else f"`{name.replace('`', '``')}`"
