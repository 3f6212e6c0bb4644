"""The positions that publishers report every few seconds. Their own records are in the lake."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source.connection import rows
from airflow_provider_pgrepl.replication.state.connection import StateConnection, state_errors

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
