"""Tasks, readers and writers of the lake leave the trace of an unexpected exception, and none of its text."""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake.exceptions import DeltaError
from obstore.exceptions import GenericError

from airflow_provider_pgrepl.errors import LakeError, LakeTableError, PgReplError, TableError
from airflow_provider_pgrepl.replication.lake import sql
from airflow_provider_pgrepl.replication.lake.apply import table_merge, worker_daemon
from airflow_provider_pgrepl.replication.lake.apply.merge_scheduler import TableOutcomes
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableResult
from airflow_provider_pgrepl.replication.lake.delta import commit
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import ParquetFiles
from airflow_provider_pgrepl.replication.lake.history import versions as history_rows
from airflow_provider_pgrepl.replication.lake.snapshot import range_copy
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import CopyJob, RangeOutcome
from airflow_provider_pgrepl.replication.lake.time_travel import moment
from airflow_provider_pgrepl.replication.lake.time_travel.moment import TableVersion
from airflow_provider_pgrepl.replication.lake.time_travel.spark_overlay import hiding_values
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.canary import (
    CANARY,
    bare,
    check,
    check_log,
    logged,
    raise_unexpected,
)
from tests.support.changes import work_of

TABLE = TableName("public", "t")
stub: Any = SimpleNamespace


# --- tasks of Spark ---


def test_merge_that_raises_leaves_its_trace_in_log_result_and_record(monkeypatch, caplog):
    monkeypatch.setattr(table_merge, "open_newest", raise_unexpected)
    result = table_merge.bring_forward(work_of(7), [], LSN(9))
    assert result.error == "unexpected UnexpectedError"
    assert not result.stops_pipeline
    check(result.trace, " in _apply", "airflow_provider_pgrepl/replication/lake/apply/table_merge.py:")
    check_log(caplog, " in _apply", "applying changes to public.t")
    caplog.clear()
    recorded = record_of(result)
    assert isinstance(recorded, LakeTableError)
    assert recorded.trace == result.trace
    check_log(
        caplog, " in _apply", "table public.t stopped by an unexpected tests.support.canary.UnexpectedError"
    )
    assert CANARY not in repr(result)


def test_merge_that_raises_an_error_of_ours_keeps_the_trace_of_its_cause(monkeypatch):
    def read(*_: Any) -> None:
        hiding_values(raise_unexpected)

    monkeypatch.setattr(table_merge, "open_newest", read)
    result = table_merge.bring_forward(work_of(7), [], LSN(9))
    assert result.error_kind == "LakeTableError"
    check(result.trace, " in hiding_values")
    check(record_of(result).trace, " in hiding_values")


def test_storage_error_of_a_merge_leaves_its_trace(monkeypatch, caplog):
    def read(*_: Any) -> None:
        raise OSError(5, CANARY)

    monkeypatch.setattr(table_merge, "open_newest", read)
    result = table_merge.bring_forward(work_of(7), [], LSN(9))
    assert result.trace.startswith("OSError\n")
    assert " in _apply" in result.trace
    assert CANARY not in result.trace
    with pytest.raises(PgReplError):
        record_of(result)
    assert "table public.t stops the pipeline, by OSError\n" in logged(caplog)


@pytest.mark.parametrize("kind", [KeyError, ValueError])
def test_text_of_an_unexpected_error_is_not_taken_for_that_of_a_store(monkeypatch, kind):
    """The text may hold values of rows, which may look like any message."""

    def read(*_: Any) -> None:
        raise kind("value of a row: HTTP status 503, error sending request")

    monkeypatch.setattr(table_merge, "open_newest", read)
    result = table_merge.bring_forward(work_of(7), [], LSN(9))
    assert result.error == f"unexpected {kind.__name__}"
    assert not result.stops_pipeline


@pytest.mark.parametrize("kind", [DeltaError, GenericError, pa.ArrowInvalid, Exception])
def test_error_of_a_store_that_is_away_stops_the_pipeline(monkeypatch, kind):
    """DataFusion raises plain exceptions, or Arrow's."""

    def read(*_: Any) -> None:
        raise kind("Generic S3 error: error sending request")

    monkeypatch.setattr(table_merge, "open_newest", read)
    assert table_merge.bring_forward(work_of(7), [], LSN(9)).stops_pipeline


def record_of(result: TableResult) -> PgReplError:
    """Return the error with which a table is marked errored for a result."""
    marked: list[PgReplError] = []
    relation = work_of(7).relation
    record: Any = stub(table=TABLE, state=TableState.STREAMING, relation=relation, position_lsn=LSN(5))
    state_db = stub(
        read_tables=lambda _: {TABLE: record},
        mark_errored=lambda _, __, error, ___: marked.append(error) or True,
    )
    TableOutcomes("shop", state_db, stub(), stub(), stub()).mark_errored(record, result)
    [error] = marked
    return error


def test_copy_that_raises_leaves_its_trace_in_log_and_outcome(monkeypatch, caplog):
    monkeypatch.setattr(range_copy, "write_range", raise_unexpected)
    work = work_of(7)
    job = CopyJob("", "", work.relation, work.options, "/lake", LSN(5), datetime.now(UTC))
    outcome = job.copy(0, stub(copied=None))
    error = outcome.error
    assert isinstance(error, TableError)
    assert error.message == "unexpected UnexpectedError"
    check(error.trace, " in CopyJob.copy")
    check_log(caplog, " in CopyJob.copy", "copying public.t")
    assert CANARY not in repr(outcome)


def test_copy_that_raises_an_error_of_ours_keeps_the_trace_of_its_cause(monkeypatch):
    monkeypatch.setattr(range_copy, "write_range", lambda *_: hiding_values(raise_unexpected))
    work = work_of(7)
    job = CopyJob("", "", work.relation, work.options, "/lake", LSN(5), datetime.now(UTC))
    error = job.copy(0, stub(copied=None)).error
    assert isinstance(error, LakeTableError)
    check(error.trace, " in hiding_values")


def test_outcome_without_an_error_has_none():
    assert RangeOutcome(0).error is None


def test_reading_task_leaves_its_trace(caplog):
    with pytest.raises(LakeTableError, match="lake table: UnexpectedError") as found:
        hiding_values(raise_unexpected)
    check(found.value.trace, " in hiding_values")
    check_log(caplog, " in hiding_values")


def test_daemon_of_the_workers_leaves_its_trace(monkeypatch, capsys):
    monkeypatch.setattr(worker_daemon, "load", raise_unexpected)
    worker_daemon._load_or_say()
    said = capsys.readouterr().err
    assert said.startswith("pgrepl: Python workers load all for themselves: UnexpectedError\n  ")
    check(f"{said} KeyError", "worker_daemon.py:", " in _load_or_say")


# --- reading and writing the lake ---


def test_table_version_that_cannot_be_read_leaves_a_trace(monkeypatch, caplog):
    import pyarrow as pa

    opened = stub(schema=lambda: stub(to_arrow=lambda: pa.schema([])))
    monkeypatch.setattr(TableVersion, "open", lambda _: opened)
    monkeypatch.setattr(moment, "query_delta", raise_unexpected)
    with pytest.raises(LakeError, match="cannot be read any more") as found:
        TableVersion(TABLE, "/lake/t", 3).read()
    check(found.value.trace, " in TableVersion.read")
    check_log(caplog, " in TableVersion.read")


def test_history_that_cannot_be_read_leaves_a_trace(monkeypatch, caplog):
    import pyarrow as pa

    monkeypatch.setattr(history_rows, "QueryBuilder", raise_unexpected)
    schema = pa.schema([("id", pa.int64())])
    table: Any = stub(schema=lambda: stub(to_arrow=lambda: schema), table_uri="/lake/t")
    with pytest.raises(LakeTableError, match="its rows cannot be read: UnexpectedError") as found:
        list(history_rows.current_rows(table, ["id"]))
    check(found.value.trace, " in current_rows")
    check_log(caplog, " in current_rows")


def test_query_that_fails_at_its_rows_leaves_a_trace(caplog):
    rows: Any = (raise_unexpected() for _ in range(1))
    with pytest.raises(LakeError, match="failed: UnexpectedError") as found:
        list(sql._batches(rows, pa.schema([]), "the query failed", ""))
    check(found.value.trace, " in _batches")
    check_log(caplog, " in _batches")


def test_commit_that_fails_leaves_a_trace(caplog):
    table: Any = stub(version=lambda: 1, table_uri="/lake/t", update_incremental=lambda: None)
    with pytest.raises(LakeTableError, match="Delta failed with UnexpectedError") as found:
        commit.fenced(table, "app", LSN(5), raise_unexpected)
    check(found.value.trace, " in try_commit")
    check_log(caplog, " in try_commit")


def test_file_that_cannot_be_dropped_leaves_a_trace(caplog):
    caplog.set_level(logging.DEBUG)
    failing = stub(close=raise_unexpected, drop=raise_unexpected)
    files: Any = bare(ParquetFiles, _writer=failing, _sink=failing, _names=[], _folder="", _filesystem=None)
    with suppress(TypeError, AttributeError):
        files.discard()
    check_log(caplog, "closing an unfinished file", "dropping an unfinished file")
