"""app/creek/source_tables.py: the publication and the functions in the schema _creek are made where there are
none."""

from __future__ import annotations

from contextlib import closing

import pytest

from airflow_provider_pgrepl.errors import TableError
from airflow_provider_pgrepl.replication.app.creek.deployment import Deployment
from airflow_provider_pgrepl.replication.app.creek.source_tables import SourceTables
from tests.conftest import closing_connection
from tests.support.replicated import execute

THEIRS = (
    "create function _creek.{} (pub text, _tbl regclass) returns void language sql as 'select 1 -- theirs'"
)
BOTH = ("add_table", "remove_table")


def prepare(dsn: str, listed: str = "public.t", **variables: str) -> None:
    environment = {
        **variables,
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


KEYLESS = {
    "keyless": ("create table keyless (id int)",),
    "virtual": (
        "create table virtual (id int primary key, g int generated always as (id + 1) virtual)",
        "alter table virtual replica identity full",
    ),
    "child": ("create table parent (id int primary key)", "create table child () inherits (parent)"),
    "part": (
        "create table root (id int) partition by range (id)",
        "create table part partition of root for values from (0) to (10)",
    ),
}
"""Statements that create a table whose changes the source refuses once it, or the one above, is published."""
ABOVE = {"child": "parent", "part": "root"}


@pytest.mark.differs_by_major("virtual generated columns are there from 18 on")
@pytest.mark.parametrize("refused", KEYLESS)
def test_tables_whose_changes_the_source_would_refuse_are_not_published(dsn, pg, refused) -> None:
    if refused == "virtual" and pg.info.server_version < 180000:
        return  # it has no such thing
    execute(dsn, "create table t (id int primary key)", *KEYLESS[refused])
    with pytest.raises(TableError, match=f"public.{refused}: while it is published, the source refuses"):
        prepare(dsn, f"public.t, public.{ABOVE.get(refused, refused)}")
    with pg.cursor() as cursor:
        cursor.execute("select from pg_publication")
        assert cursor.rowcount == 0


def test_table_of_inserts_is_published_without_identity(dsn) -> None:
    execute(dsn, "create table keyless (id int)")
    prepare(dsn, "public.keyless", PGREPL_PIPELINE_OPTIONS='{"insert_only": ["public.keyless"]}')


def test_table_with_a_stored_generated_column_in_its_identity_is_published(dsn) -> None:
    execute(
        dsn,
        "create table t (id int primary key, g int generated always as (id + 1) stored)",
        "alter table t replica identity full",
    )
    prepare(dsn)
    execute(dsn, "insert into t values (1)", "update t set id = 2")
