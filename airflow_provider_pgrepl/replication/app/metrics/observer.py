"""A thread that reads, every few seconds, the figures that a running replication does not hold itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.app.metrics.error_counts import ErrorCounts
from airflow_provider_pgrepl.replication.app.status.lag import LagMeter
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.host import BlockThread
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection, connect
from airflow_provider_pgrepl.replication.source.server import wal_lsn
from airflow_provider_pgrepl.replication.source.slot import read_slot, read_wal_limit
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableCondition, TableState
from airflow_provider_pgrepl.trace import log_unexpected

log = logging.getLogger(__name__)

INTERVAL_S = 10.0


@dataclass(frozen=True)
class Observed:
    """The last figures of source and state database. None and empty: never read.

    `is_source_up`, `is_state_up`: the last reading succeeded. `end`: of the source's WAL. `limit_bytes`: the
    WAL that the server retains for a slot at most, infinity without a limit.
    """

    is_source_up: bool = False
    is_state_up: bool = False
    end: LSN | None = None
    is_slot_active: bool | None = None
    is_slot_lost: bool | None = None
    retained_bytes: int | None = None
    limit_bytes: float | None = None
    tables: Mapping[TableName, TableCondition] = field(default_factory=dict)


class Observer(BlockThread):
    """A context manager whose thread reads the figures every 10 s, with connections that it keeps.

    An error stops nothing: the earlier figures stay, marked as not up. Reads do not depend on scrapes.
    """

    def __init__(
        self,
        dsn: str,
        state_dsn: str,
        pipeline: Pipeline,
        lag: LagMeter,
        errors: ErrorCounts,
        request_keepalive: Callable[[], None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        super().__init__("pgrepl-metrics")
        self._dsn, self._state_dsn, self._pipeline = dsn, state_dsn, pipeline
        self._lag, self._errors = lag, errors
        self._request_keepalive = request_keepalive
        self._interval_s = interval_s
        self._source: Connection | None = None
        self._state_db: StateDatabase | None = None
        self._errored: Mapping[TableName, datetime] | None = None
        self.observed = Observed()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stopping.wait(pause_s):
            pause_s = self._interval_s
            self._try(self._read_source, self._drop_source)
            self._try(self._read_state, self._drop_state_db)
        self._drop_source()
        self._drop_state_db()

    def _try(self, read: Callable[[], None], drop: Callable[[], None]) -> None:
        try:
            read()
        except Exception as error:  # noqa: BLE001 - figures that cannot be read must not end replication
            log_unexpected(log, "reading figures for metrics", error, logging.WARNING)
            if isinstance(error, PgReplError):
                log.debug("figures for metrics cannot be read: %s", error.message)
            drop()

    def _read_source(self) -> None:
        if self._source is None:
            self._source = connect(self._dsn, f"metrics {self._pipeline.name}")
        at, end = time.monotonic(), wal_lsn(self._source)
        slot = read_slot(self._source, self._pipeline.slot)
        limit = read_wal_limit(self._source)
        self._lag.add_end(at, end)
        # Without WAL for its tables, the receiver learns from a keepalive only that it is not behind.
        self._request_keepalive()
        self.observed = replace(
            self.observed,
            is_source_up=True,
            end=end,
            is_slot_active=slot is not None and slot.active,
            is_slot_lost=slot is None or slot.invalidation is not None,
            retained_bytes=None if slot is None else slot.held_bytes(end),
            limit_bytes=float("inf") if limit is None else limit,
        )

    def _read_state(self) -> None:
        if self._state_db is None:
            self._state_db = StateDatabase(self._state_dsn, f"metrics {self._pipeline.name}")
        read = self._state_db.read_conditions(self._pipeline.name)
        tables = {table: one for table, one in read.items() if one.state is not TableState.REMOVED}
        self._count_errored(tables)
        self.observed = replace(self.observed, is_state_up=True, tables=tables)

    def _count_errored(self, tables: Mapping[TableName, TableCondition]) -> None:
        """Count each table that has become errored since the last reading, by the class of its error."""
        errored = {table: one for table, one in tables.items() if one.state is TableState.ERRORED}
        if self._errored is not None:
            for table, one in errored.items():
                if self._errored.get(table) != one.since:
                    self._errors.add(one.error)
        self._errored = {table: one.since for table, one in errored.items()}

    def _drop_source(self) -> None:
        self.observed = replace(self.observed, is_source_up=False)
        source, self._source = self._source, None
        if source is not None:
            with suppress(Exception):
                source.close()

    def _drop_state_db(self) -> None:
        self.observed = replace(self.observed, is_state_up=False)
        state_db, self._state_db = self._state_db, None
        if state_db is not None:
            with suppress(Exception):
                state_db.close()
