"""The settings of a pipeline for its tables (how changes are applied) and columns (how values are stored)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import show_identifier
from airflow_provider_pgrepl.replication.settings.fields import describe, is_of

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
NewTables = Literal["add", "ignore", "error"]
Merge = Literal["auto", "rewrite", "merge_on_read"]
_LAKE_TYPE = re.compile(
    r"string|decimal\((?P<precision>\d{1,2}), ?(?P<scale>\d{1,2})\)|array\((?P<dimensions>[1-6])\)"
)
_MAX_PRECISION = 38
COLUMN_FIELDS = ("types", "text_columns", "exclude_columns", "per_column")
"""The fields of a pipeline file that name columns."""
VALUE_CHOICES: dict[str, Any] = {"infinity": Infinity, "numeric_nan": NumericNan}
"""The settings that `per_column` may have, and their types."""


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


@dataclass(frozen=True)
class ColumnChoice:
    """The settings of one column's values in the lake.

    `lake_type`: None for the default of the column's type. `infinity`: handling of an infinite date or
    timestamp. `numeric_nan`: handling of NaN and infinity if the lake type is a decimal.
    `unconstrained_numeric`: the lake type of numeric without precision.
    """

    lake_type: LakeType | None = None
    excluded: bool = False
    infinity: Infinity = "error"
    numeric_nan: NumericNan = "error"
    unconstrained_numeric: LakeType = LakeType("string")
    timestamp_without_tz: Literal["ntz", "string"] = "ntz"


@dataclass(frozen=True)
class TablePolicy:
    """The settings that determine how a table's changes are applied to the lake.

    - `truncate`: a TRUNCATE empties the lake table (`apply`), is ignored, or stops the table (`error`).
    - `deletes`: deleted rows are removed (`hard`), or kept and marked (`soft`).
    - `history`: keep past versions of rows in a separate table.
    - `on_drift`: the lake table follows a safe change of shape (`evolve`), follows it but leaves out added
      columns (`ignore`), or stops (`error`).
    - `merge`: a change rewrites the affected files (`rewrite`), or marks rows in them as deleted and adds a
      new file (`merge_on_read`); `auto` uses the one that writes less.
    - `freshness_s`: minimum seconds between two merges.
    - `write_amplification`: bytes that merges may write for each byte of change, over 1 hour. Above that,
      changes wait for at most `max_staleness_s` seconds.
    - `cluster_by`: columns by which rows are sorted when files are rewritten; columns that the table lacks
      are ignored. Default: the key.
    - `partition_by`: the partitioning, as PartitionBy parses it.
    """

    truncate: Truncate = "apply"
    deletes: Deletes = "hard"
    history: bool = False
    on_drift: OnDrift = "evolve"
    merge: Merge = "auto"
    freshness_s: float = 1.0
    max_staleness_s: float = 60.0
    write_amplification: float = 20.0
    cluster_by: tuple[str, ...] = ()
    partition_by: str | None = None

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
class TableChoices:
    """The settings of a pipeline for one table and its columns.

    `columns`: settings of the columns that the pipeline file names. `others`: those of all other columns.
    `named`: the values of each column of this table, by field of the pipeline file. `commit_lsn_column`,
    `commit_ts_column`: True if the lake table has this bookkeeping column.
    """

    policy: TablePolicy = TablePolicy()
    columns: Mapping[str, ColumnChoice] = field(default_factory=dict)
    others: ColumnChoice = ColumnChoice()
    named: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    commit_lsn_column: bool = True
    commit_ts_column: bool = True

    def column(self, name: str, *, is_key: bool = False) -> ColumnChoice:
        """Return the settings of a column. In a key, infinity and NaN are errors: keys must be exact."""
        choice = self.columns.get(name, self.others)
        return dataclasses.replace(choice, infinity="error", numeric_nan="error") if is_key else choice


def overrides(field: str, owner: str, given: object, allowed: Mapping[str, Any]) -> dict[str, Any]:
    """Check and return the settings of a table or column. Raises ConfigError, naming the invalid setting."""
    if not isinstance(given, dict):
        raise ConfigError(f"{field}: {owner} must be given an object, as {{{', '.join(allowed)}}}")
    for key, value in given.items():
        if key not in allowed:
            raise ConfigError(f"{field}: {owner} has unknown key {key!r}", errors.known_keys([key], allowed))
        if not is_of(value, allowed[key]):
            raise ConfigError(f"{field}: {key} of {owner}: {value!r} must be {describe(allowed[key])}")
    return given


POLICIES: dict[str, Any] = {
    field.name: get_type_hints(TablePolicy)[field.name] for field in dataclasses.fields(TablePolicy)
}
"""The settings that `per_table` may have, and their types."""
