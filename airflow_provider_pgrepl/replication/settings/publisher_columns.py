"""The rules of a publisher for columns (excluded, hashed, masked, renamed) and the filter for rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Annotated

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.settings.mistakes import Rule
from airflow_provider_pgrepl.replication.settings.rules import COLUMN_HINT, filled

_MOST_BYTES = 255
"""The maximum size of a new column name. PostgreSQL's own names have at most 63 bytes."""
Values = frozenset[str | None]
"""Text values as PostgreSQL writes them; None is NULL."""


def _check_name(name: str) -> None:
    if not name or "\0" in name or len(name.encode(errors="surrogatepass")) > _MOST_BYTES:
        raise ValueError(f"{name!r} is no name of a column")


_ROWS_HINT = 'give the values of its columns, as {"status": ["paid", "shipped"]}'
_VALUE_HINT = Rule(hint="give another value as a string, as PostgreSQL writes it: '12.50'")
_Value = str | int | bool | None
NewName = Annotated[str, Rule(_check_name, f"give a string of at most {_MOST_BYTES} bytes")]
"""A setting's type: the new name of a column."""
OfRows = Annotated[
    dict[
        str,
        Annotated[
            _Value
            | Annotated[tuple[_Value, ...], filled(_ROWS_HINT, "no value is given: no row would be sent")],
            _VALUE_HINT,
        ],
    ],
    filled(_ROWS_HINT, "names no column"),
]
"""A setting's type: the allowed values of a table's columns."""


@dataclass(frozen=True)
class ColumnRules:
    """The rules of a publisher for columns.

    `excluded`: not published. `hashed`: published as a hash. `masked`: published as a constant. `renamed`:
    the new names. Raises ConfigError for a column in two of the first three, for an excluded column that is
    renamed, and if two columns of a table get the same new name.
    """

    excluded: frozenset[ColumnName] = frozenset()
    hashed: frozenset[ColumnName] = frozenset()
    masked: frozenset[ColumnName] = frozenset()
    renamed: Mapping[ColumnName, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for (one, columns), (other, more) in combinations(self._by_field.items(), 2):
            # A hashed or masked column may also be renamed.
            is_both = other == "rename_columns" and one != "exclude_columns"
            if not is_both and (twice := sorted(columns & more)):
                raise ConfigError(f"{twice[0]} is named by {one} and by {other}", "choose one of them")
        given = [(column.table, name) for column, name in self.renamed.items()]
        if alike := sorted({pair for pair in given if given.count(pair) > 1}):
            table, name = alike[0]
            raise ConfigError(f"rename_columns: two columns of {table} are to be called {name!r}")

    @classmethod
    def parse(
        cls,
        exclude_columns: Iterable[str],
        hash_columns: Iterable[str],
        mask_columns: Iterable[str],
        rename_columns: Mapping[str, str],
    ) -> ColumnRules:
        """Create the rules from a publisher's settings. Raises ConfigError, naming the setting."""
        renamed = {_column("rename_columns", given): name for given, name in rename_columns.items()}
        return cls(
            _parse("exclude_columns", exclude_columns),
            _parse("hash_columns", hash_columns),
            _parse("mask_columns", mask_columns),
            renamed,
        )

    @cached_property
    def all(self) -> frozenset[ColumnName]:
        """Every column that has a rule."""
        return frozenset().union(*self._by_field.values())

    def tables(self) -> frozenset[TableName]:
        """Return the tables that have a column with a rule."""
        return frozenset(column.table for column in self.all)

    @property
    def _by_field(self) -> dict[str, frozenset[ColumnName]]:
        return {
            "exclude_columns": self.excluded,
            "hash_columns": self.hashed,
            "mask_columns": self.masked,
            "rename_columns": frozenset(self.renamed),
        }


def _parse(name: str, given: Iterable[str]) -> frozenset[ColumnName]:
    return frozenset(_column(name, column) for column in given)


def _column(name: str, given: str) -> ColumnName:
    try:
        return ColumnName.parse(given)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}", COLUMN_HINT) from None


@dataclass(frozen=True)
class RowFilter:
    """A filter of rows: the allowed values, by table and column.

    A row is published if each of these columns has an allowed value.
    """

    tables: Mapping[TableName, Mapping[str, Values]] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Mapping[str, Mapping[str, object]]) -> RowFilter:
        """Create the filter from a publisher's settings. Raises ValueError for a name that is not valid."""
        return cls(
            {
                TableName.parse(name): {column: _values(one) for column, one in columns.items()}
                for name, columns in given.items()
            }
        )


def _values(given: object) -> Values:
    return frozenset(map(_text, given if isinstance(given, list | tuple) else [given]))


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return ("f", "t")[value] if isinstance(value, bool) else str(value)
