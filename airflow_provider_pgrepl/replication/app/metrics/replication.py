"""The metrics of one replication, and their endpoints.

A scrape reads only what the process holds in memory. A thread reads, every few seconds, the figures that a
running replication does not hold itself. A log handler counts errors.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.app.status.summary import LagMeter
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.receiver.changelog_feed import ReceiverProgress
from airflow_provider_pgrepl.replication.runtime.host import BlockThread
from airflow_provider_pgrepl.replication.runtime.metrics_endpoint import Address, build_info, serve_metrics
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection, connect
from airflow_provider_pgrepl.replication.source.server import wal_lsn
from airflow_provider_pgrepl.replication.source.slot import read_slot, read_wal_limit
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.progress import TableMerges
from airflow_provider_pgrepl.replication.state.tables import TableCondition, TableState
from airflow_provider_pgrepl.trace import log_unexpected

from .otlp import export_metrics, exports_metrics

log = logging.getLogger(__name__)

INTERVAL_S = 10.0

OTHER = "other"
"""The class under which errors count whose class this version does not know."""
MAX_TABLES = 2_000
"""The maximum number of tables that have series of their own. Errored tables come first, then by name."""
_GAUGES = {
    "source_up": "1 if the source was read successfully last time, else 0: its metrics are stale then.",
    "state_up": "1 if the state database was read last time, else 0: table states are stale then.",
    "source_lsn": "End of the source's WAL at the last reading.",
    "received_lsn": "LSN up to which the receiver has read the slot.",
    "durable_lsn": "LSN up to which the changelog holds all changes.",
    "confirmed_lsn": "LSN that the receiver has confirmed to the slot.",
    "applied_lsn": "LSN of the newest consistent point of this run.",
    "applied_commit_timestamp_seconds": "Commit time of the newest applied transaction, by the source.",
    "lag_seconds": "Age of the newest applied transaction; 0 at the known end of the source's WAL.",
    "lag_bytes": "Bytes of WAL between the applied LSN and the end of the source's WAL.",
    "wal_retained_bytes": "Bytes of WAL that the server retains for the slot.",
    "wal_limit_bytes": "max_slot_wal_keep_size: the server invalidates a slot beyond it. +Inf: no limit.",
    "slot_active": "1 while a session reads the slot, else 0.",
    "slot_lost": "1 if the slot is missing or invalidated, else 0.",
}
_COUNTERS = {
    "changes": "Changes of rows that the receiver has read.",
    "applied_changes": "Changes of rows that merges have applied to lake tables.",
    "commit_bytes": "Bytes of uncompressed values that the receiver has committed to the changelog.",
    "merge_bytes": "Bytes that merges have written to lake tables.",
    "reconnects": "Times that the receiver has connected to the source again.",
}


@contextmanager
def serve_replication(
    address: Address | None,
    dsn: str,
    state_dsn: str,
    pipeline: Pipeline,
    received: Callable[[], ReceiverProgress],
    applied: Callable[[], ApplierProgress],
    request_keepalive: Callable[[], None],
) -> Iterator[None]:
    """Serve the metrics of a replication while the block runs. Export them if the environment asks for it.

    Raises ConfigError, ToolError.

    :param address: of the Prometheus endpoint; None: there is none
    """
    lag, errors = LagMeter(received, applied), ErrorCounts()
    observer = Observer(dsn, state_dsn, pipeline, lag, errors, request_keepalive)
    collector = ReplicationCollector(pipeline.name, received, applied, lambda: observer.observed, lag, errors)
    ours = logging.getLogger("airflow_provider_pgrepl")
    with ExitStack() as stack:
        if address is not None:
            port = stack.enter_context(serve_metrics("metrics_port", address, collector))
            ours.info("serving metrics at http://%s:%d/metrics", address[0], port)
        if exports_metrics():
            stack.enter_context(export_metrics(collector))
            ours.info("exporting metrics to OpenTelemetry")
        ours.addHandler(errors)
        try:
            with observer:
                yield
        finally:
            ours.removeHandler(errors)


class ErrorCounts(logging.Handler):
    """A log handler that counts this package's errors in log lines. Other errors are counted by `add`.

    All classes begin at 0: Prometheus computes no increase for a series that begins at 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self._labels = _labels(PgReplError, OTHER)
        self._counts = dict.fromkeys([*self._labels.values(), OTHER], 0)

    def emit(self, record: logging.LogRecord) -> None:
        """Count the errors among the arguments of a log line."""
        found = record.args if isinstance(record.args, tuple) else ()
        for error in found:
            if isinstance(error, PgReplError):
                self.add(type(error).__name__)

    def add(self, name: str) -> None:
        """Count an error of the class `name`."""
        self.acquire()
        try:
            self._counts[self._labels.get(name, OTHER)] += 1
        finally:
            self.release()

    def read(self) -> dict[str, int]:
        """Return the counts by the name of the class."""
        return self._counts.copy()


def _labels(kind: type[PgReplError], base: str) -> dict[str, str]:
    """Return the labels of the class and of those derived from it, by name. A private one has its base's."""
    label = base if kind.__name__.startswith("_") else kind.__name__
    found = {kind.__name__: label}
    for one in kind.__subclasses__():
        found |= _labels(one, label)
    return found


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


class ReplicationCollector(Collector):
    """The metrics `pgrepl_…` of a replication. A scrape reads memory only."""

    def __init__(
        self,
        pipeline: str,
        received: Callable[[], ReceiverProgress],
        applied: Callable[[], ApplierProgress],
        observed: Callable[[], Observed],
        lag: LagMeter,
        errors: ErrorCounts,
    ) -> None:
        self._pipeline = pipeline
        self._received, self._applied, self._observed = received, applied, observed
        self._lag, self._errors = lag, errors

    def collect(self) -> Iterator[Metric]:
        received, applied, observed = self._received(), self._applied(), self._observed()
        yield build_info(self._pipeline)
        gauges = self._gauges(received, applied, observed)
        for name, about in _GAUGES.items():
            yield self._gauge(name, about, gauges[name])
        counters = _counters(received, applied)
        for name, about in _COUNTERS.items():
            yield self._counter(name, about, counters[name])
        yield self._merges(applied)
        yield self._error_counts()
        yield from self._tables(observed.tables, applied.merges or {})

    def _gauges(
        self, received: ReceiverProgress, applied: ApplierProgress, observed: Observed
    ) -> dict[str, float | None]:
        lag_s, lag_bytes = self._lag.now()
        commit_ts = applied.commit_ts
        return {
            "source_up": observed.is_source_up,
            "state_up": observed.is_state_up,
            "source_lsn": observed.end,
            "received_lsn": received.received_lsn or None,
            "durable_lsn": received.durable_lsn or None,
            "confirmed_lsn": received.confirmed_lsn or None,
            "applied_lsn": applied.applied_lsn or None,
            "applied_commit_timestamp_seconds": None if commit_ts is None else commit_ts.timestamp(),
            "lag_seconds": lag_s,
            "lag_bytes": lag_bytes,
            "wal_retained_bytes": observed.retained_bytes,
            "wal_limit_bytes": observed.limit_bytes,
            "slot_active": observed.is_slot_active,
            "slot_lost": observed.is_slot_lost,
        }

    def _gauge(self, name: str, about: str, value: float | None) -> Metric:
        gauge = GaugeMetricFamily(f"pgrepl_{name}", about, labels=("pipeline",))
        if value is not None:
            gauge.add_metric((self._pipeline,), value)
        return gauge

    def _counter(self, name: str, about: str, value: float) -> Metric:
        counter = CounterMetricFamily(f"pgrepl_{name}", about, labels=("pipeline",))
        counter.add_metric((self._pipeline,), value)
        return counter

    def _merges(self, applied: ApplierProgress) -> Metric:
        summary = SummaryMetricFamily(
            "pgrepl_merge_seconds",
            "Merges of tables that have ended, and their durations.",
            labels=("pipeline",),
        )
        summary.add_metric((self._pipeline,), applied.merges_ended, applied.merge_seconds)
        return summary

    def _error_counts(self) -> Metric:
        counter = CounterMetricFamily(
            "pgrepl_errors",
            "Errors that stopped a table or that the app logged, by class.",
            labels=("pipeline", "class"),
        )
        for name, count in self._errors.read().items():
            counter.add_metric((self._pipeline, name), count)
        return counter

    def _tables(
        self, tables: Mapping[TableName, TableCondition], merges: Mapping[str, TableMerges]
    ) -> Iterator[Metric]:
        counts = GaugeMetricFamily("pgrepl_tables", "Tables by state.", labels=("pipeline", "state"))
        by_state = Counter(one.state for one in tables.values())
        for state in TableState:
            if state is not TableState.REMOVED:
                counts.add_metric((self._pipeline, state.value), by_state[state])
        yield counts
        chosen = _chosen(tables)
        yield self._gauge(
            "tables_omitted",
            f"Tables without series of their own, beyond the first {MAX_TABLES:,}.",
            len(tables) - len(chosen),
        )
        states = GaugeMetricFamily(
            "pgrepl_table_state",
            "1 for the present state of a table. Its other states have no series.",
            labels=("pipeline", "table", "state"),
        )
        lag = GaugeMetricFamily(
            "pgrepl_table_lag_seconds",
            "Age of a table's oldest change that waits for a merge; 0 if none waits.",
            labels=("pipeline", "table"),
        )
        last = GaugeMetricFamily(
            "pgrepl_table_merge_seconds", "Duration of a table's last merge.", labels=("pipeline", "table")
        )
        for table in chosen:
            name, state = str(table), tables[table].state
            states.add_metric((self._pipeline, name, state.value), 1)
            made = merges.get(table.path)
            if made is not None:
                last.add_metric((self._pipeline, name), made.seconds)
                if state.is_followed:
                    lag.add_metric((self._pipeline, name), made.waiting_s)
        yield from (states, lag, last)


def _counters(received: ReceiverProgress, applied: ApplierProgress) -> dict[str, float]:
    return {
        "changes": received.changes,
        "applied_changes": applied.changes,
        "commit_bytes": received.committed_bytes,
        "merge_bytes": applied.merged_bytes,
        "reconnects": received.reconnects,
    }


def _chosen(tables: Mapping[TableName, TableCondition]) -> list[TableName]:
    if len(tables) <= MAX_TABLES:
        return sorted(tables)
    return sorted(tables, key=lambda table: (tables[table].state is not TableState.ERRORED, table))[
        :MAX_TABLES
    ]
