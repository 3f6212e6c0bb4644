"""Teardown of a pipeline: nothing of what it made is left, whatever is missing or blocks the teardown."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path

import psycopg2
import psycopg2.errors
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from psycopg2.extras import LogicalReplicationConnection

from airflow_provider_pgrepl.errors import (
    BusyError,
    ChangelogError,
    ConfigError,
    LakeError,
    LakeUnavailableError,
    PgReplError,
    Retry,
    StateError,
)
from airflow_provider_pgrepl.replication.app.operations.teardown import teardown
from airflow_provider_pgrepl.replication.app.snapshot import begin_new_epoch, take_tables
from airflow_provider_pgrepl.replication.app.source_ownership import SourceOwnership
from airflow_provider_pgrepl.replication.changelog import writer
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.source.slot import read_slot
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.source_tokens import has_token, write_token
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.conftest import closing_connection
from tests.support.kept import A, B, Kept, kept_tables
from tests.support.replicated import execute, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def kept(dsn, tmp_path):
    return kept_tables(dsn, tmp_path, trust_table_owners=True)


class EndedError(Exception):
    """Stands for the end of the process."""


def end(*_, **__):
    raise EndedError


def left(kept: Kept) -> dict[str, list[str]]:
    """Return the slots, publications and schemas of pipelines that the source still has."""
    queries = {
        "slots": "select slot_name::text from pg_replication_slots where database = current_database()",
        "publications": "select pubname::text from pg_publication",
        "schemas": "select nspname::text from pg_namespace where nspname = '_pgrepl'",
    }
    with closing_connection(kept.dsn) as connection, connection.cursor() as cursor:
        found = {}
        for what, query in queries.items():
            cursor.execute(query)
            found[what] = [name for (name,) in cursor.fetchall()]
    return {what: names for what, names in found.items() if names}


def test_nothing_is_left_at_the_source_and_the_lake_stays(kept):
    planned = teardown(kept.access, dry_run=True)
    assert left(kept).keys() == {"slots", "publications", "schemas"}
    done = teardown(kept.access)
    assert left(kept) == {}
    assert done == planned
    assert done.to_text().splitlines() == [
        f"dropped: slot {kept.pipeline.slot}",
        f"dropped: publication {kept.pipeline.publication}",
        f"dropped: the records of pipeline {kept.pipeline.name}",
        f"kept:    the lake {kept.pipeline.lake_root}: a snapshot into it would begin a new epoch",
    ]
    assert kept.lake_rows(A).num_rows == 0
    again = teardown(kept.access)
    assert (again.dropped, len(again.kept)) == ([], 1)


def test_teardown_says_how_to_reuse_lake_that_could_not_be_marked(kept, monkeypatch):
    def unavailable(*_):
        raise LakeUnavailableError("the changelog cannot be written")

    monkeypatch.setattr(writer, "mark_torn_down", unavailable)
    done = teardown(kept.access)
    assert left(kept) == {}
    assert done.kept[-1] == (
        f"the lake {kept.pipeline.lake_root}: it could not be marked as torn down (the changelog cannot be"
        " written). To use it again, run pgrepl snapshot FILE.json --new-epoch, and again with the --give-up"
        " NAME it prints"
    )
    with pytest.raises(ConfigError) as caught:
        begin_new_epoch(kept.access)
    assert "pgrepl snapshot FILE.json --new-epoch --give-up " in caught.value.hint


def test_snapshot_into_the_lake_that_a_teardown_kept_begins_an_epoch(kept, monkeypatch):
    """Source and state have nothing of the pipeline then, as a copy of the source that was cleaned."""
    kept.receive()
    teardown(kept.access)
    monkeypatch.setattr(SourceOwnership, "claim", end)
    with pytest.raises(EndedError):
        take_tables(kept.access)
    monkeypatch.undo()
    with StateDatabase(kept.dsn, "test") as state_db, kept.source() as source:
        state_db.migrate()
        ownership = SourceOwnership(kept.dsn, source, kept.pipeline, state_db)
        ownership.claim(read_server(source), read_epoch(kept.changelog))
    monkeypatch.setattr(SourceOwnership, "claim", end)
    with pytest.raises(EndedError):
        take_tables(kept.access)


def test_source_without_slot_tokens_and_state_is_not_taken_for_one_after_a_teardown(kept):
    """A copy of it that was cleaned looks like that, while the source goes on."""
    kept.receive()
    execute(
        kept.dsn, f"select pg_drop_replication_slot('{kept.pipeline.slot}')", "drop schema _pgrepl cascade"
    )
    version = DeltaTable(kept.changelog).version()
    for act in (
        lambda: take_tables(kept.access),
        lambda: begin_new_epoch(kept.access),
        lambda: teardown(kept.access),
        lambda: teardown(kept.access, drop_lake=True, dry_run=True),
        lambda: teardown(kept.access, drop_lake=True),
    ):
        with pytest.raises(PgReplError, match="the state database knows nothing of the pipeline"):
            act()
    assert DeltaTable(kept.changelog).version() == version
    assert left(kept).keys() == {"publications"}


def test_the_event_trigger_goes_as_well(kept):
    with kept.source() as source:
        trigger.install(source, kept.pipeline)
    assert "the event trigger" in teardown(kept.access).dropped
    assert left(kept) == {}
    with closing_connection(kept.dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select evtname from pg_event_trigger")
        assert cursor.fetchall() == []


def test_event_trigger_that_the_role_may_not_drop_is_planned_as_kept(kept):
    """A superuser has installed it; the role owns everything else."""
    role, name = f"weak_{kept.pipeline.name}", psycopg2.extensions.parse_dsn(kept.dsn)["dbname"]
    with kept.source() as source:
        trigger.install(source, kept.pipeline)
    owned = "select relname from pg_class where relnamespace = '_pgrepl'::regnamespace and relkind = 'r'"
    with closing_connection(kept.dsn) as connection, connection.cursor() as cursor:
        cursor.execute(f"{owned} and relname not like 'ddl_key%'")
        tables = [found for (found,) in cursor.fetchall()]
    execute(
        kept.dsn,
        f"create role {role} login replication",
        f"grant create on database {name} to {role}",
        f"alter schema _pgrepl owner to {role}",
        f"alter publication {kept.pipeline.publication} owner to {role}",
        *(f"alter table _pgrepl.{table} owner to {role}" for table in tables),
        f"grant {role} to current_user",
    )
    weak = replace(kept.access, dsn=f"{kept.dsn} user={role}", state_dsn=f"{kept.dsn} user={role}")
    try:
        planned = teardown(weak, dry_run=True)
        assert planned.kept[0].startswith("the event trigger: a superuser must run")
        assert teardown(weak) == planned
    finally:
        execute(
            kept.dsn,
            f"reassign owned by {role} to current_user",
            f"drop owned by {role}",
            f"drop role {role}",
        )


def test_a_pipeline_that_was_never_set_up_is_no_error(dsn, tmp_path):
    never = Kept(dsn, tmp_path, ("public.*",))
    assert teardown(never.access, drop_lake=True).to_text() == "nothing to drop"
    assert left(never) == {}


def test_with_the_lake_only_what_is_the_pipelines_goes(kept):
    root = Path(kept.pipeline.lake_root)
    (root / "public" / "notes.txt").write_text("mine")
    write_deltalake(root / "other" / "table", pa.table({"id": [1]}))
    teardown(kept.access, drop_lake=True)
    files = sorted(str(path.relative_to(root)) for path in root.rglob("*") if "_delta_log" not in str(path))
    assert [name for name in files if not name.endswith(".parquet")] == [
        "other",
        "other/table",
        "public",
        "public/notes.txt",
    ]
    assert left(kept) == {}


@pytest.mark.parametrize("description", ['{"layout": 99}', "a table of somebody else's"])
def test_a_lake_whose_changelog_cannot_be_read_is_not_dropped(kept, description):
    DeltaTable(kept.changelog).alter.set_table_description(description)
    with pytest.raises(ChangelogError):
        teardown(kept.access, drop_lake=True)
    assert Path(kept.lake_path("public.a")).exists()
    assert teardown(kept.access).dropped


def test_an_empty_lake_root_goes_as_well(kept):
    teardown(kept.access, drop_lake=True)
    assert not Path(kept.pipeline.lake_root).exists()
    assert teardown(kept.access, drop_lake=True).to_text() == "nothing to drop"


def test_it_can_be_run_again_after_any_step(kept):
    execute(kept.dsn, f"drop publication {kept.pipeline.publication}")
    with kept.source() as source:
        source.cursor().execute("select pg_drop_replication_slot(%s)", (kept.pipeline.slot,))
    Path(kept.pipeline.lake_root).rename(Path(kept.pipeline.lake_root).with_name("gone"))
    done = teardown(kept.access)
    assert left(kept) == {}
    assert done.dropped[-1] == f"the records of pipeline {kept.pipeline.name}"


def test_lake_that_is_not_mounted_is_not_dropped_and_the_state_stays(kept):
    """Its tables would be orphaned on the volume, and the report would say that they are gone."""
    root = Path(kept.pipeline.lake_root)
    root.rename(root.with_name("volume"))
    write_deltalake(kept.lake_path(A), pa.table({"id": [1]}))
    for dry_run in (True, False):
        with pytest.raises(LakeError, match="there is no changelog in it") as caught:
            teardown(kept.access, drop_lake=True, dry_run=dry_run)
    assert "without --drop-lake" in caught.value.hint
    assert left(kept).keys() == {"slots", "publications", "schemas"}
    assert kept.states() == {A: "streaming", B: "streaming"}
    assert DeltaTable(kept.lake_path(A)).version() == 0


@pytest.mark.thorough("test_it_can_be_run_again_after_any_step")
def test_teardown_that_ended_after_the_lake_was_dropped_can_be_repeated(kept, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(EndedError):
        patched.setattr(StateDatabase, "forget_pipeline", end)
        teardown(kept.access, drop_lake=True)
    assert not Path(kept.pipeline.lake_root).exists()
    assert teardown(kept.access, drop_lake=True).dropped == [f"the records of pipeline {kept.pipeline.name}"]
    assert left(kept) == {}


@pytest.mark.parametrize("drop_lake", [False, True])
@pytest.mark.parametrize(
    "step",
    [
        "writer.mark_torn_down",
        "drop_slot",
        "StateDatabase.record_slot",
        "check_none_lingers",
        "drop_publication",
        "forget_tokens",
        "StateDatabase.forget_pipeline",
    ],
)
@pytest.mark.thorough(
    "the same test, before the slot and the record go; test_it_can_be_run_again_after_any_step",
    "writer.mark_torn_down-True",
    "StateDatabase.record_slot-True",
    "check_none_lingers-True",
    "drop_publication-True",
    "forget_tokens-True",
    "check_none_lingers-False",
    "writer.mark_torn_down-False",
    "forget_tokens-False",
    "drop_publication-False",
    "StateDatabase.record_slot-False",
    "drop_slot-False",
    "StateDatabase.forget_pipeline-False",
)
def test_teardown_that_ended_at_any_step_can_be_repeated(kept, monkeypatch, step, drop_lake):
    kept.receive()
    with monkeypatch.context() as patched, pytest.raises(EndedError):
        patched.setattr(f"{teardown.__module__}.{step}", end)
        teardown(kept.access, drop_lake=drop_lake)
    teardown(kept.access, drop_lake=drop_lake)
    assert left(kept) == {}


@pytest.mark.parametrize("step", ["record_slot", "forget_pipeline"])
@pytest.mark.thorough("the same test, of the other step", "forget_pipeline")
def test_repeated_teardown_keeps_a_slot_that_was_created_since(kept, monkeypatch, step):
    kept.receive()
    with monkeypatch.context() as patched, pytest.raises(EndedError):
        patched.setattr(StateDatabase, step, end)
        teardown(kept.access)
    name = kept.pipeline.slot
    execute(
        kept.dsn,
        "insert into a values (5)",
        f"select pg_create_logical_replication_slot('{name}', 'pgoutput')",
    )
    kept_slots = [what for what in teardown(kept.access).kept if name in what]
    assert len(kept_slots) == 1
    assert left(kept) == {"slots": [name]}


def test_repeated_teardown_keeps_tokens_of_a_slot_that_was_created_since(kept, monkeypatch):
    """Without them the pipeline that has the slot now would take the source for a copy."""
    kept.receive()
    with monkeypatch.context() as patched, pytest.raises(EndedError):
        patched.setattr(f"{teardown.__module__}.drop_publication", end)
        teardown(kept.access)
    name = kept.pipeline.slot
    execute(kept.dsn, f"select pg_create_logical_replication_slot('{name}', 'pgoutput')")
    with kept.source() as source:
        theirs = write_token(source, name, 0)
        teardown(kept.access)
        assert has_token(source, name, theirs) is True
    assert left(kept) == {"slots": [name], "schemas": ["_pgrepl"]}


def test_pipeline_continues_after_a_teardown_that_ended_before_the_slot_was_dropped(kept, monkeypatch):
    kept.receive()
    with monkeypatch.context() as patched, pytest.raises(EndedError):
        patched.setattr(f"{teardown.__module__}.drop_slot", end)
        teardown(kept.access)
    execute(kept.dsn, "insert into a values (5)")
    kept.bring_all_forward(A)
    assert kept.lake_rows(A).num_rows == 1
    teardown(kept.access)
    assert left(kept) == {}


def test_folder_named_as_ours_without_a_changelog_is_kept(dsn, tmp_path):
    never = Kept(dsn, tmp_path, ("public.*",))
    with StateDatabase(dsn, "test") as state_db:
        state_db.migrate()
        state_db.register(never.pipeline, system_identifier(dsn), True, True)
    never.set_states(A, TableState.PENDING)
    mine = Path(never.pipeline.lake_root, "_pgrepl", "pipeline.json")
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    write_deltalake(never.lake_path(A), pa.table({"id": [1]}))
    teardown(never.access, drop_lake=True)
    assert mine.read_text() == "mine"
    assert DeltaTable(never.lake_path(A)).version() == 0


def test_lake_table_that_another_program_appended_to_since_is_kept(kept):
    """Also of a table that was removed from the pipeline: its rows may be nowhere else."""
    kept.set_states(A, TableState.REMOVED)
    write_deltalake(
        kept.lake_path(A), pa.table({"id": pa.array([1], pa.int32())}), mode="append", schema_mode="merge"
    )
    with pytest.raises(LakeError, match=r"/public/a \(version 1 was written by another program \(WRITE\)"):
        teardown(kept.access, drop_lake=True)
    assert Path(kept.changelog).exists()


def test_dropped_lake_names_each_table_and_each_file_that_stays(kept):
    (Path(kept.lake_path(A)) / "report-2019.csv").write_text("mine")
    planned = teardown(kept.access, drop_lake=True, dry_run=True)
    assert teardown(kept.access, drop_lake=True) == planned
    root = kept.pipeline.lake_root
    assert [what for what in planned.dropped if root in what] == [
        f"lake table {root}/public/a",
        f"lake table {root}/public/b",
        f"the changelog of the lake {root}",
    ]
    assert planned.kept == [f"{root}/public/a/report-2019.csv, which this pipeline has not written"]
    files = [str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_file()]
    assert files == ["public/a/report-2019.csv"]


def system_identifier(dsn):
    with connect(dsn, "test") as connection:
        return read_server(connection).system_identifier


def test_a_schema_that_records_nothing_goes_too(kept):
    teardown(kept.access)
    with StateDatabase(kept.dsn, "test") as state_db:
        state_db.migrate()
    assert left(kept) == {"schemas": ["_pgrepl"]}
    assert teardown(kept.access).dropped == []
    assert left(kept) == {}


def test_the_state_of_other_pipelines_stays(kept):
    with kept.access.state_db("test") as state_db:
        other = replace(kept.pipeline, name="other", lake="/other", slot="o", publication="o")
        state_db.register(other, "1", True, True)
    teardown(kept.access)
    assert left(kept) == {"schemas": ["_pgrepl"]}
    with kept.access.state_db("test") as state_db:
        assert state_db.read_pipeline("other") is not None
        assert state_db.read_tables(kept.pipeline.name) == {}


def test_without_state_the_lake_says_what_is_the_pipelines(kept):
    execute(kept.dsn, "drop schema _pgrepl cascade")
    with pytest.raises(StateError, match="knows nothing of the pipeline") as caught:
        teardown(kept.access)
    assert left(kept).keys() == {"slots", "publications"}
    teardown(kept.access, give_up=re.findall(r"--give-up (\S+),", caught.value.hint))
    assert left(kept) == {}


def test_teardown_keeps_slot_and_publication_without_recorded_ownership(kept):
    execute(kept.dsn, "drop schema _pgrepl cascade")
    stranger = replace(kept.access, pipeline=replace(kept.pipeline, lake="/nowhere"))
    done = teardown(stranger)
    assert done.dropped == []
    assert done.kept == [
        f"slot {kept.pipeline.slot}: not known to be this pipeline's",
        f"publication {kept.pipeline.publication}, which this pipeline has not made",
    ]
    assert left(kept).keys() == {"slots", "publications"}


def test_a_publication_that_was_only_used_stays(dsn, tmp_path):
    execute(
        dsn,
        "create table a (id int primary key)",
        "create publication theirs for table a with (publish_via_partition_root)",
    )
    kept = Kept(dsn, tmp_path, ("public.*",), publication="theirs", publication_mode="use")
    kept.take(A)
    assert teardown(kept.access).kept[0] == "publication theirs, which this pipeline has not made"
    assert left(kept) == {"publications": ["theirs"]}


@pytest.mark.parametrize("purpose", ["replicate", "snapshot", "publish events", "maintain"])
@pytest.mark.thorough("the same test, of replicate", "snapshot", "publish events", "maintain")
def test_an_app_that_runs_is_named_and_nothing_is_dropped_under_it(kept, purpose):
    before = left(kept)
    with kept.access.state_db(purpose) as app:
        app.lock(kept.pipeline.name, purpose)
        with pytest.raises(BusyError, match=rf"at it already \({purpose}\): pgrepl") as caught:
            teardown(kept.access, timeout_s=0.2)
        assert caught.value.retry is Retry.TIMED
        assert left(kept) == before
    teardown(kept.access)
    assert left(kept) == {}


def test_nothing_that_commits_to_the_lake_begins_during_a_teardown(kept, monkeypatch):
    busy = []

    def look(*_):
        with kept.access.state_db("look") as state_db:
            for purpose in ("replicate", "snapshot", "verify", "maintain"):
                with pytest.raises(BusyError):
                    state_db.lock(kept.pipeline.name, purpose)
                busy.append(purpose)
        end()

    monkeypatch.setattr(writer, "mark_torn_down", look)
    with pytest.raises(EndedError):
        teardown(kept.access)
    assert len(busy) == 4


def test_a_slot_that_is_read_is_waited_for(kept):
    reader = psycopg2.connect(kept.dsn, connection_factory=LogicalReplicationConnection)
    with reader.cursor() as cursor:
        cursor.start_replication(
            kept.pipeline.slot,
            decode=False,
            options={"proto_version": "1", "publication_names": kept.pipeline.publication},
        )
        with pytest.raises(BusyError, match="is read by pid"):
            teardown(kept.access, timeout_s=0.3)
        worker = threading.Thread(target=teardown, args=(kept.access,), daemon=True)
        worker.start()
    reader.close()
    worker.join(30)
    assert not worker.is_alive()
    assert left(kept) == {}


@pytest.mark.parametrize("app", ["snapshot", "verify"])
@pytest.mark.thorough("the same test, of verify", "snapshot")
def test_a_temporary_slot_is_waited_for_and_another_pipelines_is_not(kept, app):
    with (
        closing_connection(kept.dsn + f" application_name='pgrepl {app} other'") as other,
        closing_connection(kept.dsn) as gone,
        closing_connection(kept.dsn) as control,
    ):
        theirs, ours = (f"pgrepl_tmp_{session.info.backend_pid}" for session in (other, gone))
        cursor = control.cursor()
        for name in (theirs, ours):
            cursor.execute("select pg_create_logical_replication_slot(%s, 'pgoutput', true)", (name,))
        gone.close()
        with pytest.raises(BusyError, match=f"still there: {ours} ") as caught:
            teardown(kept.access, timeout_s=0.2)
        assert theirs not in str(caught.value)
        cursor.execute("select pg_drop_replication_slot(%s)", (ours,))
        teardown(kept.access, timeout_s=5)
        assert left(kept) == {"slots": [theirs]}
    wait_until(lambda: left(kept) == {}, 20)


def test_the_wrong_server_or_lake_is_refused(kept):
    with kept.access.state_db("test") as state_db:
        state_db.register(kept.pipeline, "123", True, True, replace=True)
    with pytest.raises(StateError, match="is recorded with the server of system identifier 123, and"):
        teardown(kept.access)
    kept.take()
    elsewhere = replace(kept.access, pipeline=replace(kept.pipeline, lake="/elsewhere"))
    with pytest.raises(ConfigError, match="is recorded with the lake"):
        teardown(elsewhere, drop_lake=True)
    other = replace(kept.access, pipeline=replace(kept.pipeline, name="other", slot="o", publication="o"))
    with pytest.raises(LakeError, match="belongs to the pipeline"):
        teardown(other, drop_lake=True)
    assert left(kept).keys() == {"slots", "publications", "schemas"}


def test_a_lake_table_that_somebody_else_has_made_keeps_all_from_being_dropped(kept):
    Path(kept.lake_path(A)).rename(Path(kept.lake_path(A)).with_name("moved"))
    write_deltalake(kept.lake_path(A), pa.table({"id": [1]}))
    with pytest.raises(LakeError, match=r"has not written all of it: \S+/public/a \(no commit in its"):
        teardown(kept.access, drop_lake=True)
    with kept.source() as source:
        assert read_slot(source, kept.pipeline.slot) is not None
