"""Choices of a pipeline: for a column how its values look, for a table what its changes do."""

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
"""The lake table's column. No column of a source's table may have the name."""

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
"""Fields of a pipeline file that name columns."""
VALUE_CHOICES: dict[str, Any] = {"infinity": Infinity, "numeric_nan": NumericNan}
"""What `per_column` may say of a column."""


@dataclass(frozen=True)
class PartitionBy:
    """`unit`: of dates and times, up to what they are looked at; empty: the whole value."""

    column: str
    unit: str = ""

    @classmethod
    def parse(cls, text: str) -> PartitionBy:
        """Read `region`, `month(placed_at)` or, of an odd name, `day("Placed at")`. Raises ValueError."""
        text = text.strip()
        match = _OF_UNIT.fullmatch(text)
        if match is None:
            return cls(_column(text))
        if match["unit"] not in UNITS:
            raise ValueError(f"{text!r} asks for {match['unit']!r}, which is none of {', '.join(UNITS)}")
        return cls(_column(match["column"].strip()), match["unit"])

    def __str__(self) -> str:
        """As a pipeline file has it."""
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
    """A lake type chosen by name: `string`, `decimal(p,s)`, or `array(n)` for an array of n dimensions."""

    name: str
    precision: int = 0
    scale: int = 0
    dimensions: int = 0

    @classmethod
    def parse(cls, text: str) -> LakeType:
        """Raises ValueError."""
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
        """As a pipeline file has it."""
        return {
            "decimal": f"decimal({self.precision},{self.scale})",
            "array": f"array({self.dimensions})",
        }.get(self.name, self.name)


@dataclass(frozen=True)
class ColumnChoice:
    """How the values of one column are to look in the lake.

    `lake_type` None: what the type has by itself. `infinity`: what becomes of an infinite date or time;
    `numeric_nan`: of NaN and infinity where the lake type is a decimal. `unconstrained_numeric`: the lake
    type of numeric without precision.
    """

    lake_type: LakeType | None = None
    excluded: bool = False
    infinity: Infinity = "error"
    numeric_nan: NumericNan = "error"
    unconstrained_numeric: LakeType = LakeType("string")
    timestamp_without_tz: Literal["ntz", "string"] = "ntz"


@dataclass(frozen=True)
class TablePolicy:
    """Policies: what a table's changes do in the lake.

    `truncate`: whether TRUNCATE empties the lake table, is passed over, or stops the table. `deletes`:
    whether deleted rows go, or stay and are marked. `history`: whether past versions of rows are kept in a
    table of their own. `on_drift`: whether the lake table follows a safe change of shape, follows but leaves
    added columns out, or stops. `merge`: whether a change rewrites the files that it touches, or marks rows
    in them as gone and adds a file beside them; `auto`: whichever writes less. `freshness_s`: how long after
    the last merge changes are merged at the earliest. While more than `write_amplification` bytes were
    written for a byte of change, over an hour, they may wait for `max_staleness_s`. `cluster_by`: the columns
    by which rows are ordered where files are written again, those that the table has; none: by its key.
    `partition_by`: by what the files are kept apart, as PartitionBy has it.
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
        """Raises ValueError."""
        return None if self.partition_by is None else PartitionBy.parse(self.partition_by)

    @property
    def follows_keys(self) -> bool:
        """Whether rows may stay in the lake that the source has no more: what comes takes their keys then,
        and the row that goes need not be the one whose values stay."""
        return self.deletes == "soft" or self.truncate == "ignore"


@dataclass(frozen=True)
class TableChoices:
    """What a pipeline chooses for one table: how its columns look in the lake, and what its changes do there.

    `columns`: of those that the pipeline file names; `others`: of all that it does not. `named`: by field of
    the pipeline file, what it says of which columns of this table. `commit_lsn_column`, `commit_ts_column`:
    whether the lake table has these bookkeeping columns.
    """

    policy: TablePolicy = TablePolicy()
    columns: Mapping[str, ColumnChoice] = field(default_factory=dict)
    others: ColumnChoice = ColumnChoice()
    named: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    commit_lsn_column: bool = True
    commit_ts_column: bool = True

    def column(self, name: str, *, is_key: bool = False) -> ColumnChoice:
        """How the values of a column are to look; those of a key must stay exact."""
        choice = self.columns.get(name, self.others)
        return dataclasses.replace(choice, infinity="error", numeric_nan="error") if is_key else choice


def overrides(field: str, owner: str, given: object, allowed: Mapping[str, Any]) -> dict[str, Any]:
    """Check what a pipeline says of one table or column. Raises ConfigError naming what cannot be used."""
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
"""What `per_table` may say of a table."""
