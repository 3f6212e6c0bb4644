"""Statistics of data files: which columns have any, and the JSON of them that a Delta `add` action carries.

A bound may be wider than the values, never narrower: readers leave a file out by it. So types whose bounds
need rules about rounding or truncation (text, bytes, decimals, floats with NaN, timestamps without zone)
have none, and a moment whose year has not four digits, which not every reader's JSON takes, gives none.

Of which columns all files of a lake table have bounds: a table property says it.
Readers that go through deltalake's Arrow dataset take a column that may have bounds, and has none in a file,
for one that no condition holds of there, and lose its rows; the property tells them which may have. It
names only columns that were there, with bounds in every file, when the files were written as a whole: an
added column has none in the files from before it, and one that gets a value without bounds leaves the list.
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
"""Of how many columns a table has bounds at most: each costs every entry of its log some bytes."""

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
    """The columns that may have bounds, in the schema's order: our own, and the first of the table's."""
    names = [field.name for field in schema if _shower(field.type)]
    first = set(islice(sorted(names, key=lambda name: not name.startswith(_OWN)), MOST_COLUMNS))
    return [name for name in names if name in first]


def writer_properties(bounded: Iterable[str], **options: Any) -> WriterProperties:
    """How deltalake is to write files: with statistics of these columns, where its own have safe bounds.

    Elsewhere it would leave NaN out, round decimals and cut their digits, put whole texts into the log, and
    end in a panic at a year that it cannot write.
    """
    with_bounds = ColumnProperties(statistics_enabled="CHUNK")
    return WriterProperties(
        default_column_properties=ColumnProperties(statistics_enabled="NONE"),
        column_properties=dict.fromkeys(bounded, with_bounds),
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
    """`numRecords`; and of the columns that may have bounds `nullCount`, and `minValues`, `maxValues`."""
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
    """The columns of which each file's `delta_statistics` have bounds, or say that they hold nothing."""
    files = [json.loads(text) for text in statistics]
    return [name for name in boundable_columns(schema) if all(_tells(file, name) for file in files)]


def _tells(file: Mapping[str, Any], name: str) -> bool:
    is_empty = file.get("nullCount", {}).get(name) == file["numRecords"]
    return name in file.get("minValues", {}) or is_empty


def column_places(metadata: pq.FileMetaData) -> dict[str, int]:
    """Where Parquet has each plain column: a nested one takes as many places as it has leaves."""
    columns = (metadata.schema.column(index) for index in range(metadata.num_columns))
    # A leaf's path joins names by dots, which a plain column's name may hold as well.
    return {column.name: index for index, column in enumerate(columns) if column.path == column.name}


def _bounds(groups: list[Any], arrow_type: pa.DataType) -> tuple[Bound, Bound] | None:
    """Least and greatest over the row groups; None when some group with values has none to tell."""
    show, filled = _shower(arrow_type), [group for group in groups if group.num_values]
    if show is None or not filled or not all(group.has_min_max for group in filled):
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


def has_safe_bounds(values: pa.ChunkedArray) -> bool:
    """Whether the least and the greatest of these values can be written."""
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
    """Whole milliseconds, which is all that some readers keep: rounded outwards, but into no fifth digit."""
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
    """The property, for a table of which these columns have bounds in all files."""
    return {_PROPERTY: ",".join(map(_quoted, columns))}


def declared_columns(table: DeltaTable) -> list[str] | None:
    """What the property says; None for a table that has it not."""
    text = table.metadata().configuration.get(_PROPERTY)
    if text is None:
        return None
    return [quoted.replace("``", "`") or plain.strip() for quoted, plain in _NAME.findall(text)]


def columns_found_bounded(table: DeltaTable) -> list[str]:
    """The columns of which the log of a table has bounds for all files."""
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
