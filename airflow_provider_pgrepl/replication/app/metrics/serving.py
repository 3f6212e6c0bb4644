"""The metrics of a replication: its Prometheus endpoint, and their export to OpenTelemetry."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from airflow_provider_pgrepl.replication.app.metrics.collector import ReplicationCollector
from airflow_provider_pgrepl.replication.app.metrics.error_counts import ErrorCounts
from airflow_provider_pgrepl.replication.app.metrics.observer import Observer
from airflow_provider_pgrepl.replication.app.metrics.otlp import export_metrics, exports_metrics
from airflow_provider_pgrepl.replication.app.status.lag import LagMeter
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.receiver.changelog_feed import ReceiverProgress
from airflow_provider_pgrepl.replication.runtime.metrics_endpoint import Address, serve_metrics
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline


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
