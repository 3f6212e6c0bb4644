"""The status line of the demo."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from datetime import UTC, datetime

import psycopg2

from airflow_provider_pgrepl.errors import PgReplError, StateError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState
from demo.errors import DemoError
from demo.lake import Balance, Lake


class Status:
    """The status of a pipeline, from the provider's records and from the lake."""

    def __init__(self, dsn: str, pipeline: Pipeline, lake: Lake) -> None:
        self._dsn = dsn
        self._pipeline = pipeline
        self._lake = lake

    def line(self) -> str:
        """Return a line with states, rows, speed and lag, and the balances at the newest consistent point.

        Raises DemoError if the state cannot be read, a table is errored, or the balances differ.
        """
        try:
            with StateDatabase(self._dsn, "demo") as state_db:
                tables = list(state_db.read_tables(self._pipeline.name).values())
                progress = state_db.read_progress(self._pipeline.name)
        except StateError:
            return "nothing is replicated yet"  # the snapshot app creates the state
        except PgReplError as error:
            raise DemoError(f"The state cannot be read: {error}") from None
        _raise_errors(tables)
        end, now = self.wal_lsn(), datetime.now(UTC)
        balance = self._lake.check_balance()
        parts = [_states(tables)]
        if balance is not None:
            parts.append(f"{balance.rows:,} rows")
            parts.append(f"{progress.changes_per_s if progress else 0:,.0f} changes/s")
            parts.append(f"lag {_lag(balance, end, now)}")
            parts.append(f"balanced at {balance.lsn}: 4 × {balance.total:,}")
        return " | ".join(parts)

    def wal_lsn(self) -> LSN:
        """Return the WAL insert position of the source."""
        with closing(psycopg2.connect(self._dsn)) as connection, connection.cursor() as cursor:
            cursor.execute("select pg_current_wal_insert_lsn()::text")
            return LSN.parse(cursor.fetchone()[0])

    def mark_end(self) -> LSN:
        """Return an LSN after all commits so far, and commit once more, so that the lake reaches it."""
        end = self.wal_lsn()
        with closing(psycopg2.connect(self._dsn)) as connection, connection, connection.cursor() as cursor:
            cursor.execute("update pgbench_branches set bbalance = bbalance where bid = 1")
        return end


def _raise_errors(tables: list[TableRecord]) -> None:
    for table in tables:
        if table.state is TableState.ERRORED:
            raise DemoError(f"{table.table} is errored: {table.reason} {table.hint}")


def _states(tables: list[TableRecord]) -> str:
    counts = Counter(table.state.value for table in tables)
    return f"{len(tables)} tables: " + ", ".join(f"{count} {state}" for state, count in counts.items())


def _lag(balance: Balance, end: LSN, now: datetime) -> str:
    """Return the lag of the newest point: bytes of WAL, and the age of its last transaction in seconds."""
    age = (now - (balance.commit_ts or now)).total_seconds()
    return f"{_bytes(max(0, end - balance.lsn))}, {max(0.0, age):.1f} s"


def _bytes(count: int) -> str:
    return f"{count / 1024:,.0f} kB" if count < 10 << 20 else f"{count / (1 << 20):,.0f} MB"
