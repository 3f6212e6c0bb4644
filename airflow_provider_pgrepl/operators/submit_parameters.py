"""Refuse parameters of SparkSubmitOperator that would do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_provider_pgrepl.errors import ConfigError

_CLUSTER = "it is for deploy mode cluster, and the driver runs on this worker"
_OF_NO_USE = {
    "java_class": "the applications are in Python",
    "status_poll_interval": f"{_CLUSTER}, where poll_interval_s counts",
    "track_driver_via_k8s_api": _CLUSTER,
    "yarn_track_via_rm_api": _CLUSTER,
    "yarn_rm_auth": _CLUSTER,
}
_DEFAULTS: Mapping[str, Any] = {"status_poll_interval": 1}


def refuse_connection_id(parameters: Mapping[str, Any]) -> None:
    """Raise ConfigError for Spark's connection by its other name."""
    if "conn_id" in parameters:
        raise ConfigError("conn_id: is called spark_conn_id here; that of the source stands in the pipeline")


def refuse_of_no_use_on_worker(operator: Any) -> None:
    """Raise ConfigError for parameters that mean nothing when the driver runs on this worker."""
    given = [
        f"{name}: {why}"
        for name, why in _OF_NO_USE.items()
        if getattr(operator, f"_{name}") not in (None, False, _DEFAULTS.get(name))
    ]
    if given:
        raise ConfigError("; ".join(given), "leave it out")
