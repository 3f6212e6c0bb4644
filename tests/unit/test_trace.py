"""trace.py: of an unexpected exception classes and frames are kept, and no text, source or value."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import pickle
import subprocess
import sys
import traceback
from typing import Any

import pytest

from airflow_provider_pgrepl import trace
from airflow_provider_pgrepl.errors import LakeError, LakeTableError
from airflow_provider_pgrepl.replication.runtime import process_io
from airflow_provider_pgrepl.trace import frame, log_unexpected, trace_of, traced
from tests.support.canary import CANARY, check, raise_unexpected

log = logging.getLogger(__name__)


def caught(work: Any = raise_unexpected) -> Exception:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_trace_holds_class_frames_and_cause() -> None:
    lines = trace_of(caught()).splitlines()
    assert lines[0] == "tests.support.canary.UnexpectedError"
    assert lines[1].startswith("  tests/unit/test_trace.py:")
    assert lines[1].endswith(" in caught")
    assert lines[2].startswith("  tests/support/canary.py:")
    assert lines[2].endswith(" in raise_unexpected")
    assert lines[3] == "caused by KeyError"
    assert len(lines) == 5
    check("\n".join(lines), "in caught")


def test_hidden_context_is_in_the_trace_without_its_text() -> None:
    def hide() -> None:
        try:
            raise ValueError(CANARY)
        except ValueError:
            raise LakeError("hidden") from None

    lines = trace_of(caught(hide)).splitlines()
    assert lines[0] == "airflow_provider_pgrepl.errors.LakeError"
    assert "raised while handling ValueError" in lines
    assert CANARY not in "\n".join(lines)


def test_members_of_a_group_are_in_the_trace() -> None:
    def gather() -> None:
        raise ExceptionGroup(CANARY, [caught(), ValueError(CANARY)])

    text = trace_of(caught(gather))
    assert "one of them tests.support.canary.UnexpectedError" in text
    assert "one of them ValueError" in text
    check(text)


def test_frames_and_causes_are_bounded() -> None:
    def recur(depth: int) -> None:
        if depth:
            recur(depth - 1)
        raise ValueError(CANARY)

    lines = trace_of(caught(lambda: recur(200))).splitlines()
    assert len(lines) == trace.MOST_FRAMES + 2
    assert lines[1] == "  (173 frames before these)"
    error: Exception = ValueError(CANARY)
    for _ in range(20):
        outer = ValueError(CANARY)
        outer.__cause__ = error
        error = outer
    assert len(trace_of(error).splitlines()) == trace.MOST_CAUSES + 1
    error.__cause__ = error
    assert trace_of(error) == "ValueError"


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/opt/venv/lib/python3.11/site-packages/pyarrow/table.pxi", "pyarrow/table.pxi"),
        ("/usr/lib/python3.11/json/decoder.py", "json/decoder.py"),
        ("/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", "pyspark/worker.py"),
        ("/srv/airflow_provider_pgrepl/errors.py", "airflow_provider_pgrepl/errors.py"),
        ("/opt/venv/lib/python3.12/site-packages/airflow_provider_pgrepl/errors.py",
         "airflow_provider_pgrepl/errors.py"),
        ("/home/of-a-user/transforms.py", "transforms.py"),
        ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>"),
        ("pyarrow/error.pxi", "pyarrow/error.pxi"),
    ],
)  # fmt: skip
def test_file_is_shown_below_the_folder_where_python_finds_it(path: str, shown: str) -> None:
    assert frame(path, 7, "f.<locals>.<lambda>") == f"  {shown}:7 in f.<locals>.<lambda>"


def test_names_that_are_none_are_not_shown() -> None:
    odd = type("Odd (\n1)", (Exception,), {"__module__": "m"})
    assert trace_of(odd()) == "m.Odd???1?"


def test_error_keeps_the_trace_of_its_cause_from_process_to_process() -> None:
    error = traced(LakeTableError("public.t: KeyError"), caught())
    again = pickle.loads(pickle.dumps(error))
    check(again.trace)
    assert str(again) == "public.t: KeyError"
    # Airflow, and Spark's workers, show an exception as Python does.
    shown = "".join(traceback.format_exception(again))
    assert again.trace in shown
    assert CANARY not in shown
    # It is still there in the trace of what is raised in its place.
    check(trace_of(again), "caused by tests.support.canary.UnexpectedError")


def test_only_unexpected_exceptions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    for expected in (LakeError("what is said elsewhere"), KeyboardInterrupt(), SystemExit(1)):
        log_unexpected(log, "doing", expected)
    assert caplog.text == ""
    log_unexpected(log, "doing", caught(), logging.WARNING)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    check(record.getMessage(), "doing: unexpected tests.support.canary.UnexpectedError")


def written(work: Any, *loggers: str) -> str:
    """Return what the programs' formatter writes for the log records of `work`."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(process_io.formatter(process_io.JSON))
    for name in loggers:
        logging.getLogger(name).addHandler(handler)
    try:
        work()
    finally:
        for name in loggers:
            logging.getLogger(name).removeHandler(handler)
    return "\n".join(str(json.loads(line)["text"]) for line in stream.getvalue().splitlines())


def test_formatter_writes_traces_in_place_of_tracebacks() -> None:
    error = caught()

    def logged_elsewhere() -> None:
        logging.getLogger("a.library").error("failed", exc_info=error)

    # The handler of pytest has left Python's own text in the record.
    check(written(logged_elsewhere, "a.library"), "failed\ntests.support.canary.UnexpectedError")


def test_formatter_shows_nothing_that_asyncio_was_given() -> None:
    async def fail_in_callback() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(raise_unexpected, CANARY)
        task = loop.create_task(asyncio.to_thread(raise_unexpected))
        await asyncio.wait([task])
        del task

    text = written(lambda: asyncio.run(fail_in_callback()), "asyncio")
    check(text, "Exception in callback\n", "Task exception was never retrieved\n")


def test_command_line_ends_with_a_trace() -> None:
    program = """
import sys
from airflow_provider_pgrepl import __main__ as main
from airflow_provider_pgrepl.replication.runtime import compiled_loops as compiled
from tests.support.canary import raise_unexpected
compiled.ensure_compiled = raise_unexpected
sys.exit(main.main(["warm-up"]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 1
    check(
        ended.stderr,
        "pgrepl failed, which is a bug: run it again, and report",
        "airflow_provider_pgrepl/__main__.py:",
    )
    assert ended.stdout == ""
