"""The lineage of tasks, as the real OpenLineage provider sends it. The applications are stand-ins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg2.extensions
import pytest

from tests.airflow import airflow_program
from tests.airflow.conftest import SECRET, Journal
from tests.airflow.test_drift_sensor import provide
from tests.support.recorded import Recorded

Event = dict[str, Any]


def of_task(events: list[Event], task: str, kind: str) -> Event:
    [found] = [one for one in events if one["job"]["name"] == f"lineage.{task}" and one["eventType"] == kind]
    return found


@pytest.mark.thorough("integration/test_lineage: what is reported, without Airflow")
def test_tasks_report_recorded_tables_with_their_columns(
    airflow_db: None,
    connection: None,
    dsn: str,
    pg: Any,
    journal: Journal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pg.cursor().execute(
        "create table orders (id bigint primary key, total numeric(12,2), secret text);"
        "create table notes (id int primary key, words text[])"
    )
    provide(monkeypatch, dsn)
    shop = Recorded(
        dsn,
        lake="s3a://lakes/shop/",
        exclude_columns=("public.orders.secret",),
        per_table={"public.orders": {"history": True}},
        commit_ts_column=True,
    )
    file, log = tmp_path / "events", tmp_path / "log"
    transport = {"type": "file", "log_file_path": str(file), "append": True}
    monkeypatch.setenv("AIRFLOW__OPENLINEAGE__TRANSPORT", json.dumps(transport))
    monkeypatch.setenv("STAND_IN_ARGS", f"--journal {journal.path} --exit 0")
    monkeypatch.setenv("LINEAGE_PIPELINE", shop.pipeline.to_json())
    program = airflow_program.start(["dags", "test", "lineage"], log)
    program.join(600)
    assert program.exitcode == 0, log.read_text()[-5000:]
    assert SECRET not in file.read_text()
    found = [json.loads(line) for line in file.read_text().splitlines()]
    source = psycopg2.extensions.parse_dsn(dsn)
    namespace = f"postgres://{source['host']}:{source['port']}"
    for kind in ("START", "COMPLETE"):
        event = of_task(found, "replicate", kind)
        assert [(one["namespace"], one["name"]) for one in event["inputs"]] == [
            (namespace, f"{source['dbname']}.public.notes"),
            (namespace, f"{source['dbname']}.public.orders"),
        ]
        outputs = {one["name"]: one for one in event["outputs"]}
        assert {one["namespace"] for one in outputs.values()} == {"s3://lakes"}
        orders, history = outputs["shop/public/orders"], outputs["shop/public/orders~history"]
        assert set(outputs) == {"shop/public/notes", "shop/public/orders", "shop/public/orders~history"}
        columns = {one["name"]: one["type"] for one in orders["facets"]["schema"]["fields"]}
        assert columns == {
            "id": "long",
            "total": "decimal(12,2)",
            "_pgrepl_commit_lsn": "long",
            "_pgrepl_commit_ts": "timestamp",
        }
        assert orders["facets"]["storage"]["storageLayer"] == "delta"
        lineage = orders["facets"]["columnLineage"]["fields"]
        assert set(lineage) == {"id", "total"} == set(history["facets"]["columnLineage"]["fields"])
        [origin] = lineage["total"]["inputFields"]
        assert (origin["namespace"], origin["name"]) == (namespace, f"{source['dbname']}.public.orders")
        assert (origin["field"], origin["transformations"][0]["subtype"]) == ("total", "IDENTITY")
        [notes] = [one for one in event["inputs"] if one["name"].endswith("notes")]
        assert [one["type"] for one in notes["facets"]["schema"]["fields"]] == ["integer", "text[]"]
    snapshot = of_task(found, "snapshot", "COMPLETE")
    assert [one["name"] for one in snapshot["outputs"]] == ["shop/public/notes"]
    assert [one["name"] for one in snapshot["inputs"]] == [f"{source['dbname']}.public.notes"]
