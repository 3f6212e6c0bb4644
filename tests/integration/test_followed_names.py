"""Renamed tables that a pipeline follows: how they are found by name, and that nothing is hidden less."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift
from airflow_provider_pgrepl.replication.app.tables import new_tables, requested_at
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.receiver.relation_tracker import FollowedNames
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.preflight.selection import SelectedTables, select_tables
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.recorded import Recorded
from tests.support.replicated import execute

A, B, C = (TableName("public", name) for name in "abc")


@pytest.fixture
def shop(dsn: str) -> Recorded:
    execute(
        dsn,
        "create table a (id int primary key)",
        "create table b (id int primary key)",
        "create table c (id int primary key)",
        "create schema other",
    )
    return Recorded(dsn, on_rename="follow", per_table={"public.c": {"on_rename": "stop"}})


def selected(shop: Recorded) -> SelectedTables:
    with shop.access.source("test") as source, shop.access.state_db("test") as state_db:
        return select_tables(source, shop.pipeline, requested_at(source, state_db, shop.pipeline))


def names(found: SelectedTables) -> Mapping[str, str]:
    """Return the names at the source by the names in the pipeline."""
    return {str(one.table): str(one.source_table) for one in found.relations}


def test_renamed_tables_are_selected_under_their_earlier_names(shop, dsn, pg):
    execute(dsn, "alter table a rename to z", "alter table b set schema other")
    execute(dsn, "alter table c rename to y")
    found = selected(shop)
    assert names(found) == {"public.a": "public.z", "public.b": "other.b", "public.y": "public.y"}
    assert [str(table) for table in found.problems] == ["public.c"]
    with shop.access.state_db("test") as state_db:
        assert new_tables(pg, shop.pipeline, state_db.read_tables("shop")) == [TableName("public", "y")]
    report = check_drift(shop.access)
    assert {table.table: table.kind for table in report.tables} == {
        "public.a": "safe",
        "public.b": "safe",
        "public.c": "unsafe",
    }
    assert shop.record("public.a").state is TableState.STREAMING


def test_table_whose_name_another_has_is_not_followed(shop, dsn):
    execute(dsn, "alter table b rename to d", "alter table a rename to b")
    found = selected(shop)
    assert names(found) == {"public.a": "public.b", "public.c": "public.c", "public.d": "public.d"}
    assert [str(table) for table in found.problems] == ["public.b"]
    check_drift(shop.access)
    assert shop.record("public.a").state is TableState.STREAMING
    assert shop.record("public.b").state is TableState.ERRORED
    execute(dsn, "create table a (id int primary key)")
    assert names(selected(shop))["public.a"] == "public.a"
    check_drift(shop.access)
    assert shop.record("public.a").state is TableState.ERRORED


def test_records_of_another_database_give_no_table_its_name(shop, dsn):
    """The same oids are other tables there, as after a restore from a dump."""
    execute(dsn, "alter table a rename to z")
    with shop.access.source("test") as source, shop.access.state_db("test") as state_db:
        with source.cursor() as cursor:
            cursor.execute("update _pgrepl.pipelines set system_identifier = 1")
        found = select_tables(source, shop.pipeline, requested_at(source, state_db, shop.pipeline))
    assert names(found) == {"public.b": "public.b", "public.c": "public.c", "public.z": "public.z"}


def test_receiver_finds_the_name_under_which_a_table_was_recorded(
    shop: Recorded, dsn: str, pg: psycopg2.extensions.connection, tmp_path: Path
) -> None:
    ours, another = (RelationIndex(relations_uri(str(tmp_path))) for _ in range(2))
    a, c = find_relation(pg, A), find_relation(pg, C)
    assert a is not None
    assert c is not None
    found = FollowedNames(shop.pipeline, ours, pg)
    assert found.find(a.oid, TableName("public", "z")) == TableName("public", "z")
    another.add_selected(Epoch(1), [a, c])
    execute(dsn, "alter table a rename to z", "alter table c rename to y")
    assert found.find(a.oid, TableName("public", "z")) == A
    assert found.find(c.oid, TableName("public", "y")) == TableName("public", "y")
    assert found.former == {A}
    execute(dsn, "create table a (id int primary key)")
    assert found.find(a.oid, TableName("public", "z")) == TableName("public", "z")
    execute(dsn, "drop table a")
    assert found.find(a.oid, TableName("public", "z")) == A
    # A snapshot takes it under its present name.
    renamed = find_relation(pg, TableName("public", "z"))
    assert renamed is not None
    another.add_selected(Epoch(1), [renamed])
    assert found.find(a.oid, TableName("public", "z")) == TableName("public", "z")
