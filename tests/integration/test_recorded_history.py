"""Events and samples of a pipeline in the state database, and the command that prints them."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.errors import DriftError, SlotError, StateError
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from airflow_provider_pgrepl.replication.app.operations.tables import pause_tables, resume_tables
from airflow_provider_pgrepl.replication.app.progress_writer import SampleWriter
from airflow_provider_pgrepl.replication.app.status.summary import SourceReading
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.receiver.changelog_feed import ReceiverProgress
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state import recorded_events, samples, schema
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.progress import TableBytes, TableMerges
from airflow_provider_pgrepl.replication.state.recorded_events import EventKind
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.recorded import Recorded

T = TableName("public", 'odd "name')
ID = Column("id", 1, 23, -1, "integer", is_key=True)
RELATION = Relation(5, T, (ID,), relfilenode=7)
PIPELINE = Pipeline(name="shop", tables=("public.*",), lake="/lake/shop")


@pytest.fixture
def state_db(dsn):
    with StateDatabase(dsn, "snapshot shop", "task copy of shop, run 1") as found:
        found.migrate()
        found.register(PIPELINE, "123", False, True)
        yield found


def stream(state_db):
    for state in (TableState.PENDING, TableState.SNAPSHOTTING):
        state_db.set_state("shop", T, state)
    state_db.record_snapshot("shop", RELATION, LSN(100), 17, bytes=512, seconds=0.5)
    state_db.set_state("shop", T, TableState.CATCHING_UP, reached=LSN(100))
    record = state_db.read_tables("shop")[T]
    assert state_db.move("shop", record, TableState.STREAMING, reached=LSN(120))
    return state_db.read_tables("shop")[T]


def transitions(state_db, table=T):
    found = state_db.read_events("shop", table)
    return [(one.from_state, one.to_state) for one in found if one.kind == EventKind.STATE_CHANGED]


def test_each_transition_is_recorded_with_actor_and_position(state_db):
    stream(state_db)
    assert transitions(state_db) == [
        (None, "pending"),
        ("pending", "snapshotting"),
        ("snapshotting", "catching_up"),
        ("catching_up", "streaming"),
    ]
    last = state_db.read_events("shop", T)[-1]
    assert last.lsn == LSN(120)
    assert last.actor.startswith("pgrepl snapshot on ")
    assert last.actor.endswith(" as postgres, started by task copy of shop, run 1")
    registered = state_db.read_events("shop")[0]
    assert (registered.kind, registered.table, registered.details["lake"]) == (
        "registered",
        None,
        "/lake/shop",
    )


def test_rejected_transition_records_no_event(state_db):
    stream(state_db)
    before = state_db.read_events("shop")
    with pytest.raises(StateError):
        state_db.set_state("shop", T, TableState.PENDING)
    stale = replace(state_db.read_tables("shop")[T], state=TableState.CATCHING_UP)
    assert not state_db.move("shop", stale, TableState.PAUSED)
    assert not state_db.mark_errored("shop", stale, DriftError("reason", "hint"))
    assert state_db.read_events("shop") == before


def test_error_is_recorded_once_with_reason_hint_and_lsn(state_db):
    seen = stream(state_db)
    error = DriftError("column a changed", "resnapshot it")
    assert state_db.mark_errored("shop", seen, error, LSN(300))
    for _ in range(2):
        state_db.set_state("shop", T, TableState.ERRORED, error="DriftError", reason="column b changed")
    *_, first, second = state_db.read_events("shop", T)
    assert (first.from_state, first.to_state, first.error) == ("streaming", "errored", "DriftError")
    assert (first.reason, first.hint, first.lsn) == ("column a changed", "resnapshot it", LSN(300))
    assert (second.from_state, second.to_state, second.reason) == ("errored", "errored", "column b changed")


def test_repeated_snapshot_record_writes_one_event(state_db):
    stream(state_db)
    state_db.record_snapshot("shop", RELATION, LSN(100), 17, bytes=512, seconds=0.5)
    taken = [one for one in state_db.read_events("shop") if one.kind == EventKind.SNAPSHOT_TAKEN]
    assert [(one.lsn, one.details) for one in taken] == [
        (LSN(100), {"rows": 17, "bytes": 512, "seconds": 0.5})
    ]


def test_followed_schema_change_is_recorded_once(state_db):
    stream(state_db)
    wider = replace(
        RELATION, columns=(replace(ID, type_name="bigint"), Column("b", 2, 25, -1, "text")), relfilenode=8
    )
    for _ in range(2):
        state_db.record_relation("shop", wider, LSN(100), LSN(400))
    # Another file is no change of the schema.
    state_db.record_relation("shop", replace(wider, relfilenode=9), LSN(100), LSN(500))
    found = [one for one in state_db.read_events("shop", T) if one.kind == EventKind.SCHEMA_CHANGED]
    assert [(one.lsn, one.details) for one in found] == [
        (LSN(400), {"added": ["b"], "retyped": {"id": ["integer", "bigint"]}})
    ]
    state_db.record_watched_relation("shop", T, LSN(100), LSN(600), RELATION)
    assert state_db.read_events("shop", T)[-1].details == {
        "dropped": ["b"],
        "retyped": {"id": ["bigint", "integer"]},
    }


def test_membership_slot_epoch_and_skip_are_recorded_once(state_db):
    stream(state_db)
    before = len(state_db.read_events("shop"))
    for _ in range(2):
        state_db.set_membership("shop", T, "added")
        state_db.record_slot("shop", is_owned=True)
        state_db.record_epoch("shop", Epoch(1), LSN(90))
        state_db.record_skip("shop", Epoch(1), LSN(700), 77, "cannot be sent")
    assert [(one.kind, one.lsn) for one in state_db.read_events("shop")[before:]] == [
        ("membership_changed", None),
        ("slot_changed", None),
        ("epoch_begun", LSN(90)),
        ("skipped", LSN(700)),
    ]


def test_repeated_failure_of_application_is_recorded_once(state_db):
    state_db.record_run("shop", EventKind.STARTED)
    for _ in range(3):
        state_db.record_run("shop", EventKind.FAILED, SlotError("slot lost", "begin a new epoch"))
    state_db.record_run("shop", EventKind.STARTED)
    state_db.record_run("nothing", EventKind.STARTED)
    found = state_db.read_events("shop")[1:]
    assert [(one.kind, one.error, one.reason) for one in found] == [
        ("started", "", ""),
        ("failed", "SlotError", "slot lost"),
        ("started", "", ""),
    ]
    assert state_db.read_events("nothing") == []


def test_concurrent_processes_record_each_transition_once(dsn, state_db):
    stream(state_db)
    barrier = threading.Barrier(4)

    def toggle():
        with StateDatabase(dsn, "pause shop") as mine:
            barrier.wait()
            for _ in range(25):
                mine.set_state("shop", T, TableState.ERRORED, reason="same")
                mine.set_state("shop", T, TableState.SNAPSHOTTING)

    def errors(worker):
        try:
            worker()
        except StateError:
            failed.append(1)  # Another thread has changed the state first.

    failed: list[int] = []
    threads = [threading.Thread(target=errors, args=(toggle,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = transitions(state_db)
    assert len(found) > 4
    # No transition is lost and none is invented: each begins at the state in which the last one ended.
    assert all(now[0] == last[1] for last, now in pairwise(found))
    assert found[-1][1] == state_db.read_tables("shop")[T].state


def test_teardown_keeps_events_and_deletes_samples(state_db):
    stream(state_db)
    state_db.write_sample("shop", samples.Sample(lag_seconds=1.0))
    state_db.write_table_samples("shop", {})
    for _ in range(2):
        state_db.forget_pipeline("shop")
    assert [one.kind for one in state_db.read_events("shop")][-2:] == ["state_changed", "torn_down"]
    assert state_db.read_samples("shop") == []
    assert state_db.read_table_samples("shop") == []
    assert state_db.remove_schema()


def test_table_forgotten_after_failed_snapshot_is_recorded(state_db):
    state_db.set_state("shop", T, TableState.PENDING)
    state_db.remove_table("shop", T)
    last = state_db.read_events("shop", T)[-1]
    assert (last.kind, last.from_state, last.to_state) == ("table_forgotten", "pending", None)


def test_events_and_samples_are_bounded_by_age_and_rows(pg, state_db, monkeypatch):
    monkeypatch.setattr(recorded_events, "EVENT_ROWS", 5)
    monkeypatch.setattr(samples, "SAMPLE_ROWS", 5)
    monkeypatch.setattr(samples, "TABLE_SAMPLE_ROWS", 5)
    age = "now() - n * interval '30 days'"
    with pg.cursor() as cursor:
        cursor.execute(
            "insert into _pgrepl.events (pipeline, time, kind, actor)"
            f" select 'gone', {age}, 'started', '' from generate_series(5, 1, -1) n"
        )
        cursor.execute(
            "insert into _pgrepl.events (pipeline, kind, actor)"
            " select 'shop', 'started', n::text from generate_series(1, 20) n"
        )
        cursor.execute("delete from _pgrepl.events where kind = 'registered'")
        for table in ("samples", "table_samples"):
            more, values = (
                (", schema_name, table_name, state", ", 'a', 'b', 'c'") if "_" in table else ("", "")
            )
            cursor.execute(
                f"insert into _pgrepl.{table} (pipeline, time{more}) select 'shop', now() - n * interval"
                f" '1 minute'{values} from generate_series(1, 20) n"
            )
    state_db.delete_old_events("shop")
    state_db.delete_old_samples("shop")
    assert [one.actor for one in state_db.read_events("shop")] == ["16", "17", "18", "19", "20"]
    assert len(state_db.read_events("gone")) == 2
    assert len(state_db.read_samples("shop")) == 5
    assert len(state_db.read_table_samples("shop")) == 5
    monkeypatch.undo()
    pg.cursor().execute("update _pgrepl.samples set time = time - interval '15 days'")
    state_db.delete_old_samples("shop")
    assert state_db.read_samples("shop") == []


def test_schema_of_previous_version_is_migrated_with_its_records(monkeypatch, pg, dsn):
    with StateDatabase(dsn, "test") as older, monkeypatch.context() as patched:
        before = next(n for n, one in enumerate(schema._VERSIONS) if "CREATE TABLE _pgrepl.events" in one)
        patched.setattr(schema, "_VERSIONS", schema._VERSIONS[:before])
        older.migrate()
    pg.cursor().execute(
        "insert into _pgrepl.pipelines (name, system_identifier, slot, publication, slot_owned,"
        " publication_owned, lake, config) values ('shop', '1', 's', 'p', true, true, '/lake', '{}');"
        "insert into _pgrepl.tables (pipeline, schema_name, table_name, state)"
        " values ('shop', 'public', 'a', 'errored')"
    )
    table = TableName("public", "a")
    with StateDatabase(dsn, "test") as state_db:
        for read in (state_db.read_events, state_db.read_samples, state_db.read_table_samples):
            with pytest.raises(StateError, match="older version"):
                read("shop")
        state_db.migrate()
        assert state_db.read_events("shop") == []
        state_db.set_state("shop", table, TableState.SNAPSHOTTING)
        assert transitions(state_db, table) == [("errored", "snapshotting")]


def test_sequence_of_events_does_not_hide_how_to_own_the_schema(pg, dsn, state_db):
    """The sequence belongs to its table: changing the owner of the table is enough."""
    pg.cursor().execute("drop role if exists history_owner; create role history_owner login")
    try:
        pg.cursor().execute("grant usage, create on schema _pgrepl to history_owner")
        pg.cursor().execute("alter table _pgrepl.events owner to history_owner")
        with pytest.raises(StateError, match="relation events belongs to role history_owner") as caught:
            StateDatabase(dsn, "test")
        assert "ALTER TABLE _pgrepl.events OWNER TO postgres" in caught.value.hint
    finally:
        pg.cursor().execute("drop owned by history_owner cascade; drop role history_owner")


class Reading:
    """A sample writer whose receiver, applier and source are given."""

    def __init__(self, state_db):
        self.received, self.applied = ReceiverProgress(), ApplierProgress()
        self.source = None
        self.writer = SampleWriter(
            state_db, "shop", lambda: self.received, lambda: self.applied, lambda: self.source
        )


def test_sample_is_written_with_each_reading_of_the_source(state_db):
    stream(state_db)
    state_db.write_progress(
        "shop",
        table_bytes={T.path: TableBytes(10, 20, 30)},
        table_merges={T.path: TableMerges(0.25, 1, 1, waiting_s=4.0)},
    )
    made = Reading(state_db)
    made.writer.write_if_due()
    assert state_db.read_samples("shop") == []
    made.received.changes, made.received.bytes = 600, 60_000
    made.received.durable_lsn = LSN(1000)
    made.applied.positions[T.path] = LSN(900)
    made.source = SourceReading(time.monotonic(), LSN(2000), 5000, 1 << 30, True, 1.5, 1000)
    made.writer.write_if_due()
    made.writer.write_if_due()
    (sample,) = state_db.read_samples("shop")
    assert (sample.durable_lsn, sample.applied_lsn, sample.wal_lsn) == (LSN(1000), None, LSN(2000))
    assert (sample.lag_seconds, sample.lag_bytes) == (1.5, 1000)
    assert (sample.wal_retained_bytes, sample.wal_limit_bytes, sample.slot_active) == (5000, 1 << 30, True)
    assert sample.changes_per_s > 0
    assert sample.bytes_per_s == pytest.approx(100 * sample.changes_per_s)
    assert sample.memory_bytes > 1 << 20
    (of_table,) = state_db.read_table_samples("shop", T)
    assert (of_table.state, of_table.position_lsn, of_table.lag_seconds) == ("streaming", LSN(900), 4.0)
    assert (of_table.live_bytes, of_table.kept_bytes, of_table.merge_seconds) == (10, 20, 0.25)


def test_lost_state_database_does_not_stop_sampling(state_db, caplog):
    made = Reading(state_db)
    made.source = SourceReading(time.monotonic())
    state_db.close()
    made.writer.write_if_due()
    assert "no sample was recorded" in caplog.text


def test_many_tables_are_sampled_less_often():
    assert samples.table_sample_interval_s(10) == 600
    rows = 2000 * samples.TABLE_SAMPLE_DAYS * 86_400 / samples.table_sample_interval_s(2000)
    assert rows == pytest.approx(samples.TABLE_SAMPLE_ROWS)


@pytest.fixture
def shop(dsn, pg, tmp_path, monkeypatch):
    pg.cursor().execute("create table a (id int primary key); create table b (id int primary key)")
    made = Recorded(dsn, lake=str(tmp_path / "lake"))
    monkeypatch.setenv("PGREPL_DSN", dsn)
    (tmp_path / "shop.json").write_text(made.pipeline.to_json())
    return made


def test_operations_of_tables_are_recorded_with_the_task_that_ran_them(shop):
    access = replace(shop.access, started_by="task pause of ops, run 7, try 1")
    pause_tables(access, ["public.a"])
    resume_tables(access, ["public.a"])
    remove_tables(shop.access, ["public.b"])
    with access.state_db("test") as state_db:
        *_, paused, resumed = state_db.read_events("shop", TableName("public", "a"))
        removed = state_db.read_events("shop", TableName("public", "b"))[-1]
    assert (paused.from_state, paused.to_state) == ("streaming", "paused")
    assert paused.actor.startswith("pgrepl pause on ")
    assert paused.actor.endswith(", started by task pause of ops, run 7, try 1")
    assert (resumed.from_state, resumed.to_state) == ("paused", "catching_up")
    assert (removed.to_state, removed.details) == ("removed", {"membership": "removed"})
    assert removed.actor.startswith("pgrepl remove on ")


def test_history_prints_events_and_samples(shop, tmp_path, capsys):
    shop.set_state("public.a", TableState.ERRORED, error="DriftError", reason="column x", hint="fix it")
    with shop.access.state_db("test") as state_db:
        state_db.write_sample("shop", samples.Sample(lag_seconds=2.5, wal_lsn=LSN(16)))
        state_db.write_table_samples("shop", {})
    file = str(tmp_path / "shop.json")
    assert main(["history", file, "public.a", "--limit", "1"]) == 0
    text = capsys.readouterr().out
    assert "public.a  streaming → errored" in text
    assert "    DriftError: column x\n      hint: fix it\n" in text
    assert main(["history", file, "--since", "1h", "--json"]) == 0
    events = json.loads(capsys.readouterr().out)
    assert events[-1]["to_state"] == "errored"
    assert events[-1]["table"] == "public.a"
    assert main(["history", file, "--samples", "--json"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)
    assert (sample["lag_seconds"], sample["wal_lsn"]) == (2.5, "0/10")
    assert main(["history", file, "public.a", "--samples"]) == 0
    assert "errored" in capsys.readouterr().out
    assert main(["history", file, "--since", "2999-01-01"]) == 0
    assert capsys.readouterr().out == "nothing is recorded\n"
    assert main(["history", file, "public.nosuch"]) == 78
    assert "not among the tables of pipeline shop: public.nosuch" in capsys.readouterr().err
    assert main(["history", file, "--since", "yesterday"]) == 78
    assert "--since" in capsys.readouterr().err
    with shop.access.state_db("test") as state_db:
        state_db.forget_pipeline("shop")
    assert main(["history", file, "public.a", "--since", "2999-01-01"]) == 0
    assert capsys.readouterr().out == "nothing is recorded\n"
