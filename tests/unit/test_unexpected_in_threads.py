"""Threads and programs leave the trace of an unexpected exception in their log, and none of its text."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import threading
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import LakeError, SourceConnectionError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.progress_writer import ProgressWriter
from airflow_provider_pgrepl.replication.app.replication import Replication
from airflow_provider_pgrepl.replication.app.status import status
from airflow_provider_pgrepl.replication.app.status.summary import SummaryLog
from airflow_provider_pgrepl.replication.delta import log as delta_log
from airflow_provider_pgrepl.replication.delta.log import Checkpoints
from airflow_provider_pgrepl.replication.lake.apply import merge_task
from airflow_provider_pgrepl.replication.lake.apply.applier import Applier
from airflow_provider_pgrepl.replication.lake.apply.merge_task import MergeTaskPool
from airflow_provider_pgrepl.replication.lake.snapshot.table_queue import copy_tables
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver, ReconnectingReceiver
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.copy.copy_stream import _CopyBytes as CopyBytes
from airflow_provider_pgrepl.replication.source.event_trigger import message
from airflow_provider_pgrepl.replication.source.event_trigger import message as seal
from airflow_provider_pgrepl.replication.source.slot_creation import SlotCreation
from airflow_provider_pgrepl.replication.spark import executors
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.canary import (
    CANARY,
    LIMIT_S,
    UnexpectedError,
    bare,
    check,
    check_log,
    in_thread,
    raise_unexpected,
)

TABLE = TableName("public", "t")
stub: Any = SimpleNamespace


# --- threads of the replication app ---


def test_receiver_thread_leaves_its_trace(caplog):
    events = {"_stopping": threading.Event(), "failed": threading.Event()}
    receiver: Any = bare(Receiver, error=None, must_await_commits=False, **events)
    receiver._threads = []
    thread = receiver._thread("pgrepl-read", raise_unexpected)
    thread.start()
    thread.join(LIMIT_S)
    assert isinstance(receiver.error, UnexpectedError)
    assert receiver.failed.is_set()
    check_log(caplog, " in Receiver._guard", "the receiver ended: unexpected")


def test_thread_that_replaces_the_receiver_leaves_its_trace(caplog):
    receiver: Any = bare(ReconnectingReceiver, error=None, failed=threading.Event())
    receiver._replace_when_lost = raise_unexpected
    in_thread(receiver._watch)
    assert isinstance(receiver.error, UnexpectedError)
    assert receiver.failed.is_set()
    check_log(caplog, " in ReconnectingReceiver._watch")


def test_thread_that_writes_progress_leaves_its_trace(caplog):
    writer = ProgressWriter(stub(), "shop", raise_unexpected, raise_unexpected, raise_unexpected)
    in_thread(writer._run)
    assert isinstance(writer.error, UnexpectedError)
    check_log(caplog, " in ProgressWriter._run")


def test_thread_of_the_summary_leaves_its_trace(caplog):
    caplog.set_level(logging.INFO)
    turns = iter([False, True])
    stopping = stub(wait=lambda _: next(turns), is_set=lambda: False)
    summary: Any = bare(SummaryLog, _stopping=stopping, _interval_s=0)
    summary.read = raise_unexpected
    in_thread(summary._run)
    check_log(caplog, " in SummaryLog._run", "no summary: tests.support.canary.UnexpectedError")


def test_thread_of_maintenance_leaves_its_trace(caplog):
    replication: Any = bare(Replication, _tidying=threading.Lock())
    in_thread(lambda: replication._alone(raise_unexpected))
    assert not replication._tidying.locked()
    check_log(caplog, " in Replication._alone", "the thread pgrepl-test ended: unexpected")


def applier(**fields: Any) -> Any:
    return bare(
        Applier,
        _changed=threading.Condition(threading.RLock()),
        _has_to_end=threading.Event(),
        _until_settled=False,
        _holders=0,
        error=None,
        **fields,
    )


def test_thread_of_the_applier_leaves_its_trace(caplog):
    made = applier(_rounds=stub(step=raise_unexpected, is_running=False, close=lambda: None))
    in_thread(made._run)
    assert isinstance(made.error, UnexpectedError)
    check_log(caplog, " in Applier._run")


def test_thread_that_reads_the_changelog_leaves_its_trace(caplog):
    made = applier(_batches=stub(next=raise_unexpected))
    in_thread(lambda: made._read(available_now=False))
    assert isinstance(made.error, UnexpectedError)
    check_log(caplog, " in Applier._read")


def test_read_that_fails_after_the_stop_is_no_error(caplog):
    made = applier()

    def fail_after_the_stop() -> None:
        made._has_to_end.set()
        raise_unexpected()

    made._batches = stub(next=fail_after_the_stop)
    in_thread(lambda: made._read(available_now=False))
    assert made.error is None
    assert not caplog.records


def test_thread_of_a_merge_leaves_its_trace(monkeypatch, caplog):
    ended: list[Any] = []
    monkeypatch.setattr(merge_task, "on_executor", raise_unexpected)
    spark: Any = stub(sparkContext=None)
    runner = MergeTaskPool(spark, lambda *done: ended.append(done))
    runner.run([])
    runner.close()
    [(_, results, failed)] = ended
    assert results == []
    assert isinstance(failed, UnexpectedError)
    check_log(caplog, " in MergeTaskPool._run")


def test_results_of_a_merge_that_cannot_be_taken_leave_a_trace(monkeypatch, caplog):
    monkeypatch.setattr(merge_task, "on_executor", lambda _: (_ for _ in ()).throw(LakeError("x")))
    spark: Any = stub(sparkContext=None)
    runner = MergeTaskPool(spark, raise_unexpected)
    runner.run([])
    runner.close()
    check_log(caplog, " in MergeTaskPool._run", "taking the results of a share")


# --- threads of the snapshot app ---


def test_thread_that_copies_a_table_leaves_its_trace(caplog):
    with pytest.raises(UnexpectedError):
        copy_tables([TABLE], raise_unexpected, finished=lambda *_: None, failed=lambda *_: None)
    check_log(caplog, "copying public.t: unexpected")


def test_thread_of_a_copy_leaves_its_trace_in_log_and_error(caplog):
    @contextmanager
    def cursor() -> Any:
        yield stub(copy_expert=raise_unexpected)

    source: Any = bare(CopyBytes, failure=None, _stopping=False, _stalled=False)
    source._connection, source._range = stub(cursor=cursor), stub(leaf=TABLE, sql="")
    import os

    read_end, write_end = os.pipe()
    try:
        in_thread(lambda: source._copy(write_end))
    finally:
        os.close(read_end)
        source._stopped = True
    assert isinstance(source.failure, SourceConnectionError)
    assert source.failure.message == "copying public.t: UnexpectedError"
    check(source.failure.trace, " in _CopyBytes._copy")
    check_log(caplog, " in _CopyBytes._copy")


def test_thread_that_creates_a_slot_hands_its_exception_over():
    made: Any = bare(SlotCreation, _error=None, _temporary=True, _name="s")
    made._connection = stub(server_version=180000, cursor=raise_unexpected)
    in_thread(made._create)
    assert isinstance(made._error, UnexpectedError)


# --- what is read from the source ---


def test_message_of_the_event_trigger_that_cannot_be_read_leaves_a_trace(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(message, "_parse", raise_unexpected)
    assert message.parse_ddl_message(b"{}", "p") is message.ANYTHING
    check_log(caplog, " in parse_ddl_message")
    caplog.clear()
    monkeypatch.setattr(json, "loads", raise_unexpected)
    assert seal.read_sealed(b"{}\n") is None
    check_log(caplog, " in read_sealed")


# --- programs ---


def test_status_that_cannot_read_the_changelog_leaves_a_trace(monkeypatch, caplog):
    monkeypatch.setattr(status, "open_changelog", raise_unexpected)
    pipeline = Pipeline(name="shop", tables=("public.*",), lake="/lake/shop")
    found = status._read_lake(pipeline)
    assert found.problems == ("the changelog cannot be read: UnexpectedError",)
    check_log(caplog, " in _read_lake")


def test_status_shows_the_trace_of_a_table():
    from airflow_provider_pgrepl.replication.app.status import text

    record: Any = stub(
        table=TABLE, state=TableState.ERRORED, since=datetime.now(UTC), rows_copied=1, error="LakeTableError",
        reason="unexpected KeyError", hint="h", lsn=None, trace="KeyError\n  a.py:1 in f",
        verified_through=None, verified_at=None,
        copying=None,
    )  # fmt: skip
    pipeline = Pipeline(name="shop", tables=("public.*",), lake="/lake/shop")
    table = status._table(pipeline, record, status._Lake(), LSN(9), None)
    shown = json.loads(json.dumps(text._plain(asdict(table))))
    assert shown["trace"] == ["KeyError", "  a.py:1 in f"]


def test_program_ends_with_a_trace_and_its_exit_code(tmp_path, monkeypatch, caplog):
    file = tmp_path / "shop.json"
    file.write_text(json.dumps({"name": "shop", "lake": str(tmp_path / "lake"), "tables": ["public.*"]}))
    monkeypatch.setattr(process, "_log_to_stderr", lambda: None)

    def add(_: argparse.ArgumentParser) -> None:
        """Add no arguments."""

    code = process.run("replicate", ["--pipeline", str(file)], add, raise_unexpected)
    assert code == process.CRASHED
    check_log(caplog, "replicate failed, which is a bug: run it again, and report", ": unexpected", " in run")
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_thread_without_a_handler_leaves_its_trace(caplog, capsys):
    before = threading.excepthook
    in_thread(raise_unexpected)
    check_log(caplog, "the thread pgrepl-test ended: unexpected")
    assert CANARY not in "".join(capsys.readouterr())
    assert threading.excepthook is before


def test_object_that_fails_when_it_is_deleted_leaves_its_trace(caplog, capsys):
    class Odd:
        def __del__(self) -> None:
            raise_unexpected()

    with process.traces_of_threads():
        odd = Odd()
        del odd
    check_log(caplog, "Odd.__del__")
    assert CANARY not in "".join(capsys.readouterr())


def test_thread_of_a_checkpoint_leaves_its_trace(monkeypatch, caplog):
    monkeypatch.setattr(delta_log, "open_delta", raise_unexpected)
    writer: Any = bare(Checkpoints, _uri="/lake/t", _every=1, _writing=None)
    with process.traces_of_threads():
        writer.after(0, 1)
        writer._writing.join(LIMIT_S)
    check_log(caplog, "the thread pgrepl-checkpoint ended: unexpected")


def test_package_that_cannot_be_loaded_leaves_its_trace_in_the_log_of_the_executor(monkeypatch, capsys):
    monkeypatch.setattr(importlib, "import_module", raise_unexpected)
    assert executors.look(["numba"])[1] == {"numba": "!"}
    check(f"{capsys.readouterr().err} KeyError", "numba cannot be loaded: UnexpectedError\n", " in look")
