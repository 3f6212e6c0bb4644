"""PgSchemaDriftSensor against a real server, in a real Airflow."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.airflow.conftest import SECRET
from tests.support.recorded import Recorded

DAGS = Path(__file__).parent / "dags"


def provide(monkeypatch: pytest.MonkeyPatch, dsn: str, name: str = "PGREPL_DEFAULT", **changed: Any) -> None:
    parts = psycopg2.extensions.parse_dsn(dsn)
    fields = {
        "conn_type": "pgrepl",
        "host": parts["host"],
        "port": int(parts["port"]),
        "schema": parts["dbname"],
        "login": parts["user"],
        "password": SECRET,
        **changed,
    }
    monkeypatch.setenv(f"AIRFLOW_CONN_{name}", json.dumps(fields))


@pytest.fixture
def execute(pg: Any) -> Any:
    return lambda *statements: [pg.cursor().execute(statement) for statement in statements]


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, connection: None, dsn: str, execute: Any) -> Recorded:
    execute("create table a (id int primary key, x int)", "create table b (id int primary key, x int)")
    recorded = Recorded(dsn)
    provide(monkeypatch, dsn)
    monkeypatch.setenv("DRIFT_PIPELINE", recorded.pipeline.to_json())
    return recorded


class Said:
    """Stands for what Airflow hands a running task."""

    task_id, dag_id, run_id, try_number = "t", "d", "r", 1

    def __init__(self) -> None:
        self.pushed: dict[str, Any] = {}

    def xcom_push(self, key: str, value: Any) -> None:
        self.pushed[key] = value

    @property
    def context(self) -> Any:
        return {"ti": self}


def sensor(shop: Recorded, **options: Any) -> Any:
    from airflow_provider_pgrepl.sensors.drift import PgSchemaDriftSensor

    return PgSchemaDriftSensor(task_id="drift", pipeline=shop.pipeline, poke_interval=0.05, **options)


def failing(shop: Recorded, **options: Any) -> str:
    """The words with which a sensor fails."""
    from airflow.sdk.exceptions import AirflowFailException

    with pytest.raises(AirflowFailException) as caught:
        sensor(shop, **options).execute(Said().context)
    return str(caught.value)


def test_without_drift_the_report_is_returned(shop: Recorded) -> None:
    report = sensor(shop).execute(Said().context)
    assert (report["checked"], report["tables"]) == (2, [])


def test_unsafe_drift_fails_task_marks_table_errored_and_pushes_report_to_xcom(
    shop: Recorded, execute: Any
) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    execute("alter table a rename x to y")
    said = Said()
    with pytest.raises(AirflowFailException, match=r"public\.a: unsafe, now errored") as caught:
        sensor(shop).execute(said.context)
    assert "hint:" in str(caught.value)
    assert said.pushed["return_value"]["tables"][0]["table"] == "public.a"
    assert shop.record("public.a").state is TableState.ERRORED
    assert shop.record("public.b").state is TableState.STREAMING


def test_it_fails_on_what_it_is_told_to(shop: Recorded, execute: Any) -> None:
    execute("drop table a")
    assert "public.a" in failing(shop, fail_on="any", mark_errored=False)
    report = sensor(shop, fail_on="never", mark_errored="False").execute(Said().context)
    assert report["tables"][0]["kind"] == "unsafe"
    assert shop.record("public.a").state is TableState.STREAMING


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fail_on": "always"}, "fail_on: 'always'"),
        ({"mark_errored": "perhaps"}, "mark_errored: 'perhaps'"),
        ({"sql": "", "migration_file": "x"}, "set only one"),
        ({"sql": ""}, "database_conn_id"),
        ({"migration_file": "/nowhere/x.sql", "database_conn_id": "pgrepl_default"}, "cannot read"),
    ],
)
def test_arguments_that_cannot_be_are_named(shop: Recorded, options: Any, says: str) -> None:
    assert says in failing(shop, **options)


def test_waiting_for_drift_ends_when_there_is_some(shop: Recorded, execute: Any) -> None:
    from airflow.sdk.exceptions import AirflowSensorTimeout

    with pytest.raises(AirflowSensorTimeout):
        sensor(shop, until_drift=True, timeout=0.1).execute(Said().context)
    waiting = sensor(shop, until_drift=True, fail_on="never", timeout=30)
    assert not waiting.poke(Said().context)
    execute("drop table a")
    assert waiting.execute(Said().context)["tables"]


def test_a_source_that_is_away_is_waited_for_only_while_waiting_for_drift(
    shop: Recorded, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    provide(monkeypatch, dsn, port=1)
    assert not sensor(shop, until_drift=True).poke(Said().context)
    with pytest.raises(AirflowException, match="SourceConnectionError") as caught:
        sensor(shop).execute(Said().context)
    assert not isinstance(caught.value, AirflowFailException), "Airflow is to try again"
    assert SECRET not in str(caught.value)


def test_rescheduled_it_gives_its_slot_back_between_checks(shop: Recorded) -> None:
    from airflow.sdk.exceptions import AirflowRescheduleException

    class Rescheduled(Said):
        def get_first_reschedule_date(self, context: Any) -> None:
            return None

    with pytest.raises(AirflowRescheduleException):
        sensor(shop, until_drift=True, mode="reschedule").execute(Rescheduled().context)
    assert sensor(shop, mode="reschedule").execute(Rescheduled().context)["checked"] == 2


# --- a migration ---


def test_a_migration_is_tried_on_another_database(
    shop: Recorded, monkeypatch: pytest.MonkeyPatch, dsn: str, tmp_path: Path
) -> None:
    provide(monkeypatch, dsn, "CI_COPY")
    file = tmp_path / "42_drop.sql"
    file.write_text("begin;\nalter table a drop column id;\ncommit;\n")
    said = failing(shop, migration_file=str(file), database_conn_id="ci_copy", deferrable=True)
    assert "public.a: unsafe" in said
    assert shop.record("public.a").state is TableState.STREAMING
    report = sensor(shop, sql="create index on a (x)", database_conn_id="ci_copy").execute(Said().context)
    assert (report["checked"], report["tables"]) == (2, [])
    assert "line 2" in failing(shop, sql="select 1;\nselect nope", database_conn_id="ci_copy")


# --- the triggerer ---


def trigger(shop: Recorded, **options: Any) -> Any:
    from airflow_provider_pgrepl.triggers import DriftTrigger

    chosen = {"until_drift": False, "poke_interval_s": 0.05, "deadline": time.time() + 30, **options}
    return DriftTrigger(pipeline=shop.pipeline.to_json(), mark_errored=True, **chosen)


def event_of(given: Any) -> dict[str, Any]:
    async def first() -> Any:
        async for event in given.run():
            return event.payload
        return None

    return dict(asyncio.run(first()))


def test_the_trigger_survives_serialization_and_holds_no_secret(shop: Recorded) -> None:
    from airflow.sdk._shared.module_loading import import_string

    path, fields = trigger(shop).serialize()
    assert SECRET not in json.dumps(fields)
    assert import_string(path)(**json.loads(json.dumps(fields))).serialize() == (path, fields)


def test_the_trigger_says_what_it_found_and_what_went_wrong(
    shop: Recorded, execute: Any, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    assert event_of(trigger(shop))["report"]["checked"] == 2
    assert event_of(trigger(shop, until_drift=True, deadline=time.time()))["status"] == "timeout"
    execute("drop table a")
    assert event_of(trigger(shop, until_drift=True))["report"]["tables"][0]["marked_errored"]
    execute("drop publication pgrepl_shop")
    assert event_of(trigger(shop))["error"] == "PublicationError"
    provide(monkeypatch, dsn, port=1)
    assert event_of(trigger(shop))["error"] == "SourceConnectionError"
    # Nothing was seen until the deadline: that is no proof that nothing has drifted.
    unseen = event_of(trigger(shop, until_drift=True, deadline=time.time()))
    assert (unseen["status"], unseen["error"]) == ("failed", "SourceConnectionError")
    monkeypatch.delenv(f"AIRFLOW_CONN_{shop.pipeline.conn_id.upper()}")
    unknown = event_of(trigger(shop))
    assert (unknown["status"], unknown["error"]) == ("failed", "ConfigError")
    assert shop.pipeline.conn_id in unknown["message"]


def test_a_deadline_after_checks_says_that_the_last_one_could_not_be_made(
    shop: Recorded, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    from airflow.sdk.exceptions import AirflowSensorTimeout

    waiting = trigger(shop, until_drift=True, deadline=time.time() + 600)
    check = waiting._check

    def check_and_lose_the_source() -> Any:
        found = check()
        provide(monkeypatch, dsn, port=1)
        if waiting._failure:
            waiting.deadline = 0.0
        return found

    waiting._check = check_and_lose_the_source
    event = event_of(waiting)
    assert (event["status"], event["error"]) == ("timeout", "SourceConnectionError")
    with pytest.raises(AirflowSensorTimeout, match="the last check could not be made: cannot connect"):
        sensor(shop, deferrable=True, until_drift=True).execute_complete(Said().context, event)


def test_an_event_becomes_the_end_of_the_task(shop: Recorded) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    waiting = sensor(shop, deferrable=True)
    for error, failure in (("PublicationError", AirflowFailException), ("FencedError", AirflowException)):
        with pytest.raises(AirflowException, match="gone") as caught:
            waiting.execute_complete(
                Said().context, {"status": "failed", "error": error, "message": "gone", "hint": "make it"}
            )
        assert type(caught.value) is failure
        assert "make it" in str(caught.value)


# --- a whole run ---


@pytest.mark.parametrize(
    ("dag_id", "before", "after"),
    [
        ("drift_poke", "success", "failed"),
        ("drift_deferrable", "success", "failed"),
        ("drift_waiting", "failed", "failed"),
        ("drift_waiting_deferrable", "failed", "failed"),
        ("drift_soft", "success", "skipped"),
        ("drift_soft_deferrable", "success", "skipped"),
    ],
)
@pytest.mark.thorough(
    "the same test, soft and deferrable; test_waiting_for_drift_ends_when_there_is_some",
    "drift_soft-success-skipped",
    "drift_waiting-failed-failed",
    "drift_waiting_deferrable-failed-failed",
)
def test_a_run_ends_as_it_is_to(
    shop: Recorded, execute: Any, airflow_db: None, dag_id: str, before: str, after: str
) -> None:
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(str(DAGS))
    assert bag.import_errors == {}
    (task,) = bag.dags[dag_id].test().get_task_instances()
    assert task.state == before
    execute("alter table a rename x to y")
    (task,) = bag.dags[dag_id].test().get_task_instances()
    assert (task.state, task.try_number) == (after, 1)
    assert shop.record("public.a").state is TableState.ERRORED
