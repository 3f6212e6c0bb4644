"""Renamed tables that a pipeline follows: how they are found by name, and that nothing is hidden less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.errors import SnapshotError
from airflow_provider_pgrepl.replication.app.copy_states import CopyStates
from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift
from airflow_provider_pgrepl.replication.app.drift_check.migration import check_migration
from airflow_provider_pgrepl.replication.app.lineage import read_lineage
from airflow_provider_pgrepl.replication.app.tables import (
    followed_names,
    new_tables,
    record_names,
    requested_at,
)
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation, find_tables
from airflow_provider_pgrepl.replication.source.preflight.selection import SelectedTables, select_tables
from airflow_provider_pgrepl.replication.source.publication import Publishing, add_tables, read_publication
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState
from tests.support.recorded import Recorded
from tests.support.replicated import execute

A, B, C, Y, Z = (TableName("public", name) for name in "abcyz")


class Shop(Recorded):
    """Three tables: renames of `a` and `b` are followed, those of `c` are not."""

    def __init__(self, dsn: str, lake: Path) -> None:
        options = {"on_rename": "follow", "per_table": {"public.c": {"on_rename": "stop"}}}
        super().__init__(dsn, lake=str(lake), **options)
        with self.access.state_db("test") as state_db:
            for record in state_db.read_tables("shop").values():
                assert record.relation is not None
                self.index.add(Epoch(1), RelationRecord.of_catalog(record.relation))

    @property
    def index(self) -> RelationIndex:
        """The relation index as a new process reads it."""
        return RelationIndex(relations_uri(self.pipeline.lake_root))

    def begin(self) -> None:
        """Do what an app does at its start."""
        with self.access.state_db("test") as state_db:
            record_names(self.pipeline, state_db, Epoch(1))

    def copied(self, relation: Relation | None) -> None:
        """Record the name of a table as its snapshot does."""
        assert relation is not None
        self.index.add_selected(Epoch(1), [relation])

    def find(self, pg: psycopg2.extensions.connection, oid: int, now: str) -> str:
        return str(followed_names(self.pipeline).find(pg, oid, TableName.parse(now)))


@pytest.fixture
def shop(dsn: str, tmp_path: Path) -> Shop:
    execute(
        dsn,
        "create table a (id int primary key)",
        "create table b (id int primary key)",
        "create table c (id int primary key)",
        "create schema other",
    )
    shop = Shop(dsn, tmp_path)
    shop.begin()
    return shop


def selected(shop: Shop, **more: frozenset[TableName]) -> SelectedTables:
    with shop.access.source("test") as source, shop.access.state_db("test") as state_db:
        requested = replace(requested_at(source, state_db, shop.pipeline), **more)
        return select_tables(source, shop.pipeline, requested)


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
        assert new_tables(pg, shop.pipeline, state_db.read_tables("shop")) == [Y]
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
    # `b` is the name of a table of the pipeline, and `a` must not be copied as that.
    assert names(found) == {"public.b": "public.b", "public.c": "public.c", "public.d": "public.d"}
    assert [str(table) for table in found.problems] == ["public.a"]
    check_drift(shop.access)
    assert shop.record("public.a").state is TableState.ERRORED
    assert shop.record("public.b").state is TableState.ERRORED


def test_replacement_of_a_followed_table_changes_what_is_published(shop, dsn, pg):
    oid = find_tables(pg, [A])[A]
    followed = followed_names(shop.pipeline).followed()
    publishing = Publishing(shop.pipeline.publication, [oid])
    execute(dsn, "alter table a rename to z")
    renamed = publishing.digest(pg, followed.values())
    assert publishing.read_status(pg, lambda _: {A})[oid].moved_to is None
    # As an application does that still uses the earlier name.
    execute(dsn, "create view a as select * from z")
    assert publishing.digest(pg, followed.values()) == renamed
    assert publishing.read_status(pg, lambda _: {A})[oid].moved_to is None
    assert names(selected(shop))["public.a"] == "public.z"
    execute(dsn, "drop view a", "create table a (id int primary key)")
    assert publishing.digest(pg, followed.values()) != renamed
    assert publishing.read_status(pg, lambda _: {A})[oid].moved_to == Z
    assert shop.find(pg, oid, "public.z") == "public.z"
    assert names(selected(shop))["public.a"] == "public.a"
    check_drift(shop.access)
    assert shop.record("public.a").state is TableState.ERRORED


def test_table_of_the_pipeline_that_replaces_another_is_not_followed(shop, dsn, pg):
    """Otherwise the first one could not be brought up to date: its name would be that of the second."""
    execute(dsn, "alter table a rename to z", "alter table b rename to a")
    tables = find_tables(pg, [A, Z])
    assert shop.find(pg, tables[A], "public.a") == "public.a"
    assert shop.find(pg, tables[Z], "public.z") == "public.z"
    found = selected(shop)
    assert names(found) == {"public.a": "public.a", "public.c": "public.c", "public.z": "public.z"}
    assert [str(table) for table in found.problems] == ["public.b"]
    shop.copied(find_relation(pg, A))
    assert names(selected(shop))["public.a"] == "public.a"
    # From now on that table is `a`, also if it is renamed again.
    execute(dsn, "alter table a rename to x")
    assert shop.find(pg, tables[A], "public.x") == "public.a"
    assert shop.find(pg, tables[Z], "public.z") == "public.z"


def test_removed_table_does_not_come_back_under_its_new_name(shop, dsn, pg):
    with shop.access.state_db("test") as state_db:
        state_db.set_state("shop", A, TableState.REMOVED)
        state_db.set_membership("shop", A, "removed")
    execute(dsn, "alter table a rename to z")
    assert names(selected(shop)) == {"public.b": "public.b", "public.c": "public.c"}
    assert names(selected(shop, added=frozenset({Z})))["public.z"] == "public.z"
    shop.copied(find_relation(pg, Z))
    oid = find_tables(pg, [Z])[Z]
    execute(dsn, "alter table z rename to y")
    assert shop.find(pg, oid, "public.y") == "public.z"


def test_table_is_not_replicated_under_two_names(shop, dsn, pg):
    execute(dsn, "alter table a rename to z")
    found = selected(shop, added=frozenset({Z}))
    assert names(found)["public.a"] == "public.z"
    assert "is replicated as public.a" in str(found.problems[Z])


def test_records_of_another_database_give_no_table_its_name(shop, dsn):
    """The same oids are other tables there, as after a restore from a dump."""
    execute(dsn, "alter table a rename to z")
    with shop.access.source("test") as source, shop.access.state_db("test") as state_db:
        with source.cursor() as cursor:
            cursor.execute("update _pgrepl.pipelines set system_identifier = 1")
        found = select_tables(source, shop.pipeline, requested_at(source, state_db, shop.pipeline))
    assert names(found) == {"public.b": "public.b", "public.c": "public.c", "public.z": "public.z"}
    # Nor do those of the lake, once it has an epoch of another one.
    shop.index.begin_source(Epoch(2))
    assert followed_names(shop.pipeline).recorded == {}


def test_settings_of_a_followed_parent_apply_to_its_children(shop, dsn):
    execute(dsn, "create table child (primary key (id)) inherits (a)", "alter table a rename to z")
    hidden = replace(shop.pipeline, exclude_columns=("public.a.v",), tables=("public.a", "public.child"))
    execute(dsn, "alter table z add v int")
    with shop.access.source("test") as source, shop.access.state_db("test") as state_db:
        found = select_tables(source, hidden, requested_at(source, state_db, hidden))
    assert "inherits column public.a.v" in str(found.problems[TableName("public", "child")])


def test_lineage_names_the_table_at_the_source(shop, dsn):
    execute(dsn, "alter table a rename to z")
    with shop.access.state_db("test") as state_db:
        (relation,) = (one for one in selected(shop).relations if one.table == A)
        record = state_db.read_tables("shop")[A]
        assert record.position_lsn is not None
        state_db.record_relation("shop", relation, record.position_lsn)
    (found,) = read_lineage(shop.access, [A])
    assert found.source.name.endswith(".public.z")
    assert found.lake[0].name.endswith("/public/a")


@pytest.mark.parametrize("state", [TableState.ERRORED, TableState.REMOVED, TableState.PAUSED])
def test_tables_of_an_earlier_version_are_followed_in_every_state(dsn, tmp_path, state):
    """Snapshots of that version recorded no names."""
    execute(dsn, "create table a (id int primary key)", "create table c (id int primary key)")
    shop = Shop(dsn, tmp_path)
    shop.set_state("public.a", state)
    with shop.access.state_db("test") as state_db:
        state_db.set_membership("shop", A, "removed" if state is TableState.REMOVED else "configured")
    execute(dsn, "alter table a rename to z")
    shop.begin()
    assert shop.index.pipeline_names()[find_oid(shop, "public.z")] == A
    expected = {} if state is TableState.REMOVED else {"public.a": "public.z"}
    assert names(selected(shop)) == {"public.c": "public.c", **expected}
    before = shop.index.all()
    shop.begin()
    assert shop.index.all() == before


def find_oid(shop: Shop, name: str) -> int:
    table = TableName.parse(name)
    with shop.access.source("test") as source:
        return find_tables(source, [table])[table]


def test_name_of_a_dropped_table_can_be_taken(shop, dsn, pg):
    oid = find_oid(shop, "public.a")
    execute(dsn, "alter table a rename to z", "drop table b", "alter table z rename to b")
    assert shop.find(pg, oid, "public.b") == "public.a"


def test_table_is_found_at_another_server_by_the_name_that_it_had_last(shop, dsn):
    execute(dsn, "alter table a rename to z")
    with shop.access.state_db("test") as state_db:
        (relation,) = (one for one in selected(shop).relations if one.table == A)
        record = state_db.read_tables("shop")[A]
        assert record.position_lsn is not None
        state_db.record_relation("shop", relation, record.position_lsn)
    # A dump that was restored elsewhere has other oids.
    execute(dsn, "alter table z rename to old", "create table z (like old including all)", "drop table old")
    with shop.access.source("test") as source, shop.access.state_db("test") as state_db:
        with source.cursor() as cursor:
            cursor.execute("update _pgrepl.pipelines set system_identifier = 1")
        found = select_tables(source, shop.pipeline, requested_at(source, state_db, shop.pipeline))
    assert names(found) == {"public.a": "public.z", "public.b": "public.b", "public.c": "public.c"}


def test_failed_run_takes_a_renamed_table_out_of_the_publication_again(shop, dsn, pg):
    execute(dsn, f"alter publication {shop.pipeline.publication} drop table a", "alter table a rename to z")
    shop.set_state("public.a", TableState.REMOVED)
    (relation,) = (one for one in selected(shop).relations if one.table == A)
    with (
        pytest.raises(SnapshotError),
        shop.access.state_db("test") as state_db,
        CopyStates(dsn, shop.pipeline, state_db) as states,
    ):
        states.join(add_tables(dsn, shop.pipeline.publication, [relation], 5.0))
        states.begin([relation])
        raise SnapshotError("lost")
    published = read_publication(pg, shop.pipeline.publication)
    assert published is not None
    assert published.tables == {B, C}


def test_failed_copy_under_another_name_restores_the_earlier_one(shop, dsn, monkeypatch):
    execute(dsn, "alter table c rename to y")
    (renamed,) = (one for one in selected(shop).relations if one.table == Y)
    with shop.access.state_db("test") as state_db:
        with pytest.raises(SnapshotError), CopyStates(dsn, shop.pipeline, state_db) as states:
            states.begin([renamed])
            assert shop.record("public.c").state is TableState.ERRORED
            raise SnapshotError("lost")
        assert shop.record("public.c").state is TableState.CATCHING_UP
        read = state_db.read_tables

        def read_before_it_streams(pipeline: str) -> Mapping[TableName, TableRecord]:
            records = read(pipeline)
            monkeypatch.undo()
            shop.set_state("public.c", TableState.STREAMING)
            return records

        monkeypatch.setattr(state_db, "read_tables", read_before_it_streams)
        with CopyStates(dsn, shop.pipeline, state_db) as states:
            states.begin([renamed])
    assert shop.record("public.c").state is TableState.ERRORED


def test_migration_that_renames_is_tried_without_the_lake(dsn):
    execute(dsn, "create table a (id int primary key)")
    for policy, kind in (("follow", "safe"), ("stop", "unsafe")):
        pipeline = Pipeline(name="shop", lake="s3://nowhere/x", tables=("public.*",), on_rename=policy)
        report = check_migration(dsn, pipeline, "alter table a rename to z")
        assert [(table.table, table.kind) for table in report.tables] == [("public.a", kind)]
