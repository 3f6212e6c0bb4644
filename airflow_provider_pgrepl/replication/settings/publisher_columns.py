"""ColumnRules: which columns a publisher's target gets otherwise than the source has them, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName

HINT = "name a column as schema.table.column"
_MOST_BYTES = 255
"""Of a new name: PostgreSQL's own have 63 at most."""
Values = frozenset[str | None]
"""Texts as PostgreSQL writes a column's values; None is NULL."""
_HINT = 'give the values of its columns, as {"status": ["paid", "shipped"]}'


@dataclass(frozen=True)
class ColumnRules:
    """`excluded` are not sent; of `hashed` a hash is, of `masked` always the same; `renamed`: by which names.

    Raises ConfigError for a column of which two of the first three are said, and for a new name that is
    given to two columns of a table.
    """

    excluded: frozenset[ColumnName] = frozenset()
    hashed: frozenset[ColumnName] = frozenset()
    masked: frozenset[ColumnName] = frozenset()
    renamed: Mapping[ColumnName, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for (one, columns), (other, more) in combinations(self._by_field.items(), 2):
            # What is hashed or masked may have another name besides.
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
        """Of a publisher's settings. Raises ConfigError, which names the setting."""
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
        """Every column that is named."""
        return frozenset().union(*self._by_field.values())

    def tables(self) -> frozenset[TableName]:
        """Whose columns are named."""
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
    """By table and by column, which values its rows have that are told of: in all these columns."""

    tables: Mapping[TableName, Mapping[str, Values]] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> RowFilter:
        """Of a publisher's settings. Raises ConfigError."""
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
