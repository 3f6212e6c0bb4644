"""The report of a check for drift, small enough for XCom, and its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.drift import DriftKind
from airflow_provider_pgrepl.replication.settings.tables import NewTables

_NEW_TABLES = {
    "add": "copied by the next snapshot",
    "ignore": "left out",
    "error": f"not replicated: {errors.add('NAME')}; or set new_tables to add or ignore",
}


@dataclass(frozen=True)
class TableDrift:
    """A table that differs from what its lake table was built for.

    `kind`: `safe` (the lake table follows with the next row) or `unsafe`. `state`: the table's state when the
    check found it; empty if it is not known. `marked_errored`: True if this check has marked it errored.
    """

    table: str
    kind: str
    reason: str
    hint: str = ""
    state: str = ""
    marked_errored: bool = False

    def to_text(self) -> str:
        lines = [f"{self.table}: {self._title()}: {self.reason}"]
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

    def _title(self) -> str:
        if self.kind != DriftKind.UNSAFE:
            return "safe"
        if self.state == "errored":
            return "unsafe, errored already"
        return "unsafe, now errored" if self.marked_errored else "unsafe"


@dataclass(frozen=True)
class DriftReport:
    """The findings of a check. `tables`: those that changed, of `checked` tables.

    `problems` and `warnings` concern the pipeline as a whole; what a warning reports may be intended.
    `new_tables`: tables that the pipeline's patterns match and that it does not have, unless it ignores them.
    """

    pipeline: str
    checked: int
    tables: tuple[TableDrift, ...] = ()
    new_tables: tuple[str, ...] = ()
    new_tables_policy: NewTables = "add"
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def unsafe(self) -> tuple[TableDrift, ...]:
        return tuple(table for table in self.tables if table.kind == DriftKind.UNSAFE)

    @property
    def is_unsafe(self) -> bool:
        """Return True if something stops, or does not conform to the pipeline's policies."""
        refused = bool(self.new_tables) and self.new_tables_policy == "error"
        return bool(self.unsafe or self.problems or refused)

    @property
    def found_anything(self) -> bool:
        return bool(self.tables or self.new_tables or self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types only."""
        fields = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        tables = tuple(TableDrift(**table) for table in fields["tables"])
        named = {name: tuple(fields.get(name, ())) for name in ("new_tables", "problems", "warnings")}
        return cls(**{**fields, "tables": tables, **named})

    def to_text(self) -> str:
        """Return text for people: a line for each table, and its remedy."""
        lines = [f"pipeline {self.pipeline}: {self._summary()}", *self.problems, *self.warnings]
        lines += [table.to_text() for table in self.tables]
        if self.new_tables:
            lines.append(f"new: {', '.join(self.new_tables)}: {_NEW_TABLES[self.new_tables_policy]}")
        return "\n".join(lines)

    def _summary(self) -> str:
        if not self.tables:
            return f"{self.checked} tables checked, none has drifted"
        return (
            f"{self.checked} tables checked, {len(self.tables)} drifted, {len(self.unsafe)} of them unsafely"
        )
