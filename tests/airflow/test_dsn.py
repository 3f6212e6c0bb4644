"""Airflow connections as libpq connection strings."""

from __future__ import annotations

import json
from typing import Any

import psycopg2.extensions
import pytest
from airflow.sdk import Connection

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.hooks.replication import dsn_of


def parsed(conn_type: str = "pgrepl", extra: dict[str, Any] | None = None, **fields: Any) -> dict[str, str]:
    connection = Connection(conn_id="c", conn_type=conn_type, extra=json.dumps(extra or {}), **fields)
    answer: dict[str, str] = psycopg2.extensions.parse_dsn(dsn_of(connection))
    return answer


def test_the_fields_of_a_connection_become_libpq_words() -> None:
    assert parsed(host="db", port=5433, schema="shop", login="app", password="x") == {
        "host": "db",
        "port": "5433",
        "dbname": "shop",
        "user": "app",
        "password": "x",
    }


@pytest.mark.parametrize("secret", ["it's", "back\\slash", "with space", "a=b", "ünï", "%41", '"'])
def test_any_password_survives(secret: str) -> None:
    assert parsed(host="db", password=secret)["password"] == secret


def test_tls_and_other_settings_come_from_the_extra() -> None:
    extra = {"sslmode": "verify-full", "sslrootcert": "/ca.pem", "options": "-c geqo=off", "keepalives": True}
    answer = parsed(host="db", extra=extra)
    assert answer == {"host": "db", **extra, "keepalives": "1"}


def test_empty_fields_of_the_form_are_left_to_libpq() -> None:
    assert parsed(host="db", extra={"sslmode": "", "sslcert": None}) == {"host": "db"}


def test_a_misspelt_extra_is_named_and_not_ignored() -> None:
    with pytest.raises(ConfigError, match="sslmod") as caught:
        parsed(host="db", password="hidden", extra={"sslmod": "require"})
    assert "hidden" not in str(caught.value)


def test_an_existing_postgres_connection_may_keep_the_extras_of_its_provider() -> None:
    extra = {"cursor": "dictcursor", "sslmode": "require"}
    assert parsed("postgres", host="db", extra=extra) == {"host": "db", "sslmode": "require"}


@pytest.mark.parametrize(("conn_type", "extra"), [("mysql", {}), ("postgres", {"iam": True})])
def test_a_connection_that_cannot_serve_is_refused(conn_type: str, extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parsed(conn_type, host="db", extra=extra)
