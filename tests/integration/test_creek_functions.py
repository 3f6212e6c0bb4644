"""app/creek/source_tables.py: the functions in the schema _creek are made where there are none."""

from __future__ import annotations

from contextlib import closing

import pytest

from airflow_provider_pgrepl.replication.app.creek.deployment import Deployment
from airflow_provider_pgrepl.replication.app.creek.source_tables import SourceTables
from tests.conftest import closing_connection
from tests.support.replicated import execute

THEIRS = (
    "create function _creek.{} (pub text, _tbl regclass) returns void language sql as 'select 1 -- theirs'"
)
BOTH = ("add_table", "remove_table")


def prepare(dsn: str, listed: str = "public.t") -> None:
    environment = {
        "PG_URI": dsn,
        "PG_PUBLICATION_NAME": "creek_pub",
        "PG_PUBLICATION_SLOT": "creek_slot",
        "NATS_URI": "nats://127.0.0.1:1",
        "PGREPL_LAKE": "/lake",
        "PG_TABLES": listed,
    }
    with closing(SourceTables(Deployment.of(environment))) as tables:
        tables.prepare()


def theirs(dsn: str) -> set[str]:
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select proname::text from pg_proc where prosrc like '%theirs'")
        return {name for (name,) in cursor.fetchall()}


@pytest.mark.parametrize("kept", [(), ("add_table",), BOTH])
def test_functions_of_others_stay_and_are_named(dsn, caplog, kept) -> None:
    execute(dsn, "create table t (id int primary key)", "create table more (id int primary key)")
    execute(dsn, "create schema _creek", *map(THEIRS.format, kept))
    for _ in range(2):
        prepare(dsn)
        assert theirs(dsn) == set(kept)
    assert [name for name in BOTH if f"the function _creek.{name} was not made by" in caplog.text] == list(
        kept
    )
    execute(dsn, *(f"drop function _creek.{name}" for name in kept), "select 1")
    prepare(dsn)
    execute(dsn, "select _creek.add_table('creek_pub', 'more')")
    execute(dsn, "select _creek.remove_table('creek_pub', 'more')")
