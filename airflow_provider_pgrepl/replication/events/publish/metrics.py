"""The metrics of one publisher, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from airflow_provider_pgrepl.replication.events.publish.progress import PublisherProgress
from airflow_provider_pgrepl.replication.runtime.metrics_endpoint import build_info

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
