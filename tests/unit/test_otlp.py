"""Metrics that OpenTelemetry's SDK sends to a collector over HTTP: as Prometheus reads them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from airflow_provider_pgrepl.replication.app.metrics.otlp import (
    EXPORT_VARIABLE,
    export_metrics,
    exports_metrics,
)
from airflow_provider_pgrepl.replication.app.metrics.replication import (
    ErrorCounts,
    Observed,
    ReplicationCollector,
)
from airflow_provider_pgrepl.replication.app.status.summary import LagMeter
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.changelog_feed import ReceiverProgress

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Receiver(BaseHTTPRequestHandler):
    """The endpoint of a collector that keeps all requests."""

    requests: ClassVar[list[bytes]]

    def do_POST(self) -> None:
        """Keep the body."""
        self.requests.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Requests to the collector that the environment names."""

    class Handler(Receiver):
        requests: ClassVar[list[bytes]] = []

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        yield Handler.requests
        server.shutdown()
        thread.join()


def exported(request: bytes) -> Series:
    message = ExportMetricsServiceRequest.FromString(request)
    [scope] = message.resource_metrics[0].scope_metrics
    found: Series = {}
    for metric in scope.metrics:
        is_sum = metric.WhichOneof("data") == "sum"
        assert not is_sum or metric.sum.is_monotonic
        for point in (metric.sum if is_sum else metric.gauge).data_points:
            labels = frozenset((label.key, label.value.string_value) for label in point.attributes)
            kind = point.WhichOneof("value")
            found[metric.name, labels] = float(getattr(point, kind))
    return found


def scraped(collector: ReplicationCollector) -> Series:
    registry = CollectorRegistry()
    registry.register(collector)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_collector_gets_every_series_that_prometheus_reads(requests: list[bytes]) -> None:
    received, applied = ReceiverProgress(LSN(900), LSN(800), LSN(700), changes=7), ApplierProgress()
    applied.merges_ended, applied.merge_seconds = 3, 1.5
    observed = Observed(is_source_up=True, end=LSN(1000), limit_bytes=float("inf"))
    lag = LagMeter(lambda: received, lambda: applied)
    errors = ErrorCounts()
    errors.add("DriftError")
    collector = ReplicationCollector("shop", lambda: received, lambda: applied, lambda: observed, lag, errors)
    with export_metrics(collector):
        pass
    [request] = requests
    found = exported(request)
    wanted = scraped(collector)
    assert wanted.pop(("pgrepl_wal_limit_bytes", frozenset({("pipeline", "shop")}))) == float("inf")
    assert found == wanted
    shop = ("pipeline", "shop")
    assert found["pgrepl_changes_total", frozenset({shop})] == 7
    assert found["pgrepl_merge_seconds_sum", frozenset({shop})] == 1.5
    assert found["pgrepl_errors_total", frozenset({shop, ("class", "DriftError")})] == 1


def test_nothing_is_exported_unless_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EXPORT_VARIABLE, raising=False)
    assert not exports_metrics()
    monkeypatch.setenv(EXPORT_VARIABLE, "1")
    assert exports_metrics()
