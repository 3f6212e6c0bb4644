"""state/: records of pipelines and tables, and the progress of both."""

from dataclasses import replace
from datetime import UTC, datetime

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import (
    BusyError,
    ConfigError,
    SourceConnectionError,
    StateError,
)
from airflow_provider_pgrepl.replication.app.operations.selection import change
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.progress import Progress
from airflow_provider_pgrepl.replication.state.reports import CopyProgress
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.state_records import RELATION, T, pipeline


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
