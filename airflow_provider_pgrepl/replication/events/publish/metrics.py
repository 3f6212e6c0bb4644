"""A Prometheus endpoint for one publisher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.events.publish.progress import PublisherProgress

_LABELS = ("pipeline", "publisher")
_COUNTERS = {
    "published": "Events that the target acknowledged since the start.",
    "resent": "Of these, events that may have been sent before.",
    "skipped": "Events that were skipped and recorded, since the start.",
    "dropped": "Events that no queue took, where unrouted is drop, since the start.",
    "reconnects": "Times that the target was lost since the start.",
}


class _Collector(Collector):
    def __init__(self, labels: tuple[str, str], progress: Callable[[], PublisherProgress]) -> None:
        self._labels, self._progress = labels, progress

    def collect(self) -> Iterator[Metric]:
        now = self._progress()
        for name, about in _COUNTERS.items():
            counter = CounterMetricFamily(f"pgrepl_publisher_{name}", about, labels=_LABELS)
            counter.add_metric(self._labels, getattr(now, name))
            yield counter
        behind = max(0, now.durable_lsn - now.published_lsn - 1)
        yield self._gauge("lag_bytes", "WAL between what is durable and what is published.", behind)
        yield self._gauge("published_lsn", "All up to this LSN is published.", now.published_lsn)
        yield self._gauge("stopped_tables", "Tables whose events have stopped at an error.", now.stopped)
        yield self._gauge("connected", "1 while the target is connected.", int(now.is_connected))

    def _gauge(self, name: str, about: str, value: int) -> Metric:
        gauge = GaugeMetricFamily(f"pgrepl_publisher_{name}", about, labels=_LABELS)
        gauge.add_metric(self._labels, value)
        return gauge


@contextmanager
def serve_metrics(
    address: tuple[str, int],
    labels: tuple[str, str],
    progress: Callable[[], PublisherProgress],
    *more: Collector,
) -> Iterator[int]:
    """Serve `/metrics` at host and port while the block runs, and yield the port.

    `labels`: the names of pipeline and publisher. `more`: further collectors. Raises ConfigError if the
    address is not available.
    """
    registry = CollectorRegistry()
    for collector in (_Collector(labels, progress), *more):
        registry.register(collector)
    host, port = address
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"publishers: {labels[1]}: metrics: {host}:{port} cannot be had: {error.strerror}",
            "name another port, or end who has it",
        ) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
