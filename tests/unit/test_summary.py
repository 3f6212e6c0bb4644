"""The line a minute that says how a replication stands: its words."""

from __future__ import annotations

from dataclasses import replace

from airflow_provider_pgrepl.replication.app.status.summary import Summary
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.state.tables import TableState

ERROR = {"error": "DriftError", "reason": "column vat was renamed", "hint": "resnapshot the table"}
GOOD = Summary(
    states={TableState.STREAMING: 3},
    errors={},
    changes=56_400,
    seconds=60.0,
    applied=1_234_567,
    lag_s=4.1,
    lag_bytes=466_944,
    held_bytes=13 << 20,
)


def test_states_changes_lag_and_wal_are_in_one_line() -> None:
    assert GOOD.to_text() == (
        "3 tables: 3 streaming; 56,400 changes received, 940/s; 1,234,567 rows applied since the start;"
        " the lake is 4.1 s, 456.0 KiB behind the source; the slot holds 13.0 MiB of WAL"
    )


def test_tables_in_error_are_named() -> None:
    states = {TableState.STREAMING: 2, TableState.ERRORED: 1}
    text = replace(GOOD, states=states, errors={"public.b": ERROR}).to_text()
    assert text.startswith("3 tables: 2 streaming, 1 errored (public.b); ")
    states = {TableState.ERRORED: 1, TableState.SNAPSHOTTING: 1}
    text = replace(GOOD, states=states, errors={"public.b": ERROR}).to_text()
    assert text.startswith("2 tables: 1 errored (public.b), 1 snapshotting; ")


def test_summary_names_first_errored_tables_and_counts_the_others() -> None:
    errors = {f"public.t{number:03}": ERROR for number in range(500)}
    text = replace(GOOD, states={TableState.ERRORED: 500}, errors=errors).to_text()
    assert "public.t019 and 480 more)" in text
    assert len(text) < 600


def test_result_has_error_and_hint_of_the_tables_that_it_names() -> None:
    found = replace(GOOD, errors={f"public.t{number:03}": ERROR for number in range(500)}).to_dict()
    assert list(found["errors"]) == found["errored"] == [f"public.t{number:03}" for number in range(20)]
    assert found["errors"]["public.t019"] == ERROR


def test_a_source_that_cannot_be_asked_is_said() -> None:
    text = replace(GOOD, lag_s=None, lag_bytes=None, held_bytes=None).to_text()
    assert text.endswith("; the source cannot be asked how far it is")


def test_before_the_first_consistent_point_there_is_no_lag() -> None:
    text = replace(GOOD, lag_s=None, lag_bytes=None).to_text()
    assert text.endswith("; the lake has no consistent point yet; the slot holds 13.0 MiB of WAL")


def test_a_long_lag_is_in_seconds_too() -> None:
    assert "the lake is 7,325.0 s, " in replace(GOOD, lag_s=7325.0).to_text()


def test_no_lsn_is_said_before_anything_was_applied() -> None:
    summary = Summary({TableState.STREAMING: 1}, {}, 0, 60.0, 0)
    assert summary.to_dict()["lsn"] is None
    assert replace(summary, applied_lsn=LSN(10)).to_dict()["lsn"] == "0/A"
    assert ApplierProgress().described() == "nothing was applied since the start"
    assert ApplierProgress(applied_lsn=LSN(10)).described() == "the lake is at 0/A"
