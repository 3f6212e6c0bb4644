import contextlib
import hashlib
import json
import math
import os
import socket
import threading
from dataclasses import replace
from datetime import UTC, datetime

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import (
    BusyError,
    ConfigError,
    DriftError,
    PrivilegeError,
    Remedy,
    Retry,
    SourceConnectionError,
    StateError,
)
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.selection import change, wait_until_unlocked
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import PINNED_SETTINGS
from airflow_provider_pgrepl.replication.state import schema
from airflow_provider_pgrepl.replication.state.actor import STARTED_BY_VARIABLE
from airflow_provider_pgrepl.replication.state.copy_progress import CopyProgress
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.progress import Progress
from airflow_provider_pgrepl.replication.state.tables import TableState

T = TableName("public", 'odd "name')
RELATION = Relation(5, T, (Column("a", 1, 23, -1, "integer", is_key=True),), relfilenode=7)


def pipeline(name="shop", **more):
    return Pipeline(name=name, tables=("public.*",), **{"lake": f"/lake/{name}", **more})


@pytest.fixture
def state_db(dsn):
    with StateDatabase(dsn, "test") as found:
        found.migrate()
        found.register(pipeline(), "123", True, True)
        yield found


def test_migrating_again_changes_nothing(pg, dsn, state_db):
    with pg.cursor() as cursor:
        cursor.execute("select * from _pgrepl.migrations")
        before = cursor.fetchall()
        state_db.migrate()
        cursor.execute("select * from _pgrepl.migrations")
        assert cursor.fetchall() == before


def test_many_may_migrate_at_once(pg, dsn):
    errors = []

    def migrate():
        try:
            with StateDatabase(dsn, "test") as state_db:
                barrier.wait()
                state_db.migrate()
        except Exception as error:
            errors.append(error)

    barrier = threading.Barrier(6)
    threads = [threading.Thread(target=migrate) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with pg.cursor() as cursor:
        cursor.execute("select version from _pgrepl.migrations")
        assert cursor.fetchall() == [(number + 1,) for number in range(len(schema._VERSIONS))]


AN_EARLIER_PIPELINE = (
    "insert into _pgrepl.pipelines"
    " (name, system_identifier, slot, publication, slot_owned, publication_owned, lake, config)"
    " values ('shop', '123', 'pgrepl_shop', 'pgrepl_shop', true, true, '/lake/shop', '{}')"
)


def test_rows_of_the_first_version_are_read_by_this_one(monkeypatch, pg, dsn):
    with StateDatabase(dsn, "test") as state_db:
        monkeypatch.setattr(schema, "_VERSIONS", schema._VERSIONS[:1])
        state_db.migrate()
        monkeypatch.undo()
        pg.cursor().execute(AN_EARLIER_PIPELINE)
        old = json.loads(RELATION.to_json())
        for added in ("publication_xmin", "natts", "partitions", "dropped", "ignored"):
            del old[added]
        with pg.cursor() as cursor:
            cursor.execute(
                "insert into _pgrepl.tables (pipeline, schema_name, table_name, state, reason, relation)"
                " values ('shop', 'public', %s, 'errored', 'too wide', %s)",
                (T.name, json.dumps(old)),
            )
            cursor.execute("insert into _pgrepl.progress (pipeline, told_lsn) values ('shop', '0/7')")
        with pytest.raises(StateError, match="older version"):
            state_db.read_tables("shop")
        state_db.migrate()
        found = state_db.read_tables("shop")[T]
        assert (found.state, found.reason, found.relation) == (TableState.ERRORED, "too wide", RELATION)
        assert (found.error, found.membership, found.config) == ("", "configured", None)
        progress = state_db.read_progress("shop")
        assert (progress.confirmed_lsn, progress.idle_at) == (LSN(7), None)
        recorded = state_db.read_pipeline("shop")
        assert recorded.id
        assert (recorded.database, recorded.database_oid, recorded.lake_id) == ("", 0, "")
        assert state_db.mark_errored("shop", found, DriftError("r", "h"))
        found = state_db.read_tables("shop")[T]
        assert (found.error, found.remedy) == ("DriftError", Remedy.RESNAPSHOT)


@pytest.mark.parametrize(
    ("error", "hint", "remedy"),
    [
        ("DriftError", "set it back at the source, then retry the table; or resnapshot it", Remedy.UNDO),
        ("DriftError", "resnapshot it", Remedy.RESNAPSHOT),
        ("DriftError", "", None),
        ("PrivilegeError", "grant it; then retry the table", Remedy.GRANT),
        ("ValueRangeError", "mend it, then retry the table", None),
    ],
)
def test_migration_derives_remedy_from_hints_in_older_records(monkeypatch, pg, dsn, error, hint, remedy):
    with StateDatabase(dsn, "test") as state_db:
        monkeypatch.setattr(schema, "_VERSIONS", schema._VERSIONS[:2])
        state_db.migrate()
        monkeypatch.undo()
        pg.cursor().execute(AN_EARLIER_PIPELINE)
        with pg.cursor() as cursor:
            cursor.execute(
                "insert into _pgrepl.tables (pipeline, schema_name, table_name, state, error, hint)"
                " values ('shop', 'public', %s, 'errored', %s, %s)",
                (T.name, error, hint),
            )
        state_db.migrate()
        found = state_db.read_tables("shop")[T]
        assert (found.error, found.hint, found.remedy) == (error, hint, remedy)


def test_migration_renames_settings_in_recorded_configurations(monkeypatch, pg, dsn):
    with StateDatabase(dsn, "test") as state_db:
        before = next(n for n, one in enumerate(schema._VERSIONS) if '"merge_interval_s":' in one)
        monkeypatch.setattr(schema, "_VERSIONS", schema._VERSIONS[:before])
        state_db.migrate()
        monkeypatch.undo()
        pg.cursor().execute(AN_EARLIER_PIPELINE)
        old = {"points_keep_h": 9.0, "per_table": {"public.freshness_s": {"freshness_s": 5.0}}}
        recorded = json.dumps({"name": "shop", "lake": "/lake", "tables": ["public.freshness_s"], **old})
        with pg.cursor() as cursor:
            cursor.execute("update _pgrepl.pipelines set config = %s", (recorded,))
            cursor.execute(
                "insert into _pgrepl.tables (pipeline, schema_name, table_name, state, config)"
                " values ('shop', 'public', %s, 'errored', %s)",
                (T.name, recorded),
            )
        state_db.migrate()
        for config in (state_db.read_pipeline("shop").config, state_db.read_tables("shop")[T].config):
            pipeline = Pipeline.from_json(config)
            assert pipeline.consistent_point_retention_h == 9.0
            assert pipeline.per_table == {"public.freshness_s": {"merge_interval_s": 5.0}}


def test_a_table_is_moved_only_as_it_was_seen(state_db):
    state_db.set_state("shop", T, TableState.PENDING)
    state_db.set_state("shop", T, TableState.ERRORED, error="DriftError", reason="r", hint="h", lsn=LSN(9))
    seen = state_db.read_tables("shop")[T]
    assert seen.error == "DriftError"
    assert state_db.move("shop", seen, TableState.CATCHING_UP, config="{}")
    found = state_db.read_tables("shop")[T]
    assert (found.state, found.error, found.reason, found.hint) == (TableState.CATCHING_UP, "", "", "")
    assert (found.lsn, found.config, found.membership) == (None, "{}", "configured")
    assert found.since > seen.since
    assert not state_db.move("shop", seen, TableState.CATCHING_UP)
    assert state_db.move("shop", found, TableState.REMOVED, membership="removed")
    removed = state_db.read_tables("shop")[T]
    assert (removed.state, removed.membership, removed.config) == (TableState.REMOVED, "removed", "{}")
    with pytest.raises(StateError, match="is removed, and cannot become streaming"):
        state_db.move("shop", removed, TableState.STREAMING)


def test_a_table_that_was_copied_meanwhile_is_not_moved(state_db):
    state_db.set_state("shop", T, TableState.PENDING)
    seen = state_db.read_tables("shop")[T]
    state_db.record_snapshot("shop", RELATION, LSN(5), 1)
    assert not state_db.move("shop", seen, TableState.PAUSED)


def test_the_schema_goes_with_the_last_pipeline(pg, state_db):
    state_db.register(pipeline("second"), "123", True, True)
    state_db.set_state("shop", T, TableState.PENDING)
    state_db.write_progress("shop", confirmed_lsn=LSN(1))
    state_db.forget_pipeline("shop")
    state_db.forget_pipeline("shop")
    assert state_db.read_pipeline("shop") is None
    assert not state_db.remove_schema()
    assert state_db.read_pipeline("second") is not None
    state_db.forget_pipeline("second")
    assert state_db.remove_schema()
    assert state_db.remove_schema()
    with pg.cursor() as cursor:
        cursor.execute("select 1 from pg_namespace where nspname = '_pgrepl'")
        assert cursor.fetchall() == []
    state_db.migrate()
    assert state_db.read_tables("shop") == {}


def test_a_schema_that_holds_something_else_stays(pg, state_db):
    state_db.forget_pipeline("shop")
    with pg.cursor() as cursor:
        cursor.execute("create table _pgrepl.mine (a int)")
    assert not state_db.remove_schema()
    assert state_db.read_pipeline("shop") is None


def test_a_newer_schema_is_left_alone(pg, dsn, state_db):
    with pg.cursor() as cursor:
        cursor.execute("insert into _pgrepl.migrations values (99)")
        before = definitions(cursor)
        with pytest.raises(StateError, match="version 99"):
            state_db.migrate()
        assert definitions(cursor) == before


def definitions(cursor):
    """The columns of the schema's tables, and which migrations it has had."""
    cursor.execute(
        "select table_name, column_name, data_type from information_schema.columns"
        " where table_schema = '_pgrepl' order by 1, ordinal_position"
    )
    columns = cursor.fetchall()
    assert columns
    cursor.execute("select version from _pgrepl.migrations order by 1")
    return columns, cursor.fetchall()


def test_the_missing_right_is_named(pg, dsn):
    with pg.cursor() as cursor:
        cursor.execute("drop role if exists poor; create role poor login")
    poor = StateDatabase(dsn.replace("user=postgres", "user=poor"), "test")
    with pytest.raises(PrivilegeError, match=r"role poor may not create .* lacks CREATE") as caught:
        poor.migrate()
    assert f'GRANT CREATE ON DATABASE "{pg.info.dbname}" TO "poor"' in str(caught.value)
    with pg.cursor() as cursor:
        cursor.execute("create schema _pgrepl")
    with pytest.raises(PrivilegeError, match="may not set up the tables"):
        poor.migrate()
    with pg.cursor() as cursor:
        cursor.execute("grant usage, create on schema _pgrepl to poor")
    poor.migrate()
    poor.close()
    with pg.cursor() as cursor:
        cursor.execute("drop owned by poor; drop role poor")


def test_a_read_only_database_is_said(dsn, monkeypatch):
    # As on a standby; a setting of the role does not reach the session.
    monkeypatch.setitem(PINNED_SETTINGS, "default_transaction_read_only", "on")
    with StateDatabase(dsn, "test") as state_db:
        with pytest.raises(StateError, match="read-only"):
            state_db.migrate()
        with pytest.raises(StateError, match="not set up"):
            state_db.read_tables("shop")


def test_selected_relations_are_kept_until_another_database_is_recorded(state_db):
    relation = RELATION
    renamed = replace(relation, columns=(replace(relation.columns[0], name="b"),))
    for _ in range(2):
        state_db.record_selected("shop", [relation, renamed])
    state_db.record_selected("shop", [replace(relation, relfilenode=8)])
    assert sorted(found.columns[0].name for found in state_db.read_selected("shop")) == ["a", "b"]
    state_db.register(pipeline(), "123", True, True, replace=True)
    assert len(state_db.read_selected("shop")) == 2
    state_db.register(pipeline(), "123", True, True, database_oid=7, replace=True)
    assert state_db.read_selected("shop") == []


def test_a_pipeline_is_recorded_with_what_it_owns(state_db):
    found = state_db.read_pipeline("shop")
    assert (found.system_identifier, found.slot, found.publication) == ("123", "pgrepl_shop", "pgrepl_shop")
    assert (found.slot_owned, found.publication_owned, found.lake) == (True, True, "/lake/shop")
    assert Pipeline.from_json(found.config) == pipeline()
    assert state_db.read_pipeline("other") is None
    state_db.register(pipeline(insert_only=("public.t",)), "123", True, False)
    again = state_db.read_pipeline("shop")
    assert (again.publication_owned, again.created_at) == (False, found.created_at)
    assert Pipeline.from_json(again.config).insert_only == ("public.t",)


@pytest.mark.parametrize(
    ("field", "value"), [("slot", "pgrepl_shop"), ("publication", "pgrepl_shop"), ("lake", "/lake/shop/")]
)
def test_register_rejects_slot_publication_or_lake_used_by_another_pipeline(state_db, field, value):
    with pytest.raises(ConfigError, match=f"{field} .* belongs to pipeline shop"):
        state_db.register(pipeline("second", **{field: value}), "123", True, True)
    assert state_db.read_pipeline("second") is None


@pytest.mark.parametrize(
    ("recorded", "found", "belongs"),
    [
        (7, 7, "belongs to pipeline shop"),
        (0, 7, "may belong to pipeline shop, whose database is not recorded"),
    ],
)
def test_a_publication_is_one_of_its_database(state_db, recorded, found, belongs):
    state_db.register(pipeline(), "123", True, True, database_oid=recorded)
    second = pipeline("second", publication="pgrepl_shop")
    with pytest.raises(ConfigError, match=f"publication pgrepl_shop {belongs}"):
        state_db.register(second, "123", True, True, database_oid=found)
    state_db.register(pipeline(), "123", True, True, database_oid=8)
    state_db.register(second, "123", True, True, database_oid=found)
    assert state_db.read_pipeline("second").publication == "pgrepl_shop"


def test_the_same_slot_name_at_another_source_is_fine(state_db):
    state_db.register(pipeline("second", slot="pgrepl_shop"), "456", True, True)
    found = {name: state_db.read_pipeline(name) for name in ("shop", "second")}
    assert {name: (one.slot, one.system_identifier) for name, one in found.items()} == {
        "shop": ("pgrepl_shop", "123"),
        "second": ("pgrepl_shop", "456"),
    }


@pytest.mark.parametrize(
    ("changed", "system_identifier", "what"),
    [
        ({}, "456", "source system identifier 123 .now 456."),
        ({"slot": "other"}, "123", "slot pgrepl_shop .now other."),
        ({"lake": "/other"}, "123", "lake /lake/shop .now /other."),
    ],
)
def test_a_pipeline_does_not_move_by_itself(state_db, changed, system_identifier, what):
    with pytest.raises(StateError, match=what):
        state_db.register(pipeline(**changed), system_identifier, True, True)
    state_db.register(pipeline(**changed), system_identifier, True, True, replace=True)
    assert state_db.read_pipeline("shop").system_identifier == system_identifier


def test_a_lock_is_held_by_one_and_names_the_holder(dsn, state_db):
    state_db.lock("shop", "replicate")
    with StateDatabase(dsn, "test") as second:
        holder = r"pgrepl replicate shop .+:\d+ \(database pid \d+, role postgres, from 127"
        with pytest.raises(BusyError, match=holder) as caught:
            second.lock("shop", "replicate")
        assert caught.value.retry is Retry.TIMED
        second.lock("shop", "snapshot")
        second.lock("other", "replicate")
        state_db.unlock("shop", "replicate")
        second.lock("shop", "replicate")
        with pytest.raises(BusyError):
            state_db.lock("shop", "replicate")


def test_busy_error_names_the_task_and_how_to_stop_the_holder(dsn, state_db, monkeypatch):
    monkeypatch.setenv(STARTED_BY_VARIABLE, "task copy of shop,\nrun 1")
    state_db.lock("shop", "snapshot")
    with StateDatabase(dsn, "test") as second, pytest.raises(BusyError) as raised:
        second.check_unlocked("shop", "snapshot")
    me = f"{socket.gethostname()}:{os.getpid()}"
    assert rf"pgrepl snapshot shop {me}, started by task copy of shop,\nrun 1 (" in raised.value.message
    assert raised.value.hint == (
        "if that process is the wanted one, nothing is to be done here. Otherwise to stop it, pause its DAG"
        " and mark its run as failed, or run on host"
        f" {socket.gethostname()}: kill {os.getpid()}, or wait until it has ended"
    )
    with StateDatabase(dsn, "test") as second:
        second.check_unlocked("shop", "replicate")
        second.check_unlocked("other", "snapshot")


def test_waiting_for_a_lock_names_the_holder_and_ends_with_it(dsn, state_db):
    access, said = Access(pipeline(), dsn, dsn), []
    state_db.lock("shop", "snapshot")
    wait_until_unlocked(
        access, "snapshot", math.inf, said.append, lambda _: state_db.unlock("shop", "snapshot")
    )
    assert len(said) == 1
    assert said[0].startswith("Waiting: pipeline shop: another process is at it already (snapshot): pgrepl")
    state_db.lock("shop", "replicate")
    with pytest.raises(BusyError):
        wait_until_unlocked(access, "replicate", 0.0, said.append, lambda _: None)


def test_a_lock_goes_with_its_connection(dsn, state_db):
    first = StateDatabase(dsn, "test")
    first.lock("shop", "replicate")
    first.close()
    while True:
        try:
            state_db.lock("shop", "replicate")
            break
        except BusyError:
            continue


def unprivileged(dsn, pg):
    """A connection of a role that may do nothing but connect."""
    with pg.cursor() as cursor:
        cursor.execute("drop role if exists unprivileged; create role unprivileged login")
    connection = psycopg2.connect(dsn.replace("user=postgres", "user=unprivileged"))
    connection.autocommit = True
    return connection


def test_nobody_without_a_right_can_hold_a_lock(pg, dsn, state_db):
    """Any role may take advisory locks of any number, which must not block the store's locks."""
    other = unprivileged(dsn, pg)
    digest = hashlib.blake2b(b"pgrepl replicate shop", digest_size=8).digest()
    with other.cursor() as cursor:
        for key in (int.from_bytes(digest) >> 1, 0x7067726570, 0x706772657071):
            cursor.execute("select pg_advisory_lock(%s)", (key,))
    state_db.lock("shop", "replicate")
    with pytest.raises(BusyError), StateDatabase(dsn, "test") as second:
        second.lock("shop", "replicate")
    with pg.cursor() as cursor:
        cursor.execute("drop schema _pgrepl cascade")
    with StateDatabase(dsn, "test") as fresh:
        fresh.migrate()
    other.close()
    with pg.cursor() as cursor:
        cursor.execute("drop role unprivileged")


def test_a_lock_of_a_session_that_is_gone_holds_nobody(pg, dsn, state_db):
    """Also when another session has its process number now, or the row was written elsewhere."""
    with pg.cursor() as cursor:
        cursor.execute(
            "insert into _pgrepl.locks"
            " values ('shop', 'replicate', pg_backend_pid(), now() - interval '1 day', 'x')"
        )
    state_db.lock("shop", "replicate")
    with pg.cursor() as cursor:
        cursor.execute(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and pid <> pg_backend_pid() and (backend_xid is not null or backend_xmin is not null)"
        )
        assert cursor.fetchone() == (0,), "no transaction stays open for it"


@pytest.fixture
def limited(dsn, pg, state_db):
    """The DSN of a role that owns the state and may not see when sessions of other roles began."""
    with pg.cursor() as cursor:
        cursor.execute("drop role if exists limited; create role limited login")
        cursor.execute(
            "grant all on all tables in schema _pgrepl to limited; alter schema _pgrepl owner to limited"
        )
        cursor.execute(
            "select format('alter table _pgrepl.%I owner to limited', tablename)"
            " from pg_tables where schemaname = '_pgrepl'"
        )
        for (statement,) in cursor.fetchall():
            cursor.execute(statement)
    state_db.close()
    yield dsn.replace("user=postgres", "user=limited")
    with pg.cursor() as cursor:
        cursor.execute("drop schema _pgrepl cascade; drop role limited")


def lock_of(pg, pid, started):
    """A row that `pid` has left, whose session began at an SQL expression."""
    with pg.cursor() as cursor:
        cursor.execute(f"insert into _pgrepl.locks values ('shop', 'replicate', {pid}, {started}, 'x')")


WALWRITER = "(select pid from pg_stat_activity where backend_type = 'walwriter')"
BEFORE_THE_SERVER = "pg_postmaster_start_time() - interval '1 second'"


@pytest.mark.parametrize("pid", ["pg_backend_pid()", WALWRITER])
def test_lock_from_before_the_server_started_holds_nobody(pg, limited, pid):
    """In a container process numbers begin at 1 with each start: the holder's is soon another process's."""
    lock_of(pg, pid, BEFORE_THE_SERVER)
    with StateDatabase(limited, "test") as mine:
        assert not mine.is_locked("shop", "replicate")
        assert mine.held_by_others("shop") == []
        mine.lock("shop", "replicate")


def test_process_of_the_server_itself_holds_no_lock(pg, limited):
    """After a crash the server restarts its own processes, and its start stays what it was."""
    lock_of(pg, WALWRITER, "now()")
    with StateDatabase(limited, "test") as mine:
        assert not mine.is_locked("shop", "replicate")
        mine.lock("shop", "replicate")


def test_session_whose_start_is_hidden_counts_as_the_holder_and_the_hint_says_how_to_tell(pg, limited):
    lock_of(pg, "pg_backend_pid()", "now() - interval '1 millisecond'")
    with StateDatabase(limited, "test") as mine:
        assert mine.is_locked("shop", "replicate")
        with pytest.raises(BusyError) as raised:
            mine.lock("shop", "replicate")
    assert "another session, of role postgres" in raised.value.hint
    assert "GRANT pg_read_all_stats" in raised.value.hint
    with pg.cursor() as cursor:
        cursor.execute("grant pg_read_all_stats to limited")
    with StateDatabase(limited, "test") as mine:
        mine.lock("shop", "replicate")


def test_two_who_want_a_lock_at_once_do_not_both_get_it(dsn, state_db):
    taken, barrier = [], threading.Barrier(8)

    def take():
        with StateDatabase(dsn, "test") as mine:
            barrier.wait()
            with contextlib.suppress(BusyError):
                mine.lock("shop", "replicate")
                taken.append(mine)
            barrier.wait()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1


def test_blocked_migration_names_blocking_session(pg, dsn, monkeypatch):
    monkeypatch.setattr(schema, "LOCK_WAIT_MS", 300)
    with monkeypatch.context() as patched, StateDatabase(dsn, "test") as older:
        patched.setattr(schema, "_VERSIONS", schema._VERSIONS[:-1])
        older.migrate()
    holder = psycopg2.connect(dsn + " application_name=backup")
    holder.cursor().execute("lock table _pgrepl.migrations in exclusive mode")
    with (
        StateDatabase(dsn, "test") as waiting,
        pytest.raises(SourceConnectionError, match=r"role postgres from 127\.0\.0\.1 .*backup") as caught,
    ):
        waiting.migrate()
    assert caught.value.retry is Retry.TIMED
    holder.close()
    with StateDatabase(dsn, "test") as again:
        again.migrate()


def test_a_table_goes_its_way(state_db):
    assert state_db.read_tables("shop") == {}
    for state in (TableState.PENDING, TableState.SNAPSHOTTING, TableState.CATCHING_UP, TableState.STREAMING):
        state_db.set_state("shop", T, state)
        found = state_db.read_tables("shop")[T]
        assert (found.state, found.reason, found.lsn, found.relation) == (state, "", None, None)
    state_db.set_state("shop", T, TableState.ERRORED, reason="too wide", hint="widen it", lsn=LSN(300))
    found = state_db.read_tables("shop")[T]
    assert (found.state, found.reason, found.hint) == (TableState.ERRORED, "too wide", "widen it")
    assert found.lsn == LSN(300)
    state_db.set_state("shop", T, TableState.ERRORED, reason="worse")
    assert state_db.read_tables("shop")[T].since == found.since
    state_db.set_state("shop", T, TableState.SNAPSHOTTING)
    assert state_db.read_tables("shop")[T].reason == ""


def test_a_transition_that_is_not_allowed_changes_nothing(state_db):
    with pytest.raises(StateError, match="is unknown, and cannot become streaming"):
        state_db.set_state("shop", T, TableState.STREAMING)
    state_db.set_state("shop", T, TableState.PENDING)
    state_db.set_state("shop", T, TableState.PENDING)
    with pytest.raises(StateError, match="is pending, and cannot become streaming"):
        state_db.set_state("shop", T, TableState.STREAMING)
    state_db.set_state("shop", T, TableState.SNAPSHOTTING)
    with pytest.raises(StateError, match="is snapshotting, and cannot become pending"):
        state_db.set_state("shop", T, TableState.PENDING)
    assert state_db.read_tables("shop")[T].state is TableState.SNAPSHOTTING


def test_table_whose_state_always_changes_first_is_busy_and_one_without_record_is_an_error(state_db):
    """Exit code 75: the next try reads the new state."""
    state_db.set_state("shop", T, TableState.PENDING)
    record = state_db.read_tables("shop")[T]
    with pytest.raises(BusyError, match="being changed by another process"):
        change(state_db, "shop", [record], lambda _: None, lambda _: False)
    state_db.remove_table("shop", T)
    with pytest.raises(StateError, match="its record was deleted during the command"):
        change(state_db, "shop", [record], lambda _: None, lambda _: False)


def test_a_snapshot_is_recorded(state_db):
    with pytest.raises(StateError, match="not recorded"):
        state_db.record_snapshot("shop", RELATION, LSN(1 << 40), 17)
    state_db.set_state("shop", T, TableState.PENDING)
    state_db.record_snapshot("shop", RELATION, LSN(1 << 40), 17)
    found = state_db.read_tables("shop")[T]
    assert (found.relation, found.position_lsn, found.rows_copied) == (RELATION, LSN(1 << 40), 17)
    assert found.snapshot_at is not None
    state_db.record_verified("shop", found, LSN(1 << 41), found.snapshot_at)
    verified = state_db.read_tables("shop")[T]
    assert (verified.verified_through, verified.verified_at) == (LSN(1 << 41), found.snapshot_at)
    state_db.record_snapshot("shop", RELATION, LSN(1 << 42), 17)
    # The rows that were verified are no longer those of the table.
    state_db.record_verified("shop", found, LSN(1 << 41), found.snapshot_at)
    assert state_db.read_tables("shop")[T].verified_through is None
    state_db.remove_table("shop", T)
    state_db.remove_table("shop", T)
    assert state_db.read_tables("shop") == {}


def test_progress_of_a_copy_is_recorded_while_its_table_is_snapshotting_and_deleted_after_it(state_db):
    progress = CopyProgress(1_200_000, 5_000_000, 300, 1000, 250_000.0, 15.2)

    def recorded():
        state_db.record_copies("shop", {T: progress, TableName("public", "unknown"): progress})
        return state_db.read_tables("shop")[T].copying

    state_db.set_state("shop", T, TableState.PENDING)
    assert recorded() is None
    state_db.set_state("shop", T, TableState.SNAPSHOTTING)
    found = recorded()
    assert replace(found, reported_at=None) == progress
    assert found.reported_at.tzinfo is not None
    state_db.set_state("shop", T, TableState.CATCHING_UP)
    state_db.set_state("shop", T, TableState.SNAPSHOTTING)
    assert state_db.read_tables("shop")[T].copying is None


def test_progress_is_written_in_parts(state_db):
    assert state_db.read_progress("shop") is None
    when = datetime(2025, 5, 1, tzinfo=UTC)
    state_db.write_progress(
        "shop", received_lsn=LSN(9), durable_lsn=LSN(8), confirmed_lsn=LSN(7), holder="me"
    )
    state_db.write_progress("shop", applied_lsn=LSN(6), applied_commit_ts=when, changes_per_s=2.5)
    state_db.write_progress("shop", idle_at=when)
    state_db.write_progress("shop", received_lsn=LSN(10))
    found = state_db.read_progress("shop")
    assert found == Progress(LSN(10), LSN(8), LSN(7), LSN(6), when, 2.5, "me", found.updated_at, when)
    assert isinstance(found.received_lsn, LSN)


def test_an_unknown_pipeline_is_said(state_db):
    with pytest.raises(StateError, match="not recorded"):
        state_db.write_progress("nobody", received_lsn=LSN(1))
    with pytest.raises(StateError, match="not recorded"):
        state_db.set_state("nobody", T, TableState.PENDING)


def test_without_the_schema_the_snapshot_app_is_named(dsn):
    with StateDatabase(dsn, "test") as state_db, pytest.raises(StateError, match="run pgrepl snapshot"):
        state_db.read_pipeline("shop")


def test_a_lost_connection_is_worth_another_try(pg, dsn, state_db):
    with pg.cursor() as cursor:
        cursor.execute(
            "select pg_terminate_backend(pid, 100000) from pg_stat_activity"
            " where application_name = 'pgrepl test' and datname = current_database()"
        )
    with pytest.raises(SourceConnectionError):
        state_db.read_tables("shop")


def test_nothing_is_left_open_in_a_transaction(pg, state_db):
    state_db.set_state("shop", T, TableState.PENDING)
    with pytest.raises(StateError):
        state_db.set_state("nobody", T, TableState.PENDING)
    with pg.cursor() as cursor:
        cursor.execute(
            "select state from pg_stat_activity where application_name = 'pgrepl test'"
            " and datname = current_database()"
        )
        assert cursor.fetchall() == [("idle",)]
    assert pg.status == psycopg2.extensions.STATUS_READY
