"""The operators on single tables, and the teardown, against a real server."""

from __future__ import annotations

import json
import re
from typing import Any

import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.errors import DriftError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.airflow.conftest import SECRET
from tests.airflow.test_drift_sensor import Said
from tests.support.recorded import Recorded


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, connection: None, dsn: str, pg: Any, tmp_path: Any) -> Recorded:
    pg.cursor().execute("create table a (id int primary key); create table b (id int primary key)")
    parts = psycopg2.extensions.parse_dsn(dsn)
    fields = {"conn_type": "pgrepl", "host": parts["host"], "port": int(parts["port"]), "password": SECRET}
    named = {"schema": parts["dbname"], "login": parts["user"]}
    monkeypatch.setenv("AIRFLOW_CONN_PGREPL_DEFAULT", json.dumps({**fields, **named}))
    return Recorded(dsn, lake=str(tmp_path / "lake"))


def operate(name: str, shop: Recorded, module: str = "tables", **options: Any) -> Any:
    """Run an operator; what it returns."""
    import importlib

    kind = getattr(importlib.import_module(f"airflow_provider_pgrepl.operators.{module}"), name)
    return kind(task_id="t", pipeline=shop.pipeline.to_json(), **options).execute({})


def test_tables_are_paused_and_resumed(shop: Recorded, capfd: pytest.CaptureFixture[str]) -> None:
    result = operate("PgPauseTablesOperator", shop, tables="public.a, public.b")
    assert result == {"tables": ["public.a", "public.b"]}
    assert "paused: public.a, public.b" in "".join(capfd.readouterr())
    assert shop.record("public.a").state is TableState.PAUSED
    assert operate("PgResumeTablesOperator", shop, tables="['public.a']") == {"tables": ["public.a"]}
    assert shop.record("public.a").state is TableState.CATCHING_UP
    assert shop.record("public.b").state is TableState.PAUSED


def test_a_table_is_removed(shop: Recorded, pg: Any) -> None:
    result = operate("PgRemoveTablesOperator", shop, tables=["public.a"], drop_lake_tables="False")
    assert result == {"tables": ["public.a"], "dropped": False}
    record = shop.record("public.a")
    assert (record.state, record.membership) == (TableState.REMOVED, "removed")
    with pg.cursor() as cursor:
        cursor.execute("select tablename from pg_publication_tables where pubname = 'pgrepl_shop'")
        assert cursor.fetchall() == [("b",)]


def test_retrying_without_names_tries_what_is_in_error(shop: Recorded) -> None:
    assert operate("PgRetryTablesOperator", shop) == {"tables": [], "refused": {}}


def test_retry_operator_names_still_errored_table_once(
    shop: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from airflow_provider_pgrepl.operators.tables import PgRetryTablesOperator
    from airflow_provider_pgrepl.replication.app.operations import tables

    name = TableName("public", "a")
    refused = tables.RetryResult(name, DriftError("public.a: the table was dropped", "remove it"))
    monkeypatch.setattr(tables, "retry_tables", lambda *_: (refused,))
    with pytest.raises(AirflowFailException) as caught:
        PgRetryTablesOperator(task_id="t", pipeline=shop.pipeline.to_json()).execute(Said().context)
    assert str(caught.value) == "public.a: the table was dropped\n  hint: remove it"


def test_retry_operator_does_not_return_table_that_another_process_changed(
    shop: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_provider_pgrepl.replication.app.operations import tables

    found = tuple(tables.RetryResult(TableName("public", name), None, name == "b") for name in "ab")
    monkeypatch.setattr(tables, "retry_tables", lambda *_: found)
    assert operate("PgRetryTablesOperator", shop) == {"tables": ["public.a"], "refused": {}}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("PgPauseTablesOperator", {"tables": ["public.nope"]}, r"public\.nope"),
        ("PgPauseTablesOperator", {"tables": []}, "no table was named"),
        ("PgRemoveTablesOperator", {"tables": ["public.a", "public.b"]}, "teardown"),
        ("PgRemoveTablesOperator", {"tables": ["public.a"], "drop_lake_tables": "maybe"}, "drop_lake_tables"),
        ("PgRetryTablesOperator", {"tables": ["public.a"]}, "changelog"),
    ],
)
def test_permanent_table_operator_error_fails_without_retry_or_state_change(
    shop: Recorded, name: str, options: dict[str, Any], says: str
) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    with pytest.raises(AirflowFailException, match=says):
        operate(name, shop, **options)
    assert shop.record("public.a").state is TableState.STREAMING


def test_a_pipeline_is_torn_down_when_it_is_meant(shop: Recorded, pg: Any) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    with pg.cursor() as cursor:
        cursor.execute("update _pgrepl.tables set position_lsn = 'FFFFFFFF/0'")
    with pytest.raises(AirflowFailException, match="was restored to an earlier state") as caught:
        operate("PgTeardownOperator", shop, "teardown")
    named = re.search(r"--give-up (\S+),", str(caught.value))
    assert named is not None
    look = operate("PgTeardownOperator", shop, "teardown", report_only="True", give_up=named[1])
    result = operate("PgTeardownOperator", shop, "teardown", give_up=named[1])
    assert result == look
    assert any("publication pgrepl_shop" in what for what in result["dropped"])
    with pg.cursor() as cursor:
        cursor.execute("select count(*) from pg_publication")
        assert cursor.fetchone() == (0,)
    assert operate("PgTeardownOperator", shop, "teardown") == {"dropped": [], "kept": []}
