"""RowFilter: of which rows of its tables a publisher tells its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import TableName

Values = frozenset[str | None]
"""Texts as PostgreSQL writes a column's values; None is NULL."""


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


_HINT = 'give the values of its columns, as {"status": ["paid", "shipped"]}'


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
