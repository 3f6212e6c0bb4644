"""Another's publication FOR ALL TABLES: its subscribers are not sent tables that they lack."""

from __future__ import annotations

from pathlib import Path

import psycopg2
import psycopg2.errors
import pytest

from airflow_provider_pgrepl.errors import PublicationError
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift
from airflow_provider_pgrepl.replication.app.snapshot import opened
from airflow_provider_pgrepl.replication.app.start_check import check_snapshot
from airflow_provider_pgrepl.replication.app.status.status import read_status
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.source_tokens import write_token
from demo.postgres import Server
from tests.conftest import fresh_database
from tests.support.kept import kept_tables
from tests.support.received import Received
from tests.support.replicated import execute

THEIRS = "create publication theirs for all tables"
USED = {"publication_mode": "use", "publication": "theirs"}


@pytest.fixture
def elsewhere(server: Server):
    """A database for the state."""
    with fresh_database(server) as dsn:
        yield dsn


def new_pipeline(dsn: str, folder: Path, **options) -> Received:
    execute(dsn, "create table t (id int primary key)", THEIRS)
    return Received(dsn, folder, ("public.t",), **options)


def assert_refused(pipeline: Received, state_dsn: str, hint: str) -> None:
    access = Access(pipeline.pipeline, pipeline.dsn, state_dsn)
    with pytest.raises(PublicationError, match="publication theirs is FOR ALL TABLES") as caught:
        check_snapshot(access)
    assert hint in caught.value.hint
    with pytest.raises(PublicationError, match="publication theirs is FOR ALL TABLES"), opened(access):
        raise AssertionError("it began")


def has_schema(run) -> bool:
    return run("select 1 from pg_namespace where nspname = '_pgrepl'") != []


def test_snapshot_is_refused_before_its_tables_are_created(dsn, tmp_path, run):
    assert_refused(new_pipeline(dsn, tmp_path), dsn, "state_conn_id")
    assert not has_schema(run)


def test_state_elsewhere_leaves_the_source_without_tables(dsn, elsewhere, tmp_path, run):
    pipeline = new_pipeline(dsn, tmp_path)
    with opened(Access(pipeline.pipeline, dsn, elsewhere)), pipeline.source() as source:
        assert write_token(source, pipeline.pipeline.slot, 0) == 0
    assert not has_schema(run)


def test_database_of_the_state_counts_too(dsn, elsewhere, tmp_path):
    execute(elsewhere, THEIRS)
    execute(dsn, "create table t (id int primary key)")
    assert_refused(Received(dsn, tmp_path, ("public.t",)), elsewhere, "state_conn_id")


def test_event_trigger_is_refused_before_its_key_is_created(dsn, elsewhere, tmp_path, run):
    pipeline = new_pipeline(dsn, tmp_path, event_trigger=True)
    assert_refused(pipeline, elsewhere, "event_trigger")
    with pipeline.source() as source:
        script = trigger.install_sql(source, pipeline.pipeline)
    with pytest.raises(psycopg2.errors.RaiseException, match="FOR ALL TABLES"):
        execute(dsn, script)
    assert not has_schema(run)


def test_publication_that_the_pipeline_alone_uses_is_no_harm(dsn, tmp_path):
    pipeline = new_pipeline(dsn, tmp_path, event_trigger=True, **USED)
    with opened(Access(pipeline.pipeline, dsn, dsn)) as run:
        assert trigger.is_present(run.snapshotter.source, pipeline.pipeline)


def test_used_publication_that_another_slot_may_read_is_refused(dsn, tmp_path, run):
    pipeline = new_pipeline(dsn, tmp_path, **USED)
    run(f"select pg_create_logical_replication_slot('{pipeline.pipeline.name}_other', 'pgoutput')")
    assert_refused(pipeline, dsn, "state_conn_id")


def test_publication_that_is_created_later_is_named(dsn, tmp_path, monkeypatch):
    kept = kept_tables(dsn, tmp_path)
    with kept.source() as source:
        assert write_token(source, kept.pipeline.slot, 0)
    assert check_drift(kept.access).warnings == ()
    execute(dsn, THEIRS)
    monkeypatch.setenv("PGREPL_DSN", dsn)
    (warning,) = check_drift(kept.access).warnings
    assert "publication theirs is FOR ALL TABLES" in warning
    assert warning in read_status(kept.pipeline).problems


def test_no_new_table_is_created_beside_those_that_subscribers_have(dsn, run):
    with StateDatabase(dsn, "test") as state_db:
        state_db.migrate()
    execute(dsn, THEIRS)
    with psycopg2.connect(dsn) as source:
        assert write_token(source, "s", 0) == 0
    assert run("select to_regclass('_pgrepl.source_tokens')") == [(None,)]
