"""PgReplicationHealthSensor against a real server, in a real Airflow. No app runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import DriftError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.writer import create_changelog
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from tests.airflow.conftest import SECRET
from tests.airflow.test_drift_sensor import Said, event_of, provide
from tests.support.recorded import Recorded

DAGS = Path(__file__).parent / "dags"


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, connection: None, dsn: str, pg: Any, tmp_path: Path) -> Recorded:
    pg.cursor().execute("create table a (id int primary key, x int)")
    shop = Recorded(dsn, lake=str(tmp_path), name=f"shop_{os.urandom(4).hex()}")
    slot, server = shop.pipeline.slot, read_server(pg)
    with pg.cursor() as cursor:
        cursor.execute("select lsn::text from pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
        at = LSN.parse(cursor.fetchone()[0])
    record = EpochRecord(
        shop.pipeline.name,
        Epoch(1),
        server.system_identifier,
        server.timeline,
        slot,
        shop.pipeline.publication,
        5,
        at,
        database=server.database,
        database_oid=server.database_oid,
    )
    create_changelog(changelog_uri(shop.pipeline.lake_root), record)
    provide(monkeypatch, dsn)
    monkeypatch.setenv("DRIFT_PIPELINE", shop.pipeline.to_json())
    return shop


def stop_table(shop: Recorded, dsn: str) -> None:
    with StateDatabase(dsn, "test") as state_db:
        error = DriftError("public.a: column x was dropped", "add it again")
        state_db.mark_errored(shop.pipeline.name, shop.record("public.a"), error)


def sensor(shop: Recorded, **options: Any) -> Any:
    from airflow_provider_pgrepl.sensors.health import PgReplicationHealthSensor

    return PgReplicationHealthSensor(task_id="health", pipeline=shop.pipeline, **options)


def test_sensor_fails_with_sentence_for_each_problem_and_pushes_report_to_xcom(
    shop: Recorded, dsn: str
) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    stop_table(shop, dsn)
    said = Said()
    with pytest.raises(AirflowFailException) as caught:
        sensor(shop).execute(said.context)
    assert f"failure: slot {shop.pipeline.slot} is not read by any process" in str(caught.value)
    assert "failure: table public.a is errored: DriftError: public.a: column x was dropped" in str(
        caught.value
    )
    problems = {problem["kind"]: problem for problem in said.pushed["return_value"]["problems"]}
    assert problems["table_errored"]["object"] == "public.a"
    assert problems["table_errored"]["hint"] == "add it again"
    assert sensor(shop, fail_on="never").execute(Said().context) == said.pushed["return_value"]


@pytest.mark.parametrize(
    ("options", "says"), [({"fail_on": "always"}, "fail_on: 'always'"), ({"lag_s": 0}, "lag_s")]
)
def test_invalid_argument_fails_without_retry(shop: Recorded, options: Any, says: str) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    with pytest.raises(AirflowFailException, match=says):
        sensor(shop, **options).execute(Said().context)


def test_trigger_reports_error_of_unreachable_source_without_secret(
    shop: Recorded, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    from airflow_provider_pgrepl.triggers import HealthTrigger

    trigger = HealthTrigger(pipeline=shop.pipeline.to_json(), limits={"is_continuous": False})
    assert SECRET not in json.dumps(trigger.serialize())
    assert event_of(trigger)["report"]["pipeline"] == shop.pipeline.name
    provide(monkeypatch, dsn, port=1)
    assert event_of(trigger)["error"] == "SourceConnectionError"


@pytest.mark.parametrize("mode", ["poke", "deferrable"])
@pytest.mark.thorough("the same test, deferrable", "poke")
def test_run_fails_while_table_is_errored(shop: Recorded, dsn: str, airflow_db: None, mode: str) -> None:
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(str(DAGS))
    assert bag.import_errors == {}
    (task,) = bag.dags[f"health_{mode}"].test().get_task_instances()
    assert task.state == "success"
    stop_table(shop, dsn)
    (task,) = bag.dags[f"health_{mode}"].test().get_task_instances()
    assert (task.state, task.try_number) == ("failed", 1)
