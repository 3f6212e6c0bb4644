"""PgMaintenanceOperator, against a real server and a real lake."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.replication.app.operations import maintain as operation
from airflow_provider_pgrepl.replication.lake.files import compaction
from tests.airflow.conftest import SECRET
from tests.airflow.test_drift_sensor import Said
from tests.support.kept import Kept
from tests.support.replicated import execute

A = "public.a"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, connection: None, dsn: str, tmp_path: Path) -> Kept:
    execute(dsn, "create table a (id int primary key, v text)", "insert into a values (1, 'x')")
    found = Kept(dsn, tmp_path, ("public.*",))
    found.take(A)
    for number in range(3):
        execute(dsn, f"insert into a values (1{number}, 'y')")
        found.bring_forward(A)
    parts = psycopg2.extensions.parse_dsn(dsn)
    fields = {"conn_type": "pgrepl", "host": parts["host"], "port": int(parts["port"]), "password": SECRET}
    named = {"schema": parts["dbname"], "login": parts["user"]}
    monkeypatch.setenv("AIRFLOW_CONN_PGREPL_DEFAULT", json.dumps({**fields, **named}))
    return found


def operator(kept: Kept, **options: Any) -> Any:
    from airflow_provider_pgrepl.operators.maintenance import PgMaintenanceOperator

    return PgMaintenanceOperator(task_id="t", pipeline=kept.pipeline.to_json(), **options)


def test_a_lake_is_maintained(kept: Kept) -> None:
    report = operator(kept, tables="public.a").execute({})
    (table,) = report["tables"]
    assert (table["files_before"], table["files_after"]) == (4, 1)
    assert json.loads(json.dumps(report)) == report


@pytest.mark.thorough("test_a_lake_is_maintained")
def test_no_tables_are_all_tables(kept: Kept) -> None:
    (table,) = operator(kept, tables="[]").execute({})["tables"]
    assert table["table"] == A


@pytest.mark.thorough("test_failures: an error becomes the failure its class asks for")
def test_unreadable_lake_table_fails_task_without_retry(kept: Kept) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    for entry in Path(kept.lake_path(A), "_delta_log").iterdir():
        entry.write_text("{")
    said = Said()
    with pytest.raises(AirflowFailException, match=r"public\.a: cannot open the lake table"):
        operator(kept).execute(said.context)


def test_a_task_that_is_killed_ends_between_two_commits(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.sdk.exceptions import AirflowException

    task, began = operator(kept), threading.Event()
    real = compaction.compact_thoroughly

    def slow(*arguments: Any) -> Any:
        began.set()
        assert arguments[-1](60.0), "it is asked to end, and does not wait that long"
        return real(*arguments)

    monkeypatch.setattr(operation, "compact_thoroughly", slow)
    killer = threading.Thread(target=lambda: began.wait() and task.on_kill())
    killer.start()
    with pytest.raises(AirflowException, match="stopped on request"):
        task.execute(Said().context)
    killer.join()


@pytest.mark.thorough("test_a_task_that_is_killed_ends_between_two_commits")
def test_a_task_that_has_not_begun_may_be_killed(kept: Kept) -> None:
    operator(kept).on_kill()
