"""state/schema.py: the schema is created, migrated and dropped, and its rights are named."""

import json
import threading

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import (
    DriftError,
    PrivilegeError,
    Remedy,
    Retry,
    ServerSettingError,
    SourceConnectionError,
    StateError,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import PINNED_SETTINGS
from airflow_provider_pgrepl.replication.state import schema
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.state_records import RELATION, T, pipeline


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


def test_login_that_acts_as_another_role_is_told_of_its_setting(pg, dsn, run):
    run("drop role if exists acting", "create role acting login in role pg_read_all_settings")
    run("alter role acting set role = 'pg_read_all_settings'")
    reset = "acting acts as pg_read_all_settings because of its setting role: ALTER ROLE acting RESET role"
    try:
        with StateDatabase(dsn.replace("user=postgres", "user=acting"), "test") as state_db:
            with pytest.raises(PrivilegeError, match="lacks CREATE on the database") as caught:
                state_db.migrate()
            assert caught.value.hint.startswith(f"{reset}; or GRANT CREATE ON DATABASE")
            run("create schema _pgrepl")
            with pytest.raises(PrivilegeError, match="may not set up the tables") as caught:
                state_db.migrate()
            assert caught.value.hint.startswith(f"{reset}; or GRANT USAGE, CREATE ON SCHEMA")
    finally:
        run("drop role acting")


def test_foreign_keys_hold_though_database_disables_triggers(pg, dsn, run, state_db):
    state_db.set_state("shop", T, TableState.PENDING)
    run(f"alter database {pg.info.dbname} set session_replication_role = replica")
    with StateDatabase(dsn, "test") as again:
        again.forget_pipeline("shop")
        assert again.read_tables("shop") == {}


def test_role_that_cannot_enable_foreign_keys_is_told_to_reset_its_setting(pg, dsn, run, state_db):
    run("drop role if exists poor", "create role poor login")
    run("alter role poor set session_replication_role = replica")
    try:
        with pytest.raises(ServerSettingError, match="session_replication_role = replica") as caught:
            StateDatabase(dsn.replace("user=postgres", "user=poor"), "test")
        assert 'ALTER ROLE "poor" RESET session_replication_role' in caught.value.hint
    finally:
        run("drop role poor")


def test_a_read_only_database_is_said(dsn, monkeypatch):
    # As on a standby; a setting of the role does not reach the session.
    monkeypatch.setitem(PINNED_SETTINGS, "default_transaction_read_only", "on")
    with StateDatabase(dsn, "test") as state_db:
        with pytest.raises(StateError, match="read-only"):
            state_db.migrate()
        with pytest.raises(StateError, match="not set up"):
            state_db.read_tables("shop")


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


def test_without_the_schema_the_snapshot_app_is_named(dsn):
    with StateDatabase(dsn, "test") as state_db, pytest.raises(StateError, match="run pgrepl snapshot"):
        state_db.read_pipeline("shop")
