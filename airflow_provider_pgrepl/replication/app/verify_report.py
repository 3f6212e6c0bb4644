"""The report of a verification, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from airflow_provider_pgrepl.replication.lake.verify.comparison import NotCompared, TableComparison
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName

WHOLE = "table"
Status = Literal["equal", "sample_equal", "repaired", "different", "not_compared"]


@dataclass(frozen=True)
class TableReport:
    """The result for one table.

    `parts`: what was not compared, and why. `verified_through`: the last LSN that the compared rows include.
    `verified_at`: when the source's snapshot was exported. `repaired_version`: the version of the lake table
    that repaired the differences. `not_repaired`: why a repair was refused or failed; empty without one.
    """

    table: TableName
    status: Status
    parts: Sequence[NotCompared] = ()
    comparison: TableComparison | None = None
    verified_through: LSN | None = None
    verified_at: datetime | None = None
    repaired_version: int | None = None
    not_repaired: str = ""

    @classmethod
    def of(
        cls,
        table: TableName,
        comparison: TableComparison,
        parts: Sequence[NotCompared],
        through: LSN,
        at: datetime,
    ) -> TableReport:
        return cls(table, comparison.status, parts, comparison, through, at)

    @classmethod
    def not_compared(cls, table: TableName, reason: str) -> TableReport:
        return cls(table, "not_compared", (NotCompared(WHOLE, reason),))

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs. No value of a row is in it but the keys that were asked for."""
        found: dict[str, Any] = {
            "table": str(self.table),
            "status": self.status,
            "not_compared": [{"part": part.part, "reason": part.reason} for part in self.parts],
        }
        if self.comparison is None:
            return found
        compared, differences = self.comparison, self.comparison.differences
        found |= {
            "verified_through": str(self.verified_through),
            "verified_at": None if self.verified_at is None else self.verified_at.isoformat(),
            **_counts(compared),
            "missing": differences.missing,
            "extra": differences.extra,
            "changed": differences.changed,
            "different_columns": dict(sorted(differences.columns.items())),
        }
        if self.repaired_version is not None:
            found["repaired_version"] = self.repaired_version
        if self.not_repaired:
            found["not_repaired"] = self.not_repaired
        for name in ("missing_keys", "extra_keys", "changed_keys"):
            if keys := getattr(differences, name):
                found[name] = keys
        return found

    def to_text(self) -> str:
        """Return the report for people."""
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        if self.comparison is None:
            return [f"{self.table}: not compared: {self.parts[0].reason}"]
        compared, differences = self.comparison, self.comparison.differences
        if self.status == "sample_equal":
            head = f"{self.table}: sample equal at {self.verified_through}: {compared.source_rows:,} rows"
        elif compared.sampled_rows is not None:
            head = (
                f"{self.table}: different at {self.verified_through}: of {compared.sampled_rows:,} rows of"
                f" the source, {differences.missing:,} missing, {differences.changed:,} changed"
            )
        elif self.status == "equal":
            head = f"{self.table}: equal through {self.verified_through}: {compared.source_rows:,} rows"
        elif self.status == "repaired":
            head = (
                f"{self.table}: repaired through {self.verified_through}, in version {self.repaired_version}:"
                f" {differences.missing:,} missing, {differences.extra:,} extra, {differences.changed:,}"
                f" changed; compared again, equal: {compared.source_rows:,} rows"
            )
        else:
            head = (
                f"{self.table}: different at {self.verified_through}: {compared.source_rows:,} rows at the"
                f" source, {compared.lake_rows:,} in the lake; {differences.missing:,} missing,"
                f" {differences.extra:,} extra, {differences.changed:,} changed"
            )
        lines = [head]
        if self.not_repaired:
            lines.append(f"  not repaired: {self.not_repaired}")
        if left := compared.differing_ranges - compared.listed_ranges:
            lines.append(f"  {left:,} differing ranges have more rows than are compared one by one")
        lines += [f"  column {name}: {rows:,} rows" for name, rows in sorted(differences.columns.items())]
        for kind in ("missing", "extra", "changed"):
            lines += [f"  {kind}: {_key(key)}" for key in getattr(differences, f"{kind}_keys")]
        return lines + [f"  not compared: {part.part}: {part.reason}" for part in self.parts]


def _counts(compared: TableComparison) -> dict[str, int]:
    if compared.sampled_rows is not None:
        return {"sampled_rows": compared.sampled_rows}
    return {
        "source_rows": compared.source_rows,
        "lake_rows": compared.lake_rows,
        "ranges": compared.ranges,
        "differing_ranges": compared.differing_ranges,
        "listed_ranges": compared.listed_ranges,
    }


def _key(key: Sequence[str | None]) -> str:
    return ", ".join("NULL" if value is None else value for value in key)


@dataclass
class VerifyReport:
    """The results of one run, by table."""

    pipeline: str
    tables: dict[TableName, TableReport] = field(default_factory=dict)

    def add(self, table: TableReport) -> None:
        self.tables[table.table] = table

    def to_json(self) -> dict[str, Any]:
        tables = [self.tables[table].to_json() for table in sorted(self.tables)]
        return {"pipeline": self.pipeline, "tables": tables}

    def to_text(self) -> str:
        return "\n".join(self.tables[table].to_text() for table in sorted(self.tables))
