"""Statistics of data files: which columns have any, and the JSON of them that a Delta `add` action carries.

A bound may be wider than the values, never narrower: readers leave a file out by it. So types whose bounds
need rules about rounding or truncation (text, bytes, decimals, floats with NaN, timestamps without zone)
have none, and a bound that JSON readers might not take (a year that has not four digits) is left out.
Lists, structs and maps, of which Parquet counts only the parts, have none at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import ColumnProperties, WriterProperties

_EPOCH_DAY = date(1970, 1, 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Bound = int | str
Show = Callable[[int, bool], Bound | None]


def writer_properties(schema: pa.Schema, **options: Any) -> WriterProperties:
    """How deltalake is to write files of these columns: with statistics where its own have safe bounds.

    Elsewhere it would leave NaN out, round decimals and cut their digits, and put whole texts into the log.
    """
    with_bounds = ColumnProperties(statistics_enabled="CHUNK")
    return WriterProperties(
        default_column_properties=ColumnProperties(statistics_enabled="NONE"),
        column_properties={field.name: with_bounds for field in schema if _shower(field.type)},
        **options,
    )


def columns_with_statistics(schema: pa.Schema) -> list[str]:
    """The columns of which Parquet files written by pyarrow have statistics.

    Those of floats would leave NaN out, which is the greatest of all for the readers that skip by them.
    """
    return [
        field.name
        for field in schema
        if not pa.types.is_nested(field.type) and not pa.types.is_floating(field.type)
    ]


def delta_statistics(metadata: pq.FileMetaData, schema: pa.Schema) -> str:
    """`numRecords`; `nullCount` where there are statistics; `minValues`, `maxValues` where these are safe."""
    least: dict[str, Bound] = {}
    most: dict[str, Bound] = {}
    nulls: dict[str, int] = {}
    places = _places(metadata)
    for field in schema:
        if pa.types.is_nested(field.type):
            continue
        index = places[field.name]
        groups = [
            metadata.row_group(group).column(index).statistics for group in range(metadata.num_row_groups)
        ]
        if any(group is None or not group.has_null_count for group in groups):
            continue
        nulls[field.name] = sum(group.null_count for group in groups)
        show = _shower(field.type)
        bounds = _bounds(groups, show) if show else None
        if bounds:
            least[field.name], most[field.name] = bounds
    statistics = {"numRecords": metadata.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}
    return json.dumps(statistics, separators=(",", ":"))


def _places(metadata: pq.FileMetaData) -> dict[str, int]:
    """Where Parquet has each plain column: a nested one takes as many places as it has leaves."""
    columns = (metadata.schema.column(index) for index in range(metadata.num_columns))
    # A leaf's path joins names by dots, which a plain column's name may hold as well.
    return {column.name: index for index, column in enumerate(columns) if column.path == column.name}


def _bounds(groups: list[Any], show: Show) -> tuple[Bound, Bound] | None:
    """Least and greatest over the row groups; None when some group with values has none to tell."""
    filled = [group for group in groups if group.num_values]
    if not filled or not all(group.has_min_max for group in filled):
        return None
    least = show(min(group.min_raw for group in filled), False)
    most = show(max(group.max_raw for group in filled), True)
    return None if least is None or most is None else (least, most)


def _shower(arrow_type: pa.DataType) -> Show | None:
    """How to write a bound of this type's physical integer; None when the type has no safe bounds."""
    if pa.types.is_signed_integer(arrow_type):
        return _integer
    if pa.types.is_date32(arrow_type):
        return _date
    if pa.types.is_timestamp(arrow_type) and arrow_type.tz == "UTC":
        return _timestamp
    return None


def _integer(number: int, upper: bool) -> int:  # noqa: ARG001
    return number


def _date(days: int, upper: bool) -> str | None:  # noqa: ARG001
    try:
        return (_EPOCH_DAY + timedelta(days=days)).isoformat()
    except OverflowError:
        return None


def _timestamp(microseconds: int, upper: bool) -> str | None:
    """Whole milliseconds, which is all that some readers keep: rounded outwards."""
    milliseconds = -(-microseconds // 1000) if upper else microseconds // 1000
    try:
        moment = _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
