"""The metrics of an app: its address as arguments, OpenTelemetry as environment variables."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.operators.replication import PgReplicationOperator
from airflow_provider_pgrepl.operators.spark_app import otel_variables
from airflow_provider_pgrepl.replication.app.metrics.otlp import EXPORT_VARIABLE

PIPELINE = {"name": "shop", "lake": "/lake", "tables": ["public.t"]}


def arguments(**parameters: object) -> list[str]:
    return PgReplicationOperator(task_id="replicate", pipeline=PIPELINE, **parameters).app_arguments()


def test_metrics_are_served_on_this_host_only_unless_a_host_is_given():
    assert arguments() == []
    assert arguments(metrics_port=9187) == ["--metrics-port=9187", "--metrics-host=127.0.0.1"]
    # A rendered template is text.
    given = arguments(metrics_port="9187", metrics_host="0.0.0.0")
    assert given == ["--metrics-port=9187", "--metrics-host=0.0.0.0"]


def test_metrics_port_that_is_no_port_is_rejected():
    for port in ("x", "70000"):
        with pytest.raises(ConfigError, match="is not a port"):
            arguments(metrics_port=port)


def test_application_exports_to_opentelemetry_only_if_airflow_does(monkeypatch):
    assert otel_variables({}) == {}
    monkeypatch.setenv("AIRFLOW__METRICS__OTEL_ON", "True")
    assert otel_variables({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}) == {EXPORT_VARIABLE: "1"}
    monkeypatch.setenv("AIRFLOW__METRICS__OTEL_HOST", "collector")
    monkeypatch.setenv("AIRFLOW__METRICS__OTEL_PORT", "4318")
    assert otel_variables({}) == {
        EXPORT_VARIABLE: "1",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://collector:4318/v1/metrics",
    }
