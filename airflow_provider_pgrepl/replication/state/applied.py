"""The recorded part of the source's transactions that the lake shows, and the tables that show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.connection import rows

from .connection import StateConnection, state_errors

# The progress is read before the tables: one that streams now did so then, too, unless its `since` is later.
_PROGRESS = """
SELECT applied_lsn::text, applied_commit_ts, complete_at, table_merges FROM _pgrepl.progress
WHERE pipeline = %s
"""
_TABLES = """
SELECT schema_name, table_name, state, position_lsn::text, since FROM _pgrepl.tables WHERE pipeline = %s
"""


@dataclass(frozen=True)
class AppliedTable:
    """A table of a pipeline. `position`: the LSN of its last known merge, or of its snapshot, whichever is
    later; 0 if it was never copied. `since`: the time from which it has the state, None if not known."""

    state: str
    position: LSN
    since: datetime | None = None

    @property
    def is_streaming(self) -> bool:
        """Return True if each point that is made from now on has the table."""
        return self.state == "streaming"


@dataclass(frozen=True)
class Applied:
    """The progress of a pipeline, also while none of its apps runs.

    `lsn`: the newest consistent point, 0 if no app has recorded one, and `commit_time` that of its last
    transaction, if known. `complete_at`: every transaction whose commit record was in the WAL of the source
    at that time, by the clock of the source, is in each table that was streaming then. `tables`: without
    removed ones.
    """

    lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    commit_time: datetime | None = None
    complete_at: datetime | None = None
    tables: Mapping[TableName, AppliedTable] = field(default_factory=dict)


class AppliedRecords(StateConnection):
    """The recorded progress of pipelines, as consumers of their lakes read it."""

    def read_applied(self, pipeline: str) -> Applied:
        """Return the recorded progress. Raises StateError if the schema is missing or of an older version."""
        with state_errors("reading what is applied"):
            progress = rows(self._connection, _PROGRESS, (pipeline,))
            tables = rows(self._connection, _TABLES, (pipeline,))
        lsn, commit_time, complete_at, merges = progress[0] if progress else ("0/0", None, None, {})
        found = {}
        for schema, name, state, copied, since in tables:
            table = TableName(schema, name)
            merged = merges.get(table.path, {}).get("position") or "0/0"
            if state != "removed":
                position = max(LSN.parse(merged), LSN.parse(copied or "0/0"))
                found[table] = AppliedTable(state, position, since)
        return Applied(LSN.parse(lsn), commit_time, complete_at, found)
