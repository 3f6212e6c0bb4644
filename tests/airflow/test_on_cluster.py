"""The operators with their executors on a standalone cluster, and the lake on S3 by an Airflow connection."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

import psycopg2.extensions
import pytest

from demo.spark_cluster import running_cluster
from tests.airflow.test_operators import run_dag
from tests.support.replicated import Replicated, execute

pytestmark = pytest.mark.usefixtures("airflow_db")


def test_a_dag_with_a_spark_connection_keeps_a_lake_on_s3(
    gateway, s3_lake: str, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's environment says nothing of the store: two connections hold all secrets."""
    execute(
        dsn,
        "create table item (id bigint primary key, what text)",
        "insert into item select g, 'item ' || g from generate_series(1, 1000) g",
    )
    replicated = Replicated(
        dsn, tmp_path, ("public.item",), lake=s3_lake, lake_conn_id="store", conn_id="source"
    )
    keys = gateway.client_environment
    with running_cluster(tmp_path / "cluster") as cluster:
        address = urlsplit(cluster.url)
        source = psycopg2.extensions.parse_dsn(dsn)
        connections = {
            "source": {
                "conn_type": "pgrepl",
                "host": source["host"],
                "port": int(source["port"]),
                "schema": source["dbname"],
                "login": source["user"],
            },
            "standalone": {"conn_type": "spark", "host": f"spark://{address.hostname}", "port": address.port},
            "store": {
                "conn_type": "aws",
                "login": keys["AWS_ACCESS_KEY_ID"],
                "password": keys["AWS_SECRET_ACCESS_KEY"],
                "extra": {"endpoint_url": keys["AWS_ENDPOINT_URL_S3"], "region_name": keys["AWS_REGION"]},
            },
        }
        for name, fields in connections.items():
            monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(fields))
        with monkeypatch.context() as worker:
            for name in keys:
                worker.delenv(name)
            run = run_dag("on_cluster", {"pipeline": str(replicated.file), "python": str(cluster.python)})
        assert run.state == "success"
        told = "".join(
            path.read_text(errors="replace")
            for node in (cluster.master, *cluster.workers)
            for path in node.folder.rglob("*")
            if path.is_file() and path.suffix in ("", ".log")
        )
        assert "CoarseGrainedExecutorBackend" in told
        assert keys["AWS_SECRET_ACCESS_KEY"] not in told
    replicated.assert_equal("public.item")
