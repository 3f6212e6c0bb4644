"""Types of settings that have a rule: quantities with limits, names of tables and columns, texts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Annotated, Any

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.settings.mistakes import Rule

_QUOTED = re.compile(r'"[^"]*"')
_TABLE_HINT = 'schema.table, or "Quoted"."Names"'
COLUMN_HINT = "name a column as schema.table.column"


def between(*, above: float | None = None, least: float | None = None, most: float | None = None) -> Rule:
    """Return the rule of a number's limits. NaN and infinities are always invalid."""
    limits = {"exclusiveMinimum": above, "minimum": least, "maximum": most}

    def check(value: float) -> None:
        if most is not None and value > most:
            raise ValueError(f"must not be more than {most}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
        if above is not None and value <= above:
            raise ValueError(f"{value} must be greater than {above}")
        if least is not None and value < least:
            raise ValueError(f"{value} must not be negative")

    return Rule(check, keywords={name: limit for name, limit in limits.items() if limit is not None})


def matching(pattern: str, problem: str, hint: str = "") -> Rule:
    """Return the rule of a text that a regular expression matches as a whole."""
    expression = re.compile(pattern)

    def check(text: str) -> None:
        if not expression.fullmatch(text):
            raise ValueError(f"{text!r} {problem}")

    return Rule(check, hint, {"pattern": f"^(?:{pattern})$"})


def filled(hint: str, problem: str = "is empty") -> Rule:
    """Return the rule that a text, a list or an object is not empty."""

    def check(value: Any) -> None:
        if not value:
            raise ValueError(problem)

    return Rule(check, hint)


def distinct(parse: Callable[[str], Hashable]) -> Rule:
    """Return the rule that no two keys of an object are spellings of one name."""

    def check(given: Mapping[str, Any]) -> None:
        first: dict[Hashable, str] = {}
        for name in given:
            try:
                parsed = parse(name)
            except ValueError:  # reported for the key itself
                continue
            if (other := first.setdefault(parsed, name)) != name:
                raise ConfigError(f"{other} and {name} are the same", "take one out")

    return Rule(check)


def _check_table(text: str) -> None:
    if "*" in _QUOTED.sub("", text):
        raise ValueError(f"{text!r} has a * where none may be")
    TableName.parse(text)


def _check_pattern(text: str) -> None:
    _check_table(f"{text[:-1]}any" if text.endswith(".*") else text)


# A hundred years, and other limits below which dates and floats are exact.
Hours = Annotated[float, between(above=0, most=876_000)]
Seconds = Annotated[float, between(above=0, most=1_000_000_000)]
SecondsOrZero = Annotated[float, between(least=0, most=1_000_000_000)]
Amount = Annotated[float, between(above=0, most=2**53)]
Size = Annotated[int, between(above=0, most=2**53)]

TABLE = Rule(_check_table, _TABLE_HINT)
TableText = Annotated[str, TABLE]
TablePattern = Annotated[str, Rule(_check_pattern, f"{_TABLE_HINT}, or schema.* for all tables of a schema")]
ColumnText = Annotated[str, Rule(ColumnName.parse, COLUMN_HINT)]
