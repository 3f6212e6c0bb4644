"""The Prometheus endpoint of an app. `prometheus-client` is imported only while one is served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from airflow_provider_pgrepl import __version__
from airflow_provider_pgrepl.errors import ConfigError, ToolError

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

Address = tuple[str, int]
"""Host and port."""
LOCAL = "127.0.0.1"


def metrics_address(port: int | None, host: str | None) -> Address | None:
    """Return the address of `metrics_port` and `metrics_host`, or None without a port.

    The host is 127.0.0.1 by default. Raises ConfigError for a host without a port, and for a port that is not
    one.
    """
    if port is None:
        if host:
            raise ConfigError(
                "metrics_host: there is no endpoint without metrics_port", "set metrics_port, as 9187"
            )
        return None
    if not 0 < port < 1 << 16:
        raise ConfigError(f"metrics_port: {port} is not a port", "use a number from 1 to 65535")
    return host or LOCAL, port


def check_client() -> None:
    """Raise ToolError if `prometheus-client` is not installed."""
    if find_spec("prometheus_client") is None:
        raise ToolError(
            "metrics need the Python package prometheus-client, which is not installed",
            "pip install 'airflow-provider-pgrepl[metrics]', or leave metrics_port out",
        )


def build_info(pipeline: str) -> Metric:
    """Return the metric `pgrepl_build_info`, which every endpoint of this package has."""
    from prometheus_client.core import GaugeMetricFamily

    info = GaugeMetricFamily(
        "pgrepl_build_info", "Always 1. The label has the version.", labels=("pipeline", "version")
    )
    info.add_metric((pipeline, __version__), 1)
    return info


@contextmanager
def serve_metrics(setting: str, address: Address, *collectors: Collector) -> Iterator[int]:
    """Serve `/metrics` at an address while the block runs, and yield the port.

    The endpoint also has the metrics `process_…` of this process: memory, CPU, open files, start.

    :param setting: the name of the setting that has the address, for the error
    :raises ToolError: if `prometheus-client` is missing
    :raises ConfigError: if the address is not available
    """
    check_client()
    from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    for collector in collectors:
        registry.register(collector)
    host, port = address
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot listen on {host}:{port}: {error.strerror}",
            "use an address of this host (127.0.0.1, or 0.0.0.0 for all) and a free port above 1023",
        ) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
