"""The Prometheus endpoint of a replication."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from airflow_provider_pgrepl.replication.app.metrics.collector import ReplicationCollector
from airflow_provider_pgrepl.replication.app.metrics.error_counts import ErrorCounts
from airflow_provider_pgrepl.replication.app.metrics.observer import Observer
from airflow_provider_pgrepl.replication.app.status.lag import LagMeter
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.receiver.changelog_feed import ReceiverProgress
from airflow_provider_pgrepl.replication.runtime.metrics_endpoint import Address, serve_metrics
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline


@contextmanager
def serve_replication(
    address: Address,
    dsn: str,
    state_dsn: str,
    pipeline: Pipeline,
    received: Callable[[], ReceiverProgress],
    applied: Callable[[], ApplierProgress],
    request_keepalive: Callable[[], None],
) -> Iterator[None]:
    """Serve the metrics of a replication while the block runs. Raises ConfigError, ToolError."""
    lag, errors = LagMeter(received, applied), ErrorCounts()
    observer = Observer(dsn, state_dsn, pipeline, lag, errors, request_keepalive)
    collector = ReplicationCollector(pipeline.name, received, applied, lambda: observer.observed, lag, errors)
    ours = logging.getLogger("airflow_provider_pgrepl")
    with serve_metrics("metrics_port", address, collector) as port:
        ours.info("serving metrics at http://%s:%d/metrics", address[0], port)
        ours.addHandler(errors)
        try:
            with observer:
                yield
        finally:
            ours.removeHandler(errors)
