"""The metrics of one publisher, for Prometheus, and their endpoint."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from airflow_provider_pgrepl.replication.events.event import PublishedCounts
from airflow_provider_pgrepl.replication.events.publish.record import PublisherProgress
from airflow_provider_pgrepl.replication.runtime.metrics_endpoint import build_info, serve_metrics
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings

_LEVELS = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning", logging.ERROR: "error"}
_LABELS = ("pipeline", "publisher")
_COUNTERS: dict[str, tuple[str, Callable[[PublisherProgress], int]]] = {
    "events": ("Events that the target acknowledged.", lambda now: now.published),
    "events_resent": (
        "Acknowledged events that may have been sent before, by an earlier process.",
        lambda now: now.resent,
    ),
    "events_skipped": ("Events that were recorded instead of sent.", lambda now: now.skipped),
    "events_dropped": (
        "Events that no queue took, with the setting unrouted: drop.",
        lambda now: now.dropped,
    ),
    "reconnects": ("Losses of the connection to the target.", lambda now: now.reconnects),
}
_GAUGES: dict[str, tuple[str, Callable[[PublisherProgress], int]]] = {
    "target_up": ("1 while the publisher is connected to the target, else 0.", lambda now: now.is_connected),
    "lag_bytes": (
        "Bytes of WAL between the durable LSN and the published LSN.",
        lambda now: max(0, now.durable_lsn - now.published_lsn - 1),
    ),
    "durable_lsn": ("LSN up to which the changelog holds all changes.", lambda now: now.durable_lsn),
    "published_lsn": ("LSN up to which all changes are published.", lambda now: now.published_lsn),
    "stopped_tables": ("Tables whose events are not sent because of an error.", lambda now: now.stopped),
}


@contextmanager
def serve_publisher(
    pipeline: str,
    settings: PublisherSettings,
    progress: Callable[[], PublisherProgress],
    sent: PublishedCounts | None,
) -> Iterator[None]:
    """Serve the metrics of a publisher while the block runs. Raises ConfigError.

    :param sent: what was sent on creek's wire; None: without creek's own metrics
    """
    creek = [] if sent is None else [CreekMetrics(sent, progress)]
    ours = logging.getLogger("airflow_provider_pgrepl")
    collector = PublisherCollector(pipeline, settings.name, progress)
    setting = f"publishers: {settings.name}: metrics"
    with serve_metrics(setting, settings.metrics_address(), collector, *creek):
        for one in creek:
            ours.addHandler(one)
        try:
            yield
        finally:
            for one in creek:
                ours.removeHandler(one)


class PublisherCollector(Collector):
    """The metrics `pgrepl_publisher_…`, computed from the progress that the process holds."""

    def __init__(self, pipeline: str, publisher: str, progress: Callable[[], PublisherProgress]) -> None:
        self._pipeline, self._labels, self._progress = pipeline, (pipeline, publisher), progress

    def collect(self) -> Iterator[Metric]:
        now = self._progress()
        yield build_info(self._pipeline)
        for name, (about, value) in _COUNTERS.items():
            counter = CounterMetricFamily(f"pgrepl_publisher_{name}", about, labels=_LABELS)
            counter.add_metric(self._labels, value(now))
            yield counter
        for name, (about, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"pgrepl_publisher_{name}", about, labels=_LABELS)
            gauge.add_metric(self._labels, value(now))
            yield gauge


class CreekMetrics(logging.Handler, Collector):
    """creek's own metrics (internal/metrics at b88e46c), for dashboards that were made for creek.

    A Prometheus collector, and a log handler that counts log lines.

    creek's counters do not end in `_total`, which the Prometheus client requires of counters. Therefore they
    are exported without a type.
    """

    def __init__(self, sent: PublishedCounts, progress: Callable[[], PublisherProgress]) -> None:
        super().__init__()
        self._sent, self._progress = sent, progress
        self._lines = Counter(dict.fromkeys(_LEVELS.values(), 0))

    def emit(self, record: logging.LogRecord) -> None:
        self._lines[_LEVELS[min(max(record.levelno // 10 * 10, logging.DEBUG), logging.ERROR)]] += 1

    def collect(self) -> Iterator[Metric]:
        now, sent = self._progress(), self._sent
        labels = ("creek_stream_type", "creek_producer_pg_op", "creek_pg_source")
        reads = UnknownMetricFamily(
            "creek_producer_pg_reads", "Events, by table and operation.", labels=labels
        )
        for (op, table), count in sorted(sent.counts.copy().items()):
            reads.add_metric(("wal", op, table), count)
        yield reads
        lines = UnknownMetricFamily(
            "log_messages_total", "Total number of log messages.", labels=("level", "application")
        )
        for level, count in self._lines.items():
            lines.add_metric((level, "creek_producer"), count)
        yield lines
        behind = max(0, now.durable_lsn - now.published_lsn - 1)
        waited = datetime.now(UTC) - sent.commit_ts if behind and sent.commit_ts else None
        yield GaugeMetricFamily("creek_producer_lsn", "current lsn, in bytes", now.durable_lsn)
        yield GaugeMetricFamily(
            "creek_producer_pg_behind_time",
            "milliseconds since the newest published change committed, while others wait",
            waited.total_seconds() * 1_000 if waited else 0,
        )
        yield GaugeMetricFamily("creek_producer_pg_behind_bytes", "WAL that is not published", behind)
        yield GaugeMetricFamily(
            "creek_producer_wal_subscriptions", "tables of which something was published", len(sent.tables)
        )
