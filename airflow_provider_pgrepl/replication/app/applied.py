"""Decisions about applied transactions for consumers: whether tables are complete as of a time, and which
consistent points to announce."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from airflow_provider_pgrepl.errors import ConfigError, PgReplError, Retry
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.applied import Applied, AppliedRecords


def read_applied(state_dsn: str, pipeline: str) -> Applied:
    """Return the recorded progress of a pipeline. Raises SourceConnectionError, StateError."""
    with AppliedRecords(state_dsn, f"applied {pipeline}") as records:
        return records.read_applied(pipeline)


def look_as_of(
    state_dsn: str, pipeline: str, tables: Collection[TableName], as_of: datetime, settle_s: float
) -> str | None:
    """Read the recorded progress of a pipeline, and return what `missing_as_of` does.

    If the state cannot be read now and may be later, returns that as the reason. Raises other errors.
    """
    try:
        return missing_as_of(read_applied(state_dsn, pipeline), tables, as_of, settle_s)
    except PgReplError as error:
        if error.retry is not Retry.TIMED:
            raise
        return f"the state cannot be read: {error.message}"


def missing_as_of(
    applied: Applied, tables: Collection[TableName], as_of: datetime, settle_s: float
) -> str | None:
    """Return why tables may lack transactions that committed before `as_of`; None if they have them all.

    Commit times do not increase with the LSN: the server takes the time of a commit before it writes the
    commit record. So a transaction that committed before `as_of` may come after one that committed later,
    and no transaction in the stream shows that all earlier ones were received. The end of the WAL, read after
    `as_of`, does: it is at or after each commit record that was written until then.

    :param settle_s: seconds after its commit time within which a transaction's commit record is written
    :raises ConfigError: if a table is not one of the pipeline's, or `as_of` has no time zone
    """
    if as_of.tzinfo is None:
        raise ConfigError(
            f"as_of: {as_of.isoformat()} has no time zone", "add one, as in 2026-01-31T09:00:00+01:00"
        )
    if unknown := sorted(str(table) for table in tables if table not in applied.tables):
        raise ConfigError(
            f"the pipeline does not have the tables {', '.join(unknown)}",
            "see `pgrepl status FILE.json` for its tables, and check pipeline and state_conn_id",
        )
    behind = sorted(
        f"{table} is {applied.tables[table].state}"
        for table in tables
        if not applied.tables[table].is_streaming
    )
    if behind:
        return "; ".join(behind)
    if applied.complete_at is None:
        return "the replication app has not reported yet up to which time the lake is complete"
    if applied.complete_at < as_of + timedelta(seconds=settle_s):
        return (
            f"the lake is complete up to {applied.complete_at.isoformat(timespec='seconds')}, and"
            f" {as_of.isoformat(timespec='seconds')} needs {settle_s:g} s more"
        )
    # The points of other tables do not wait for a table that catches up. Once it streams, the next one does.
    new = sorted(
        str(table)
        for table in tables
        if (since := applied.tables[table].since) is not None and since >= applied.complete_at
    )
    return f"no point since they began to stream: {', '.join(new)}" if new else None


@dataclass(frozen=True)
class TablePoint:
    """A consistent point at which a table has changes that the point announced before lacks."""

    lsn: LSN
    commit_time: datetime | None


class TablePoints:
    """Decides at which consistent points a table has changed. `after`: the point announced last, 0 without
    one."""

    def __init__(self, table: TableName, after: LSN) -> None:
        self._table = table
        self._announced = self._after = after
        self._wanted: LSN | None = None

    def look(self, applied: Applied) -> TablePoint | None:
        """Return the newest consistent point if it has changes of the table that no announced point has.

        A merge may be ahead of the point. Its changes are announced with the next point that reaches it.
        """
        table = applied.tables.get(self._table)
        # An app that has started reports no applied LSN until its first point.
        if table is None or not table.is_streaming or not applied.lsn:
            return None
        if applied.lsn < self._announced:
            # LSNs of a new epoch, possibly of another server, cannot be compared with the last ones.
            self._announced, self._after, self._wanted = LSN(0), LSN(0), None
        if self._wanted is None and table.position > self._after:
            self._wanted = table.position
        if self._wanted is None or applied.lsn < self._wanted:
            return None
        # Not the point's LSN: a table that has just caught up may be behind the point, which lacks it then.
        self._after = table.position if table.position <= applied.lsn else self._wanted
        self._announced, self._wanted = applied.lsn, None
        return TablePoint(applied.lsn, applied.commit_time)
