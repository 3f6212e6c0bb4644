"""The rules of a publisher for columns (excluded, hashed, masked, renamed) and the filter for rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName

HINT = "name a column as schema.table.column"
_MOST_BYTES = 255
"""The maximum size of a new column name. PostgreSQL's own names have at most 63 bytes."""
Values = frozenset[str | None]
"""Text values as PostgreSQL writes them; None is NULL."""
_HINT = 'give the values of its columns, as {"status": ["paid", "shipped"]}'


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
        for given, name in rename_columns.items():
            if not _is_name(name):
                raise ConfigError(
                    f"rename_columns: {given}: {name!r} is no name of a column",
                    f"give a string of at most {_MOST_BYTES} bytes",
                )
        renamed = {_column("rename_columns", given): name for given, name in rename_columns.items()}
        if len(renamed) < len(rename_columns):
            raise ConfigError("rename_columns: a column is named twice, written in two ways")
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


def _is_name(name: object) -> bool:
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    try:
        return len(name.encode()) <= _MOST_BYTES
    except UnicodeEncodeError:
        return False


def _parse(name: str, given: Iterable[str]) -> frozenset[ColumnName]:
    return frozenset(_column(name, column) for column in given)


def _column(name: str, given: str) -> ColumnName:
    try:
        return ColumnName.parse(given)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}", HINT) from None


@dataclass(frozen=True)
class RowFilter:
    """A filter of rows: the allowed values, by table and column.

    A row is published if each of these columns has an allowed value.
    """

    tables: Mapping[TableName, Mapping[str, Values]] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> RowFilter:
        """Create the filter from a publisher's settings. Raises ConfigError."""
        found: dict[TableName, Mapping[str, Values]] = {}
        for name, columns in given.items():
            try:
                table = TableName.parse(name)
            except ValueError as error:
                raise ConfigError(f"row_filter: {error}") from None
            if table in found:
                raise ConfigError(f"row_filter: {table} is named twice, written in two ways")
            if not isinstance(columns, Mapping) or not columns:
                raise ConfigError(f"row_filter: {name} must be an object", _HINT)
            found[table] = {
                column: _values(f"row_filter: {name}: {column}", one) for column, one in columns.items()
            }
        return cls(found)


def _values(where: str, given: object) -> Values:
    several = given if isinstance(given, list | tuple) else [given]
    if not several:
        raise ConfigError(f"{where}: no value is given: no row would be sent", _HINT)
    return frozenset(_text(where, one) for one in several)


def _text(where: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, int):
        return str(value)
    raise ConfigError(
        f"{where}: {value!r} is neither a string, a whole number, true, false nor null",
        "give another value as a string, as PostgreSQL writes it: '12.50'",
    )
