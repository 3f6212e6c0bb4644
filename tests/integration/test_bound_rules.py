"""Settings hold for the table and the column that they named at its copy, also after these are renamed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from airflow_provider_pgrepl.errors import ConfigError, TableError
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from airflow_provider_pgrepl.replication.app.snapshot import (
    add_tables,
    begin_new_epoch,
    resnapshot,
    take_tables,
)
from airflow_provider_pgrepl.replication.app.table_watch import recorded_names
from airflow_provider_pgrepl.replication.app.tables import requested_of
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.copy import snapshot_holder
from airflow_provider_pgrepl.replication.source.preflight.selection import (
    RequestedTables,
    SelectedTables,
    resolve_tables,
    select_tables,
)
from airflow_provider_pgrepl.replication.source.slot_creation import export_snapshot
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.kept import Kept
from tests.support.replicated import execute

pytestmark = pytest.mark.slow

E, OTHER = "public.e", "public.other"
EXCLUDED = ("public.e.ssn",)
SECRET = "classified"
RENAMED_COLUMN = ("alter table e rename ssn to ssn_old", "alter table e add ssn text")


@pytest.fixture
def kept(dsn: str, tmp_path: Path) -> Kept:
    execute(
        dsn,
        "create table e (id int primary key, ssn text, amount numeric, note text)",
        "create table other (id int primary key)",
        f"insert into e values (1, '{SECRET}', 1, 'n')",
    )
    return Kept(dsn, tmp_path, ("public.*",), exclude_columns=EXCLUDED)


def taken(kept: Kept, **options: Any) -> Kept:
    kept.configure(**options)
    kept.take(E, OTHER)
    return kept


def selected(kept: Kept) -> SelectedTables:
    """Return the tables that a snapshot would choose."""
    with kept.access.state_db("test") as state_db, kept.source() as source:
        records = state_db.read_tables(kept.pipeline.name)
        known = recorded_names(source, kept.pipeline, read_epoch(kept.changelog), records, None)
        return select_tables(source, kept.pipeline, requested_of(records, None, known))


def problems(kept: Kept) -> dict[str, str]:
    """Return why tables that exist would not be copied."""
    found = {str(table): error.message for table, error in selected(kept).problems.items()}
    return {table: message for table, message in found.items() if "does not exist" not in message}


def assert_guarded(kept: Kept) -> None:
    for file in Path(kept.pipeline.lake_root).rglob("*"):
        if file.suffix == ".parquet":
            assert SECRET not in str(pq.read_table(file, partitioning=None).to_pydict()), file
        if file.is_file():
            assert SECRET not in file.read_bytes().decode("latin-1"), file


def test_a_pattern_does_not_take_in_a_renamed_table_with_its_excluded_column(kept: Kept) -> None:
    taken(kept)
    execute(kept.dsn, "alter table e rename to e_new", f"insert into e_new values (2, '{SECRET}', 2, 'm')")
    outcome = take_tables(kept.access)
    assert {str(table) for table in outcome.failed} == {E, "public.e_new"}
    assert outcome.copied == ()
    record = kept.record("public.e_new")
    assert record.state is TableState.ERRORED
    assert "column public.e_new.ssn is, or may be, public.e.ssn of exclude_columns" in record.reason
    kept.receive()
    assert_guarded(kept)


def test_a_renamed_table_that_is_removed_and_added_again_needs_its_settings(kept: Kept) -> None:
    taken(kept)
    execute(kept.dsn, "alter table e rename to e_new")
    remove_tables(kept.access, [E])
    with pytest.raises(TableError, match=r"name public\.e_new\.ssn there"):
        add_tables(kept.access, [TableName("public", "e_new")])
    assert "public.e_new" not in kept.states()
    kept.configure(exclude_columns=("public.e_new.ssn",))
    assert problems(kept) == {}


@pytest.mark.thorough("test_a_column_renamed_after_the_tables_were_chosen_is_not_copied")
def test_a_resnapshot_does_not_copy_an_excluded_column_under_another_name(kept: Kept) -> None:
    taken(kept)
    execute(kept.dsn, *RENAMED_COLUMN)
    outcome = resnapshot(kept.access, [TableName("public", "e")])
    (error,) = outcome.failed.values()
    assert "column public.e.ssn_old is, or may be, public.e.ssn of exclude_columns" in error.message
    assert kept.states() == {E: "errored", OTHER: "streaming"}
    assert_guarded(kept)
    kept.configure(exclude_columns=(*EXCLUDED, "public.e.ssn_old"))
    assert problems(kept) == {}


def test_a_table_that_need_not_be_copied_goes_on_and_is_warned_of(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    taken(kept)
    execute(kept.dsn, *RENAMED_COLUMN)
    outcome = take_tables(kept.access)
    assert (outcome.copied, outcome.failed) == ((), {})
    assert kept.states() == {E: "streaming", OTHER: "streaming"}
    assert "public.e: column public.e.ssn_old is, or may be" in caplog.text
    assert "cannot be copied until the setting is changed" in caplog.text


@pytest.mark.thorough("test_the_state_knows_what_settings_named_when_the_lake_is_lost")
def test_a_new_epoch_is_refused_before_anything_is_dropped(kept: Kept) -> None:
    taken(kept)
    execute(kept.dsn, *RENAMED_COLUMN)
    slot = kept.slot()
    with pytest.raises(TableError, match=r"public\.e\.ssn_old is, or may be"):
        begin_new_epoch(kept.access)
    assert kept.slot() == slot


def test_the_state_knows_what_settings_named_when_the_lake_is_lost(kept: Kept) -> None:
    taken(kept)
    execute(kept.dsn, *RENAMED_COLUMN)
    shutil.rmtree(kept.pipeline.lake_root)
    with pytest.raises(TableError, match=r"public\.e\.ssn_old is, or may be"):
        begin_new_epoch(kept.access, [kept.pipeline.lake_root])


def test_a_column_renamed_after_the_tables_were_chosen_is_not_copied(kept: Kept) -> None:
    """Settings are compared once more with the table as the keeper holds it."""
    taken(kept)
    execute(kept.dsn, *RENAMED_COLUMN)
    with kept.source() as source:
        renamed = find_relation(source, TableName.parse(E), kept.pipeline.publication)
    assert renamed is not None
    kept.set_states(E, TableState.SNAPSHOTTING)
    no_spark: Any = None
    with (
        kept.access.state_db("test") as state_db,
        export_snapshot(kept.dsn, "pgrepl_test_copy", timeout_s=30) as exported,
        snapshot_holder.keep(kept.dsn, exported.snapshot, [renamed], kept.pipeline.publication, 5) as held,
    ):
        epoch = read_epoch(kept.changelog)
        copy = SnapshotCopy(no_spark, kept.dsn, kept.pipeline, state_db, epoch, held, exported)
        failed = copy.run().failed
    assert "column public.e.ssn_old is, or may be" in failed[TableName("public", "e")].message
    assert kept.record(E).state is TableState.ERRORED


@pytest.mark.parametrize(
    ("options", "ddl", "said"),
    [
        ({"types": {"public.e.amount": "string"}}, ["alter table e rename to f"], "amount of types"),
        ({"text_columns": ("public.e.amount",)}, ["alter table e rename to f"], "amount of text_columns"),
        (
            {"per_column": {"public.e.amount": {"numeric_nan": "null"}}},
            ["alter table e rename to f"],
            "amount of per_column",
        ),
        ({"per_table": {"public.e": {"deletes": "soft"}}}, ["alter table e rename to f"], "per_table names"),
        ({"per_table": {"public.e": {"history": True}}}, ["alter table e rename to f"], "per_table names"),
        ({"insert_only": ("public.e",)}, ["alter table e rename to f"], "insert_only names"),
        (
            {"exclude_columns": EXCLUDED},
            ["create schema sales", "alter table e set schema sales"],
            "column sales.e.ssn is",
        ),
        (
            {"exclude_columns": EXCLUDED},
            ["alter table e rename to f", "create table e (id int primary key, ssn text)"],
            "column public.f.ssn is",
        ),
        (
            {"types": {"public.e.amount": "string"}},
            ["alter table e rename amount to gross", "alter table e add amount numeric"],
            "column public.e.gross is",
        ),
    ],
    ids=[
        "types",
        "text_columns",
        "infinity",
        "deletes",
        "history",
        "insert_only",
        "schema",
        "swapped",
        "column",
    ],
)
def test_settings_by_an_earlier_name_keep_the_table_out(
    kept: Kept, options: dict[str, Any], ddl: Sequence[str], said: str
) -> None:
    taken(kept, **{"exclude_columns": (), "tables": ("public.*", "sales.*"), **options})
    assert problems(kept) == {}
    execute(kept.dsn, *ddl)
    (message,) = problems(kept).values()
    assert said in message


def test_an_empty_setting_by_the_present_name_is_a_decision(kept: Kept) -> None:
    by_name = {"public.e": {"deletes": "soft"}}
    taken(kept, exclude_columns=(), per_table=by_name, types={"public.e.amount": "string"})
    execute(kept.dsn, "alter table e rename to f")
    kept.configure(
        per_table={**by_name, "public.f": {}},
        per_column={"public.f.amount": {}},
    )
    assert problems(kept) == {}


def test_a_new_table_waits_while_an_excluded_one_is_gone(kept: Kept) -> None:
    """Dropped and made again under another name, nothing but its columns tell that it is the same."""
    taken(kept)
    execute(
        kept.dsn, "create table e2 as select * from e", "alter table e2 add primary key (id)", "drop table e"
    )
    assert list(problems(kept)) == ["public.e2"]
    outcome = take_tables(kept.access)
    assert "exclude_columns names columns of public.e, which no longer exists" in (
        outcome.failed[TableName("public", "e2")].message
    )
    remove_tables(kept.access, [E])
    assert list(problems(kept)) == ["public.e2"]
    kept.configure(exclude_columns=("public.e2.ssn",))
    assert problems(kept) == {}


def test_a_partition_keeps_what_is_excluded_of_its_partitioned_table(kept: Kept) -> None:
    execute(
        kept.dsn,
        "create table p (id int primary key, ssn text) partition by range (id)",
        "create table p_1 partition of p for values from (0) to (9)",
        "create table p_2 (ssn text, id int primary key)",
        "alter table p attach partition p_2 for values from (10) to (19)",
    )
    kept.configure(exclude_columns=("public.p.ssn",))
    kept.take("public.p", E, OTHER)
    execute(kept.dsn, "alter table p detach partition p_1", "alter table p detach partition p_2")
    execute(kept.dsn, "alter table p_2 rename ssn to other")
    found = problems(kept)
    assert "name public.p_1.ssn there" in found["public.p_1"]
    assert "name the column that has its values there" in found["public.p_2"]
    kept.configure(exclude_columns=("public.p.ssn", "public.p_1.ssn", "public.p_2.other"))
    assert problems(kept) == {}


def test_a_child_by_inheritance_needs_the_exclusion_of_its_parent(kept: Kept) -> None:
    """An application that adds a child each month, as before partitions existed, names none of them in a
    setting.
    """
    taken(kept)
    execute(
        kept.dsn,
        "create table e_1 (primary key (id), more text) inherits (e)",
        "create table e_1_1 (primary key (id)) inherits (e_1)",
        f"insert into e_1 values (2, '{SECRET}', 2, 'm')",
    )
    found = problems(kept)
    assert set(found) == {"public.e_1", "public.e_1_1"}
    said = "inherits column public.e.ssn, which exclude_columns names: name public.e_1.ssn there"
    assert said in found["public.e_1"]
    kept.configure(exclude_columns=(*EXCLUDED, "public.e_1.ssn"))
    assert list(problems(kept)) == ["public.e_1_1"]
    kept.configure(exclude_columns=(*EXCLUDED, "public.e_1.ssn", "public.e_1_1.ssn"))
    assert problems(kept) == {}


@pytest.mark.thorough("test_a_child_by_inheritance_needs_the_exclusion_of_its_parent")
def test_a_child_by_inheritance_waits_for_the_present_name_of_an_excluded_column(kept: Kept) -> None:
    taken(kept)
    execute(kept.dsn, *RENAMED_COLUMN, "create table e_1 (primary key (id)) inherits (e)")
    assert "inherits from public.e: column public.e.ssn_old is, or may be" in problems(kept)["public.e_1"]
    outcome = take_tables(kept.access)
    assert {str(table) for table in outcome.failed} == {"public.e_1"}
    assert kept.states() == {E: "streaming", OTHER: "streaming", "public.e_1": "errored"}
    assert_guarded(kept)


GENERATED = "generated always as (upper(ssn)) stored"


def test_a_column_that_is_generated_from_an_excluded_one_is_excluded_too(kept: Kept) -> None:
    """A generated column holds the excluded values, as the tsvector of a full-text search does."""
    execute(
        kept.dsn,
        f"alter table e add loud text {GENERATED}, add twice numeric generated always as (amount * 2) stored",
        f"create table p (id int primary key, ssn text, loud text {GENERATED}) partition by range (id)",
        "create table p_1 partition of p for values from (0) to (9)",
    )
    kept.configure(exclude_columns=(*EXCLUDED, "public.p.ssn"))
    with kept.source() as source:
        found = select_tables(source, kept.pipeline, RequestedTables()).problems
        assert {str(table): error.message for table, error in found.items()} == {
            f"public.{name}": f"public.{name}: column public.{name}.loud is generated from public.{name}.ssn,"
            " which exclude_columns names: name it there"
            for name in "ep"
        }
        kept.configure(exclude_columns=(*EXCLUDED, "public.e.loud", "public.p.ssn", "public.p.loud"))
        assert select_tables(source, kept.pipeline, RequestedTables()).problems == {}


@pytest.mark.thorough("test_a_column_that_is_generated_from_an_excluded_one_is_excluded_too")
def test_a_column_that_is_generated_from_an_excluded_one_later_is_not_followed(kept: Kept) -> None:
    taken(kept)
    execute(kept.dsn, f"alter table e add loud text {GENERATED}", "insert into e (id) values (2)")
    kept.receive()
    assert "loud is generated from public.e.ssn" in problems(kept)[E]
    assert "column loud was added and the table rewritten" in str(kept.bring_forward(E).error)


def test_a_table_that_becomes_a_partition_brings_its_exclusion(kept: Kept) -> None:
    execute(kept.dsn, "create table p (id int primary key, ssn text) partition by range (id)")
    execute(kept.dsn, "alter table e drop column amount, drop column note")
    taken(kept)
    execute(kept.dsn, "alter table p attach partition e for values from (0) to (9)")
    assert "exclude_columns names public.e.ssn" in problems(kept)["public.p"]


def test_a_column_that_always_had_its_name_can_be_copied_whatever_became_of_others(kept: Kept) -> None:
    """The stream's message allows for several layouts, and every catalog gave the column one name."""
    execute(kept.dsn, "drop table e", "create table e (id int primary key, ssn text, note text)")
    taken(kept)
    execute(
        kept.dsn,
        f"insert into e values (2, '{SECRET}', 'n')",
        "alter table e drop column ssn",
        "alter table e add column ssn text",
        f"insert into e values (3, 'n', '{SECRET}')",
    )
    kept.receive()
    assert problems(kept) == {}
    assert_guarded(kept)


def test_a_column_that_may_have_had_the_name_is_not_copied(kept: Kept) -> None:
    """The receiver saw neither the column's name when it held secrets, nor which of two layouts it was."""
    execute(kept.dsn, "drop table e", "create table e (id int primary key, ssn text, note text)")
    taken(kept)
    execute(
        kept.dsn,
        "alter table e drop column ssn",
        "alter table e rename note to ssn",
        "alter table e add column note text",
        f"insert into e values (3, '{SECRET}', 'n')",
        "alter table e rename ssn to x",
    )
    kept.receive()
    assert "column public.e.x is, or may be" in problems(kept)[E]
    assert_guarded(kept)


def test_names_of_another_server_bind_nothing(kept: Kept) -> None:
    """A new epoch may begin at a server whose oids are those of other tables."""
    taken(kept)
    execute(kept.dsn, "alter table e rename to e_new")
    epoch = read_epoch(kept.changelog)
    with kept.source() as source, StateDatabase(kept.dsn, "test") as state_db:
        records = state_db.read_tables(kept.pipeline.name)
        assert recorded_names(source, kept.pipeline, epoch, records, None) is not None
        other = replace(epoch, system_identifier="7")
        assert recorded_names(source, kept.pipeline, other, records, None) is None
        # A new epoch is about to replace that one: what it has selected is of this server.
        recorded, relation = state_db.read_pipeline(kept.pipeline.name), kept.record(E).relation
        assert relation is not None
        found = recorded_names(source, kept.pipeline, other, {}, recorded, [relation])
        assert found is not None
        assert found.oids(TableName.parse(E)) == {relation.oid}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"target_tables": {"public.nothere": "x"}}, "target_tables: public.nothere"),
        ({"target_schemas": {"nothere": "x"}}, "target_schemas: nothere"),
    ],
)
def test_a_catalog_name_for_nothing_is_refused(kept: Kept, setting: dict[str, Any], said: str) -> None:
    kept.configure(**setting)
    with pytest.raises(ConfigError, match=said), kept.source() as source:
        resolve_tables(source, kept.pipeline)
