"""The settings of a pipeline for its tables (how changes are applied) and columns (how values are stored)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, show_identifier

from .mistakes import Amount, ColumnText, Fields, Rule, Seconds, SecondsOrZero, distinct

PARTITION = "_pgrepl_partition"
"""The lake table's partition column. No column of a source table may have this name."""

UNITS = ("year", "month", "day")

_OF_UNIT = re.compile(r"(?P<unit>[^\W\d]\w*)\s*\((?P<column>.*)\)", re.DOTALL)
_QUOTED = re.compile(r'"((?:[^"]|"")+)"', re.DOTALL)
Infinity = Literal["error", "null", "sentinel"]
NumericNan = Literal["error", "null"]
Truncate = Literal["apply", "ignore", "error"]
Deletes = Literal["hard", "soft"]
OnDrift = Literal["evolve", "ignore", "error"]
OnRename = Literal["stop", "follow"]
NewTables = Literal["add", "ignore", "error"]
Merge = Literal["auto", "rewrite", "merge_on_read"]
_LAKE_TYPE = re.compile(
    r"string|decimal\((?P<precision>\d{1,2}), ?(?P<scale>\d{1,2})\)|array\((?P<dimensions>[1-6])\)"
)
_MAX_PRECISION = 38
COLUMN_FIELDS = ("types", "text_columns", "exclude_columns", "per_column")
"""The settings that name columns."""
SHAPES_COPY = Rule()
"""Marks a setting that applies from a table's next snapshot on, because it shapes the lake table."""
_TYPES_HINT = f"{errors.reference('types')}, section Choices"


@dataclass(frozen=True)
class PartitionBy:
    """The column and the unit by which a lake table is partitioned.

    `unit`: the precision (year, month or day) to which a date or time is truncated; empty: the whole value.
    """

    column: str
    unit: str = ""

    @classmethod
    def parse(cls, text: str) -> PartitionBy:
        """Parse `region`, `month(placed_at)` or, for a quoted name, `day("Placed at")`. Raises ValueError."""
        text = text.strip()
        match = _OF_UNIT.fullmatch(text)
        if match is None:
            return cls(_column(text))
        if match["unit"] not in UNITS:
            raise ValueError(f"{text!r} asks for {match['unit']!r}, which is none of {', '.join(UNITS)}")
        return cls(_column(match["column"].strip()), match["unit"])

    def __str__(self) -> str:
        """Return the text of a pipeline file."""
        shown = show_identifier(self.column)
        return f"{self.unit}({shown})" if self.unit else shown


def _column(text: str) -> str:
    quoted = _QUOTED.fullmatch(text)
    if quoted is not None:
        return quoted[1].replace('""', '"')
    if not text or any(letter in text for letter in '"()'):
        raise ValueError(f"{text!r} is not a column's name")
    return text


@dataclass(frozen=True)
class LakeType:
    """A lake type of a pipeline file: `string`, `decimal(p,s)`, or `array(n)`, an array of n dimensions."""

    name: str
    precision: int = 0
    scale: int = 0
    dimensions: int = 0

    @classmethod
    def parse(cls, text: str) -> LakeType:
        """Parse a lake type. Raises ValueError."""
        match = _LAKE_TYPE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not string, decimal(p,s), or array(n) with n from 1 to 6")
        precision, scale, dimensions = (
            int(match[name] or 0) for name in ("precision", "scale", "dimensions")
        )
        if text.startswith("decimal") and not 0 < max(precision, scale) == precision <= _MAX_PRECISION:
            raise ValueError(
                f"{text!r}: the precision is from 1 to {_MAX_PRECISION}, the scale at most as much"
            )
        return cls(text.partition("(")[0], precision, scale, dimensions)

    def __str__(self) -> str:
        """Return the text of a pipeline file."""
        return {
            "decimal": f"decimal({self.precision},{self.scale})",
            "array": f"array({self.dimensions})",
        }.get(self.name, self.name)


def _check_lake_type(text: str) -> None:
    LakeType.parse(text)


def _check_numeric(text: str) -> None:
    try:
        fits = LakeType.parse(text).name in ("string", "decimal")
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{text!r} must be string or decimal(p,s), with p to {_MAX_PRECISION}")


LakeTypeText = Annotated[str, Rule(_check_lake_type, _TYPES_HINT)]
NumericType = Annotated[str, Rule(_check_numeric, _TYPES_HINT), SHAPES_COPY]
PartitionText = Annotated[
    str,
    Rule(
        PartitionBy.parse,
        'write a column, as "region", or year, month or day of one, as "month(placed_at)"; an odd name in'
        ' quotes: "day(\\"Placed at\\")"',
    ),
]


@dataclass(frozen=True, kw_only=True)
class ValuePolicies:
    """The handling of values that a lake type cannot hold; also for single columns, in `per_column`."""

    infinity: Annotated[Infinity, SHAPES_COPY] = "error"
    """What an infinite date or timestamp becomes: `error` stops the table, `null`, or `sentinel`."""
    numeric_nan: Annotated[NumericNan, SHAPES_COPY] = "error"
    """What NaN and infinities of a numeric become where the lake type is a decimal: `error` or `null`."""


OfColumn = Annotated[dict[str, Any], Fields(ValuePolicies, "pipeline")]
ColumnValues = Annotated[dict[ColumnText, OfColumn], distinct(ColumnName.parse)]


@dataclass(frozen=True, kw_only=True)
class ColumnSettings(ValuePolicies):
    """The storage of columns in the lake."""

    types: Annotated[dict[ColumnText, LakeTypeText], distinct(ColumnName.parse)] = field(default_factory=dict)
    """The lake type of single columns: `{"public.t.c": "string"}`, see [types](types.md#choices)."""
    text_columns: tuple[ColumnText, ...] = ()
    """Columns kept as the text that PostgreSQL writes, as `public.t.c`."""
    exclude_columns: tuple[ColumnText, ...] = ()
    """Columns that are written neither to the lake table nor to the changelog; no columns of a key, see
    [types](types.md#choices).
    """
    unconstrained_numeric: NumericType = "string"
    """Lake type of `numeric` without precision: `string` or `decimal(38,s)`."""
    timestamp_without_tz: Annotated[Literal["ntz", "string"], SHAPES_COPY] = "ntz"
    """Lake type of `timestamp`: `ntz` (timestamp without time zone) or `string`, for readers that lack it."""
    per_column: ColumnValues = field(default_factory=dict)
    """`infinity`, `numeric_nan` of single columns: `{"public.t.c": {"infinity": "null"}}`."""


@dataclass(frozen=True, kw_only=True)
class ColumnOptions(ValuePolicies):
    """The settings of one column's values in the lake.

    `lake_type`: None for the default of the column's type. `unconstrained_numeric`: the lake type of numeric
    without precision.
    """

    lake_type: LakeType | None = None
    excluded: bool = False
    unconstrained_numeric: LakeType = LakeType("string")
    timestamp_without_tz: Literal["ntz", "string"] = "ntz"


@dataclass(frozen=True, kw_only=True)
class TablePolicies:
    """The policies by which changes of a table are applied; also for single tables, in `per_table`."""

    truncate: Truncate = "apply"
    """The effect of TRUNCATE: `apply` empties the lake table, `ignore` skips it, `error` stops the table."""
    deletes: Annotated[Deletes, SHAPES_COPY] = "hard"
    """Deleted rows are removed (`hard`), or stay with `_pgrepl_deleted` true (`soft`)."""
    history: Annotated[bool, SHAPES_COPY] = False
    """If true, past versions of rows are kept in a separate table, see [history](history.md)."""
    on_drift: OnDrift = "evolve"
    """The effect of a change of a table's shape: `evolve` follows safe changes, `ignore` follows them but
    leaves added columns out, `error` stops the table.
    """
    on_rename: OnRename = "stop"
    """The effect of renaming a table, or moving it to another schema: `stop` stops it, `follow` continues it
    under [the name that it had](drift.md#renamed-tables).
    """
    merge: Merge = "auto"
    """How changes are written to the files of a lake table: `rewrite`, `merge_on_read`, or `auto`, [the
    cheaper of the two](policies.md#merge-rewrite-or-on-read).
    """
    merge_interval_s: SecondsOrZero = 1.0
    """The minimum time between the starts of two merges of a table; [when a table is
    merged](policies.md#freshness-when-a-table-is-merged).
    """
    max_staleness_s: Seconds = 60.0
    """The maximum time that changes wait for a merge that the next setting delays; not less than
    `merge_interval_s`.
    """
    max_write_amplification: Amount = 20.0
    """How many bytes may be written to the lake for a byte of change, over an hour, in addition to 256 KiB a
    second; a table above that is merged less often.
    """
    cluster_by: tuple[str, ...] = ()
    """The columns by which rows are ordered when small files of a lake table are compacted, and when files
    with many deleted rows are rewritten. Columns that a table lacks are ignored; empty: by its key.
    """


@dataclass(frozen=True, kw_only=True)
class TablePolicy(TablePolicies):
    """The policies of one table."""

    partition_by: Annotated[PartitionText | None, SHAPES_COPY] = None
    """The column by which the lake table is partitioned, or `year`, `month` or `day` of one:
    `month(placed_at)`, see [partitions](policies.md#partitions-of-a-lake-table).
    """

    @property
    def partition(self) -> PartitionBy | None:
        """The parsed `partition_by`, or None. Raises ValueError."""
        return None if self.partition_by is None else PartitionBy.parse(self.partition_by)

    @property
    def follows_keys(self) -> bool:
        """True if rows that the source no longer has may stay in the lake.

        New rows may then reuse their keys, and a deleted row need not be the row whose values are kept.
        """
        return self.deletes == "soft" or self.truncate == "ignore"


@dataclass(frozen=True)
class TableOptions:
    """The settings of a pipeline for one table and its columns.

    `columns`: settings of the columns that the pipeline file names. `others`: those of all other columns.
    `named`: the values of each column of this table, by field of the pipeline file. `commit_lsn_column`,
    `commit_ts_column`: True if the lake table has this bookkeeping column.
    """

    policy: TablePolicy = TablePolicy()
    columns: Mapping[str, ColumnOptions] = field(default_factory=dict)
    others: ColumnOptions = ColumnOptions()
    named: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    commit_lsn_column: bool = True
    commit_ts_column: bool = True

    def column(self, name: str, *, is_key: bool = False) -> ColumnOptions:
        """Return the settings of a column. In a key, infinity and NaN are errors: keys must be exact."""
        choice = self.columns.get(name, self.others)
        return dataclasses.replace(choice, infinity="error", numeric_nan="error") if is_key else choice
