"""Export of the metrics of a replication to an OpenTelemetry collector, with the names that Prometheus sees.

The SDK reads the collector's address, the protocol and the interval from OpenTelemetry's environment
variables: https://opentelemetry.io/docs/specs/otel/protocol/exporter/
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics.export import MetricExporter
    from prometheus_client.core import Metric, Sample
    from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

EXPORT_VARIABLE = "PGREPL_OTEL_METRICS"
"""Set to a text other than "" to export. The operators set it if Airflow's `[metrics] otel_on` is true."""
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp", "prometheus_client")
_ENDINGS = {"counter": ("_total",), "summary": ("_count", "_sum"), "gauge": ("",)}
_SAME_EXPORT_S = 1.0


def exports_metrics() -> bool:
    """Return True if the environment asks for an export. Logs a warning if a package for it is missing."""
    if not os.environ.get(EXPORT_VARIABLE):
        return False
    missing = [name for name in _NEEDED if not _is_installed(name)]
    if missing:
        log.warning("metrics are not exported to OpenTelemetry: %s is not installed", ", ".join(missing))
    return not missing


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package that would contain it
        return False


@contextmanager
def export_metrics(collector: Collector) -> Iterator[None]:
    """Export the metrics of a collector at intervals during the block, and once at its end.

    An export that fails is logged by OpenTelemetry and stops nothing.
    """
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME") or "pgrepl"})
    provider = MeterProvider([PeriodicExportingMetricReader(_exporter())], resource, shutdown_on_exit=False)
    meter, scrape = provider.get_meter("pgrepl"), _Scrape(collector)
    for family in collector.collect():
        create: Callable[..., Any] = meter.create_observable_counter
        if family.type == "gauge":
            create = meter.create_observable_gauge
        for ending in _ENDINGS[family.type]:
            name = family.name + ending
            create(name, [scrape.callback(name)], description=family.documentation)
    try:
        yield
    finally:
        provider.shutdown()


def _exporter() -> MetricExporter:
    variables = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    if next((os.environ[name] for name in variables if os.environ.get(name)), "") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()


class _Scrape:
    """The samples of a collector, which are collected once for all instruments of an export."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._families: list[Metric] = []
        self._collected_at = float("-inf")

    def callback(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        """Return the callback of an instrument for the samples of this name.

        OpenTelemetry has no infinite values: a slot without a WAL limit has no `pgrepl_wal_limit_bytes`.
        """
        from opentelemetry.metrics import Observation

        return lambda _: [
            Observation(float(one.value), one.labels)
            for one in self._samples()
            if one.name == name and math.isfinite(one.value)
        ]

    def _samples(self) -> Iterator[Sample]:
        now = time.monotonic()
        if now - self._collected_at > _SAME_EXPORT_S:
            self._families, self._collected_at = list(self._collector.collect()), now
        return (sample for family in self._families for sample in family.samples)
