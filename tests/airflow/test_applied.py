"""PgAppliedSensor and lake_asset over a real state database, in a real Airflow. No app runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.progress import TableMerges
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.airflow import airflow_program
from tests.airflow.conftest import SECRET, eventually
from tests.airflow.test_drift_sensor import Said, event_of, provide
from tests.support.recorded import Recorded

DAGS = Path(__file__).parent / "dags"
NINE = datetime(2026, 1, 31, 9, tzinfo=UTC)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, connection: None, dsn: str, pg: Any) -> Recorded:
    pg.cursor().execute("create table a (id int primary key); create table b (id int primary key)")
    provide(monkeypatch, dsn)
    shop = Recorded(dsn)
    # Tables have been streaming for long: a table that began to stream later has no point yet.
    pg.cursor().execute("update _pgrepl.tables set since = '2026-01-01'")
    monkeypatch.setenv("DRIFT_PIPELINE", shop.pipeline.to_json())
    return shop


def report(dsn: str, lsn: int, merged: int = 0, complete_at: datetime | None = None) -> None:
    """Record the progress of a replication app, which need not run any more."""
    with StateDatabase(dsn, "test") as state_db:
        merges = {"public/a": TableMerges(0.1, 1, 1, position=str(LSN(merged)))}
        state_db.write_progress(
            "shop",
            applied_lsn=LSN(lsn),
            applied_commit_ts=NINE,
            complete_at=complete_at,
            table_merges=merges,
        )


def sensor(shop: Recorded, **options: Any) -> Any:
    from airflow_provider_pgrepl.sensors.applied import PgAppliedSensor

    given = {"pipeline": shop.pipeline, "tables": ["public.a"], "as_of": NINE, **options}
    return PgAppliedSensor(task_id="applied", **given)


def test_sensor_succeeds_once_streaming_table_is_complete_as_of_the_time(shop: Recorded, dsn: str) -> None:
    assert sensor(shop).poke(Said().context) is False
    report(dsn, 100, complete_at=NINE + timedelta(seconds=59))
    assert sensor(shop).poke(Said().context) is False
    assert sensor(shop, settle_s=59).poke(Said().context) is True
    report(dsn, 100, complete_at=NINE + timedelta(seconds=60))
    assert sensor(shop, as_of="2026-01-31T10:00:00+01:00").poke(Said().context) is True
    shop.set_state("public.b", TableState.PAUSED)
    assert sensor(shop).poke(Said().context) is True
    assert sensor(shop, tables="public.a,public.b").poke(Said().context) is False


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tables": ["public.c"]}, "the pipeline does not have the tables public.c"),
        ({"tables": "[]"}, "tables: is empty"),
        ({"as_of": "9 o'clock"}, 'as_of: "9 o\'clock" is not a time'),
        ({"as_of": "2026-01-31T09:00:00"}, "has no time zone"),
        ({"settle_s": -1}, "settle_s: -1"),
    ],
)
def test_invalid_argument_fails_without_retry(shop: Recorded, options: Any, says: str) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    with pytest.raises(AirflowFailException, match=says):
        sensor(shop, **options).poke(Said().context)


def test_trigger_waits_while_state_is_unreachable_and_shows_no_secret(
    shop: Recorded, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    from airflow_provider_pgrepl.triggers import AppliedTrigger

    fields = {"pipeline": "shop", "state_conn_id": "pgrepl_default", "as_of": NINE.isoformat()}
    trigger = AppliedTrigger(**fields, tables=["public.a"], settle_s=0.0, poke_interval_s=0.1, deadline=0.0)
    assert SECRET not in json.dumps(trigger.serialize())
    assert event_of(trigger)["status"] == "timeout"
    report(dsn, 100, complete_at=NINE)
    assert event_of(trigger) == {"status": "applied"}
    provide(monkeypatch, dsn, port=1)
    found = event_of(trigger)
    assert (found["status"], found["reason"][:27]) == ("timeout", "the state cannot be read: c")


@pytest.mark.parametrize("mode", ["poke", "deferrable"])
@pytest.mark.thorough("the same test, deferrable", "poke")
def test_run_succeeds_once_table_is_complete(shop: Recorded, dsn: str, airflow_db: None, mode: str) -> None:
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(str(DAGS))
    assert bag.import_errors == {}
    (task,) = bag.dags[f"applied_{mode}"].test().get_task_instances()
    assert task.state == "failed"
    report(dsn, 100, complete_at=NINE + timedelta(minutes=1))
    (task,) = bag.dags[f"applied_{mode}"].test().get_task_instances()
    assert task.state == "success"


def test_asset_of_a_table_has_one_uri_and_no_secret() -> None:
    from airflow_provider_pgrepl.assets import lake_asset

    assert lake_asset("shop", "public.orders").uri == "pgrepl://shop/public/orders"
    odd = lake_asset("shop", 'public."a/b c"')
    assert odd.uri == "pgrepl://shop/public/a%2Fb%20c"
    assert odd.watchers[0].trigger.table == 'public."a/b c"'
    with pytest.raises(ConfigError, match="table: "):
        lake_asset("shop", "")


def test_trigger_of_asset_yields_points_with_changes_of_its_table(shop: Recorded, dsn: str) -> None:
    from airflow_provider_pgrepl.triggers import ConsistentPointTrigger

    fields = {"pipeline": "shop", "state_conn_id": "pgrepl_default", "every_s": 0.0, "poll_interval_s": 0.01}
    trigger = ConsistentPointTrigger(**fields, table="public.a")

    async def lsns() -> list[str]:
        found = []
        async for event in trigger.run():
            found.append(event.payload["lsn"])
            if len(found) == 1:
                report(dsn, 200, 50)  # without a change of the table
                report(dsn, 300, 250)
            else:
                return found
        return found

    report(dsn, 100, 50)
    assert asyncio.run(lsns()) == [str(LSN(100)), str(LSN(300))]
    assert SECRET not in json.dumps(trigger.serialize())


@pytest.mark.thorough("test_trigger_of_asset_yields_points_with_changes_of_its_table, unit/test_applied")
def test_triggerer_adds_asset_events_at_points_with_changes_and_continues_after_a_restart(
    shop: Recorded, dsn: str, airflow_db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db

    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "0123456789abcdef" * 8)
    DagBundlesManager().sync_bundles_to_db()
    sync_bag_to_db(DagBag(str(DAGS / "applied_dag.py"), bundle_path=DAGS), "dags-folder", None)
    log = tmp_path / "triggerer.log"

    def wait_for(*lsns: int) -> None:
        wanted = [str(LSN(lsn)) for lsn in lsns]
        eventually(lambda: [one["lsn"] for one in payloads()] == wanted, f"events at {wanted}", 300)

    report(dsn, 100, 50)
    triggerer = airflow_program.start(["triggerer", "--skip-serve-logs"], log)
    try:
        wait_for(100)
        report(dsn, 200, 50)
        report(dsn, 300, 250)
        wait_for(100, 300)
    finally:
        end(triggerer)
    triggerer = airflow_program.start(["triggerer", "--skip-serve-logs"], log)
    try:
        eventually(lambda: log.read_text().count("trigger") > 0, "the log of the triggerer")
        report(dsn, 400, 350)
        wait_for(100, 300, 400)
    finally:
        end(triggerer)
    assert payloads()[0] == {
        "pipeline": "shop",
        "table": "public.a",
        "lsn": str(LSN(100)),
        "commit_time": NINE.isoformat(),
    }
    assert SECRET not in log.read_text()


def payloads() -> list[dict[str, Any]]:
    from airflow.models.asset import AssetEvent
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        return [one.extra["payload"] for one in session.scalars(select(AssetEvent).order_by(AssetEvent.id))]


def end(triggerer: Any) -> None:
    os.killpg(triggerer.pid, signal.SIGTERM)
    triggerer.join(60)
    if triggerer.is_alive():
        os.killpg(triggerer.pid, signal.SIGKILL)
        triggerer.join(60)
