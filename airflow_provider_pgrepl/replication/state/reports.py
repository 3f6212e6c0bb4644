"""Reports that are recorded every few seconds: progress of the copies of tables while a snapshot copies them,
and positions of publishers, whose own records are in the lake.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.quantities import show_duration, show_number
from airflow_provider_pgrepl.replication.source.connection import rows

from .connection import StateConnection, state_errors

_WRITE = """
INSERT INTO _pgrepl.publishers AS p (pipeline, name, target, tables, published_lsn, stopped, holder)
SELECT name, %(name)s, %(target)s, %(tables)s, %(lsn)s, %(stopped)s, %(holder)s
FROM _pgrepl.pipelines WHERE name = %(pipeline)s
ON CONFLICT (pipeline, name) DO UPDATE SET target = excluded.target, tables = excluded.tables,
    published_lsn = excluded.published_lsn, stopped = excluded.stopped, holder = excluded.holder,
    updated_at = now()
RETURNING 1
"""
REPORTS = """
SELECT name, target, tables, published_lsn::text, stopped, holder, updated_at
FROM _pgrepl.publishers WHERE pipeline = %(pipeline)s ORDER BY name
"""
_SILENT_S = 60.0
"""The age in seconds from which a report is shown as old. An app that copies writes one every few
seconds."""
# A copy that has ended in the meantime has another state, and its progress was deleted with that change.
_RECORD = """
UPDATE _pgrepl.tables t
SET copying = known.progress || pg_catalog.jsonb_build_object('reported_at', now())
FROM ROWS FROM (pg_catalog.unnest(%(schemas)s::text[]), pg_catalog.unnest(%(tables)s::text[]),
    pg_catalog.unnest(%(progress)s::jsonb[])) AS known (schema_name, table_name, progress)
WHERE t.pipeline = %(pipeline)s AND t.state = 'snapshotting'
    AND (t.schema_name, t.table_name) = (known.schema_name, known.table_name)
RETURNING 1
"""


@dataclass(frozen=True)
class StoppedEvents:
    """A table whose events a publisher does not send.

    `names`: the names that the table has had. `after`: the position of the last event before it stopped.
    """

    names: tuple[str, ...]
    after: str
    error: str
    reason: str
    hint: str


@dataclass(frozen=True)
class PublisherReport:
    """The last report of a publisher.

    Everything that committed at or before `published_lsn` is published, except for `stopped` tables.
    `tables`: the names and patterns that the publisher sends, None for all.
    """

    name: str
    target: str
    tables: tuple[str, ...] | None
    published_lsn: LSN
    stopped: tuple[StoppedEvents, ...]
    holder: str
    updated_at: datetime | None = None


class PublisherReports(StateConnection):
    """The reports of publishers."""

    def write_publisher(self, pipeline: str, report: PublisherReport) -> None:
        """Record a report at the present time. Does nothing if the pipeline is not recorded."""
        fields = {
            "pipeline": pipeline,
            "name": report.name,
            "target": report.target,
            "tables": None if report.tables is None else json.dumps(report.tables),
            "lsn": str(report.published_lsn),
            "stopped": json.dumps([vars(one) for one in report.stopped]),
            "holder": report.holder,
        }
        with state_errors("recording a publisher"):
            rows(self._connection, _WRITE, fields)


def publisher_report(fields: Sequence[Any]) -> PublisherReport:
    """Return the report in a row of REPORTS."""
    name, target, tables, lsn, stopped, holder, updated_at = fields
    return PublisherReport(
        name,
        target,
        None if tables is None else tuple(tables),
        LSN.parse(lsn),
        tuple(StoppedEvents(**{**one, "names": tuple(one["names"])}) for one in stopped),
        holder,
        updated_at,
    )


@dataclass(frozen=True)
class CopyProgress:
    """The progress of the copy of a table, counted in finished ranges.

    `expected`: the planner's estimate of the table's rows, None if the source has none (ANALYZE has not run)
    or a row filter applies. `bytes`: the size of the finished ranges at the source, of `total_bytes`.
    `rows_per_s` and `seconds_left`: None before the first range is finished. `reported_at`: None if it is not
    recorded.
    """

    rows: int
    expected: int | None
    bytes: int
    total_bytes: int
    rows_per_s: float | None = None
    seconds_left: float | None = None
    reported_at: datetime | None = None

    def to_text(self) -> str:
        """Return a phrase for people, as `1.2 M of 5 M rows, 250 k/s, 15 s left`."""
        # The estimate may be too low. Then it says nothing about the end, unlike the bytes.
        of = f" of {show_number(self.expected)}" if self.expected and self.expected >= self.rows else ""
        parts = [f"{show_number(self.rows)}{of} rows"]
        if self.expected is None and self.total_bytes:
            parts[0] += f" (total unknown), {100 * self.bytes // self.total_bytes} % of the bytes"
        if (age := self._age_s()) > _SILENT_S:
            return ", ".join([*parts, f"no report for {show_duration(age)}"])
        if self.rows_per_s is not None:
            parts.append(f"{show_number(self.rows_per_s)}/s")
        if self.seconds_left is not None:
            parts.append(f"{_show_seconds(self.seconds_left)} left")
        return ", ".join(parts)

    def _age_s(self) -> float:
        return 0.0 if self.reported_at is None else (datetime.now(UTC) - self.reported_at).total_seconds()


def _show_seconds(seconds: float) -> str:
    # An estimate has no tenths of a second.
    return f"{seconds:.0f} s" if seconds < 60 else show_duration(seconds)


def read_copy_progress(state: str, recorded: Mapping[str, Any] | None) -> CopyProgress | None:
    """Return the recorded progress of a table that is being copied, None for other tables."""
    if recorded is None or state != "snapshotting":
        return None
    reported_at = datetime.fromisoformat(recorded["reported_at"])
    return CopyProgress(**{**recorded, "reported_at": reported_at})


class CopyRecords(StateConnection):
    """The recorded progress of copies."""

    def record_copies(self, pipeline: str, copies: Mapping[TableName, CopyProgress]) -> None:
        """Record the progress of tables, in one statement. Tables that are not `snapshotting` are left
        out."""
        fields = {
            "pipeline": pipeline,
            "schemas": [table.schema for table in copies],
            "tables": [table.name for table in copies],
            "progress": [_to_json(progress) for progress in copies.values()],
        }
        with state_errors("recording the progress of copies"):
            rows(self._connection, _RECORD, fields)


def _to_json(progress: CopyProgress) -> str:
    return json.dumps({name: value for name, value in asdict(progress).items() if name != "reported_at"})
