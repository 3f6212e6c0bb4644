"""A real Prometheus scrapes a running pipeline, and evaluates the shipped rules."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.cli.apps import RULES, copy_dashboards
from tests.support.metrics import queried
from tests.support.replicated import Replicated, execute, kill, wait_until

_REQUIRED = "PGREPL_REQUIRE_DEBIAN"
_WHY = "needs Prometheus: sh setup/prometheus.sh, or apt-get install prometheus"
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: pgrepl
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
Ask = Callable[..., Any]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[Ask]:
    """Run a private server, and yield a function that asks its API."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        assert not os.environ.get(_REQUIRED), _WHY
        pytest.skip(_WHY)
    rules = next(file for file in copy_dashboards(folder / "shipped") if file.name == RULES)
    config, port = folder / "prometheus.yaml", free_port()
    config.write_text(CONFIG.format(rules=rules, port=target))
    checked = subprocess.run(
        ["promtool", "check", "config", str(config)], check=False, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    address = f"127.0.0.1:{port}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]

    def ask(path: str, **parameters: str) -> Any:
        url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    with (folder / "prometheus.log").open("wb") as log:
        server = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        yield ask
    finally:
        server.terminate()
        server.wait()


def answered(ask: Ask, path: str, **parameters: str) -> Any:
    try:
        return ask(path, **parameters)
    except OSError:
        return None


@pytest.mark.thorough("unit/test_metrics: what is queried exists; integration/test_publishing: an endpoint")
def test_prometheus_has_every_queried_series_and_alerts_for_an_errored_table(dsn, tmp_path):
    execute(dsn, "create table t (id int primary key, v text)", "create table u (id int primary key)")
    one = Replicated(dsn, tmp_path, ("public.t", "public.u"))
    one.snapshot()
    port = free_port()
    with prometheus(tmp_path, port) as ask:
        app = one.start("replicate", f"--metrics-port={port}")
        try:
            execute(dsn, "insert into t values (1, 'x')", "insert into u values (1)")
            wanted = {name for name in queried() if not name.startswith("pgrepl_publisher_")}

            def missing() -> set[str] | None:
                assert app.poll() is None, one.log_tail()
                names = answered(ask, "label/__name__/values")
                return None if names is None else wanted - set(names)

            wait_until(lambda: missing() == set(), what="every series that is queried")
            merged = f'pgrepl_table_merge_seconds{{pipeline="{one.pipeline.name}",table="public.t"}}'
            wait_until(lambda: ask("query", query=merged)["result"], what="a merge")
            groups = ask("rules")["groups"]
            assert [
                rule["health"] for group in groups for rule in group["rules"] if rule["health"] == "err"
            ] == []
            execute(dsn, "alter table t alter v type int using 1", "insert into t values (2, 2)")

            def alerting() -> list[str]:
                return [
                    alert["labels"]["table"]
                    for alert in ask("alerts")["alerts"]
                    if alert["labels"]["alertname"] == "PgreplTableErrored"
                ]

            assert wait_until(alerting, what="an alert for the table") == ["public.t"]
            errors = "sum(pgrepl_errors_total) > 0"
            wait_until(lambda: ask("query", query=errors)["result"], what="its error to be counted")
            url = f"http://127.0.0.1:{port}/metrics"
            with urllib.request.urlopen(url, timeout=60) as answer:
                linted = subprocess.run(
                    ["promtool", "check", "metrics"], check=False, input=answer.read(), capture_output=True
                )
            assert linted.returncode == 0, linted.stderr.decode()
        finally:
            kill(app)
