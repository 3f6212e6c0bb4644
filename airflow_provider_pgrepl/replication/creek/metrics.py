"""creek's own metrics (internal/metrics at b88e46c), so that dashboards made for creek also show a
publisher."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from prometheus_client.core import GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from airflow_provider_pgrepl.replication.events.publish.progress import PublisherProgress
from airflow_provider_pgrepl.replication.events.targets.jetstream import JetStream

_LEVELS = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning", logging.ERROR: "error"}


class CreekMetrics(logging.Handler, Collector):
    """A Prometheus collector, and a log handler that counts log lines.

    creek's counters do not end in `_total`, which the Prometheus client requires of counters. Therefore they
    are exported without a type.
    """

    def __init__(self, target: JetStream, progress: Callable[[], PublisherProgress]) -> None:
        super().__init__()
        self._target, self._progress = target, progress
        self._lines = Counter(dict.fromkeys(_LEVELS.values(), 0))

    def emit(self, record: logging.LogRecord) -> None:
        self._lines[_LEVELS[min(max(record.levelno // 10 * 10, logging.DEBUG), logging.ERROR)]] += 1

    def collect(self) -> Iterator[Metric]:
        now, sent = self._progress(), self._target.sent
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
