"""PgReplicationHook against a real server."""

from __future__ import annotations

import json
from typing import Any

import psycopg2.extensions
import pytest
from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_provider_pgrepl.errors import SlotError, SourceConnectionError
from airflow_provider_pgrepl.hooks.replication import PgReplicationHook
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from tests.airflow.conftest import SECRET


def provide(monkeypatch: pytest.MonkeyPatch, dsn: str, conn_type: str = "pgrepl", **changed: Any) -> None:
    parts = psycopg2.extensions.parse_dsn(dsn)
    fields = {
        "conn_type": conn_type,
        "host": parts["host"],
        "port": int(parts["port"]),
        "schema": parts["dbname"],
        "login": parts["user"],
        "password": SECRET,
        **changed,
    }
    monkeypatch.setenv("AIRFLOW_CONN_SOURCE", json.dumps(fields))


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch, dsn: str, pg: Any) -> PgReplicationHook:
    pg.cursor().execute(
        "create table a (id int primary key); create table b (id int primary key);"
        "create table keyless (x int)"
    )
    provide(monkeypatch, dsn)
    return PgReplicationHook("source")


def test_missing_connection_error_says_where_to_add_it(airflow_db: None) -> None:
    with pytest.raises(AirflowNotFoundException, match="`nosuch` isn't defined\n  hint: add") as caught:
        PgReplicationHook("nosuch").dsn()
    assert "AIRFLOW_CONN_NOSUCH" in str(caught.value)


def test_a_good_connection_tests_well(hook: PgReplicationHook) -> None:
    good, message = hook.test_connection()
    assert good
    assert "wal_level logical" in message


def test_a_connection_test_names_the_right_that_is_missing(
    hook: PgReplicationHook, monkeypatch: pytest.MonkeyPatch, dsn: str, pg: Any
) -> None:
    pg.cursor().execute("drop role if exists plain_hook_user; create role plain_hook_user login")
    provide(monkeypatch, dsn, login="plain_hook_user")
    good, message = PgReplicationHook("source").test_connection()
    assert not good
    assert "REPLICATION" in message
    pg.cursor().execute("drop role plain_hook_user")


def test_a_server_that_does_not_answer_is_named_without_the_password(
    monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    provide(monkeypatch, dsn, port=1)
    good, message = PgReplicationHook("source").test_connection()
    assert not good
    assert "127.0.0.1:1" in message
    assert SECRET not in message
    with pytest.raises(SourceConnectionError):
        PgReplicationHook("source").get_conn()


def test_an_existing_postgres_connection_serves_as_well(
    hook: PgReplicationHook, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    provide(monkeypatch, dsn, "postgres", extra={"cursor": "dictcursor"})
    assert PgReplicationHook("source").get_records("select current_database()") == [
        (psycopg2.extensions.parse_dsn(dsn)["dbname"],)
    ]


def test_sql_runs_as_with_any_database_hook(hook: PgReplicationHook) -> None:
    hook.run("insert into public.a values (1), (2)")
    assert hook.get_first("select count(*) from public.a") == (2,)
    assert hook.inspector.get_table_names(schema="public") == ["a", "b", "keyless"]


def test_only_tables_that_can_be_replicated_are_listed(hook: PgReplicationHook) -> None:
    assert hook.list_tables(["public.*"]) == [TableName("public", "a"), TableName("public", "b")]


def test_a_publication_is_created_inspected_and_dropped(hook: PgReplicationHook) -> None:
    hook.create_publication("pub", ["public.a"])
    found = hook.get_publication("pub")
    assert found is not None
    assert found.tables == {TableName("public", "a")}
    assert found.via_root
    hook.drop_publication("pub")
    assert hook.get_publication("pub") is None


def test_a_slot_is_created_inspected_and_dropped_and_its_lag_is_known(
    hook: PgReplicationHook, dsn: str
) -> None:
    name = f"hook_{psycopg2.extensions.parse_dsn(dsn)['dbname']}"
    point = hook.create_slot(name)
    before = hook.lag(name)
    assert before.confirmed_flush_lsn == point
    hook.run("insert into public.a select generate_series(1, 1000)")
    after = hook.lag(name)
    assert after.unconfirmed_bytes >= before.unconfirmed_bytes + 1000
    assert after.retained_bytes >= after.unconfirmed_bytes
    assert not after.active
    hook.drop_slot(name)
    assert hook.get_slot(name) is None
    with pytest.raises(SlotError, match=name):
        hook.lag(name)


def test_a_pipeline_is_checked_and_nothing_is_created(hook: PgReplicationHook, pg: Any) -> None:
    hook.check(Pipeline(name="shop", lake="/lake", tables=("public.*",), trust_table_owners=True))
    with pg.cursor() as cursor:
        cursor.execute("select count(*) from pg_publication")
        assert cursor.fetchone() == (0,)
