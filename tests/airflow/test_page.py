"""The page "Replication" as Airflow serves it: logins, permissions, and the connections that it asks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from airflow.api_fastapi.app import create_app, get_auth_manager, purge_cached_app
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from psycopg2.extensions import parse_dsn

from airflow_provider_pgrepl.links.task import PAGE_PREFIX
from airflow_provider_pgrepl.plugins.replication import page_app, state_conn_ids
from airflow_provider_pgrepl.replication.source.connection import Connection
from tests.airflow.conftest import SECRET
from tests.support.page_state import record_pipeline

KEY = "0123456789abcdef" * 8


@pytest.fixture(scope="module")
def client(airflow_db: None) -> Iterator[TestClient]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", KEY)
        purge_cached_app()
        yield TestClient(create_app())
    purge_cached_app()


def headers(role: str | None) -> dict[str, str]:
    token = get_auth_manager().generate_jwt(SimpleAuthManagerUser(username="ann", role=role))
    return {"Authorization": f"Bearer {token}"}


def connection_of(dsn: str) -> str:
    parts = parse_dsn(dsn)
    fields = {"host": parts["host"], "port": int(parts["port"]), "login": parts["user"]}
    return json.dumps({"conn_type": "pgrepl", "schema": parts["dbname"], **fields})


def asked(client: TestClient, path: str, **parameters: str) -> Any:
    answer = client.get(f"{PAGE_PREFIX}/api/{path}", params=parameters, headers=headers("viewer"))
    assert answer.status_code == 200
    return answer.json()


def test_no_route_answers_without_login_or_permission(client: TestClient) -> None:
    routes = [route for route in page_app().routes if isinstance(route, APIRoute)]
    assert len(routes) > 3
    for route in routes:
        address = f"{PAGE_PREFIX}{route.path}"
        codes = client.get(address).status_code, client.get(address, headers=headers(None)).status_code
        assert (route.methods, codes) == ({"GET"}, (401, 403)), route.path


def test_page_and_its_files_may_run_no_other_script(client: TestClient) -> None:
    for path in ("/", "/page.js", "/page.css"):
        answer = client.get(f"{PAGE_PREFIX}{path}", headers=headers("viewer"))
        policy = answer.headers["content-security-policy"]
        assert (answer.status_code, "script-src 'self';" in policy) == (200, True)
        assert "unsafe" not in policy
    assert "<script type=" in client.get(f"{PAGE_PREFIX}/", headers=headers("viewer")).text


def test_page_shows_pipelines_tables_and_history(
    client: TestClient, dsn: str, pg: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_pipeline(dsn, pg, "shop", 3)
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_STATE", connection_of(dsn))
    assert asked(client, "databases") == {"databases": ["pgrepl_default", "shop_state"]}
    [pipeline] = asked(client, "pipelines", database="shop_state")["pipelines"]
    assert pipeline["name"] == "shop"
    tables = asked(client, "tables", database="shop_state", pipeline="shop")["tables"]
    assert len(tables) == 6
    where = {"database": "shop_state", "pipeline": "shop", "schema": "public", "name": "customers"}
    assert asked(client, "table", **where)["events"][0]["to_state"] == "paused"


def test_unreachable_database_is_shown_without_its_password(client: TestClient) -> None:
    error = asked(client, "pipelines", database="pgrepl_default")["error"]
    assert error["error"] == "SourceConnectionError"
    assert SECRET not in json.dumps(error)


def test_connection_of_another_kind_is_not_used(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_MAIL", "smtp://mail.example.com")
    error = asked(client, "pipelines", database="mail")["error"]
    assert error["reason"] == "connection mail is not one of a state database"


def test_configured_connections_are_the_only_ones(
    airflow_db: None, dsn: str, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__PGREPL__STATE_CONN_IDS", "eu, us ,eu")
    monkeypatch.setenv("AIRFLOW_CONN_EU", connection_of(dsn))
    assert list(state_conn_ids()) == ["eu", "us"]
    assert asked(client, "pipelines", database="eu")["error"]["error"] == "StateError"
    unknown = asked(client, "pipelines", database="us")["error"]["reason"]
    assert unknown == "connection us cannot be used: AirflowNotFoundException"
