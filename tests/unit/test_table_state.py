from datetime import UTC, datetime, timedelta

import pytest

from airflow_provider_pgrepl.errors import StateError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.state.progress import Progress, lag
from airflow_provider_pgrepl.replication.state.tables import (
    TableState,
    check_transition,
    may_follow,
    states_before,
)

ALLOWED = """
pending: snapshotting
snapshotting: catching_up
catching_up: streaming snapshotting
streaming: snapshotting
errored: snapshotting catching_up
paused: catching_up
removed: pending
"""


def test_only_the_documented_transitions_are_allowed():
    allowed = {
        TableState(line.split(":")[0]): {TableState(word) for word in line.split(":")[1].split()}
        for line in ALLOWED.strip().splitlines()
    }
    assert set(allowed) == set(TableState)
    always = {TableState.ERRORED, TableState.PAUSED, TableState.REMOVED}
    for now in TableState:
        assert {wanted for wanted in TableState if may_follow(now, wanted)} == allowed[now] | always | {now}


def test_a_new_table_is_pending_first():
    assert [state for state in TableState if may_follow(None, state)] == [TableState.PENDING]


def test_a_wrong_transition_names_the_table_and_both_states():
    with pytest.raises(StateError, match=r"public\.t: is pending, and cannot become streaming"):
        check_transition(TableState.PENDING, TableState.STREAMING, "public.t")


def test_the_states_before_one_are_the_inverse_of_what_may_follow():
    assert states_before(TableState.STREAMING) == {TableState.CATCHING_UP, TableState.STREAMING}
    assert states_before(TableState.ERRORED) == set(TableState)


def test_every_state_says_who_sets_it():
    for state in TableState:
        assert f"\n    {state} " in (TableState.__doc__ or "")


NOW = datetime(2025, 5, 1, 12, 0, tzinfo=UTC)


def test_lag_is_of_each_step_behind_the_source():
    progress = Progress(LSN(900), LSN(800), LSN(700), LSN(600), NOW - timedelta(seconds=3))
    found = lag(progress, LSN(1000), NOW)
    assert (found.receive_bytes, found.durable_bytes, found.confirmed_bytes) == (100, 200, 300)
    assert (found.apply_bytes, found.applied_seconds) == (400, 3.0)


def test_an_idle_source_is_not_late_and_a_new_pipeline_does_not_know():
    old = Progress(LSN(10), LSN(10), LSN(10), LSN(10), NOW - timedelta(days=3))
    assert lag(old, LSN(10), NOW).applied_seconds == 0.0
    assert lag(old, LSN(9), NOW).apply_bytes == 0
    assert lag(Progress(), LSN(10), NOW).applied_seconds is None
