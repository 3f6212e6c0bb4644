"""spark/failures.py: the words in which Spark fails, as this package's errors; no Spark runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from airflow_provider_pgrepl.errors import (
    LakeUnavailableError,
    PgReplError,
    Retry,
    Scope,
    SparkError,
    ToolError,
)
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import RangeCopies, RangeTasks
from airflow_provider_pgrepl.replication.spark.failures import spark_error, spark_errors
from airflow_provider_pgrepl.replication.spark.session import DAEMON_MODULE

NO_WORKER = (
    "org.apache.spark.SparkException: Job aborted due to stage failure\n"
    "Caused by: java.net.SocketTimeoutException: Timed out while waiting for the Python worker to"
    " connect back\n"
    "\tat org.apache.spark.api.python.PythonWorkerFactory.createSimpleWorker(PythonWorkerFactory.scala:290)"
)
OF_A_QUERY = "[STREAM_FAILED] Query [id = 1] terminated with exception: Python worker failed to connect back."
TIMED_OUT = (
    "[STREAM_FAILED] Query [id = 1] terminated with exception: Timed out while waiting for the Python worker"
    " to connect back after 10 seconds"
)
IDLE = "org.apache.spark.SparkException: Python worker process terminated due to idle timeout (timeout: 60 s)"
NO_DAEMON = f"org.apache.spark.SparkException: Error from python worker:\n  No module named {DAEMON_MODULE}"


class JavaError(Py4JJavaError):
    """An error as py4j raises it, with a text that py4j would request from the JVM."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text


@pytest.mark.parametrize("trace", [NO_WORKER, OF_A_QUERY, TIMED_OUT])
def test_workers_that_did_not_start_are_named(trace: str) -> None:
    with pytest.raises(SparkError) as caught, spark_errors("applying changes"):
        raise JavaError(trace)
    assert caught.value.message == "applying changes: Spark could not start its Python workers"


def test_worker_that_was_silent_for_too_long_is_named_with_its_setting() -> None:
    with pytest.raises(SparkError) as caught, spark_errors("applying changes"):
        raise JavaError(IDLE)
    assert caught.value.message == "applying changes: Spark's Python worker timed out, and Spark ended it"
    assert "spark.python.worker.idleTimeoutSeconds" in caught.value.hint


def test_daemon_that_python_does_not_find_is_named_with_what_to_do() -> None:
    with pytest.raises(ToolError) as caught, spark_errors("asking executors what they have"):
        raise JavaError(NO_DAEMON)
    assert caught.value.hint.startswith("take PYTHONSAFEPATH")


def test_other_failure_of_spark_is_retried_and_shows_no_value() -> None:
    error = spark_error("the streaming query", "org.apache.spark.SparkException: a value of a row")
    assert (SparkError.retry, SparkError.scope) == (Retry.TIMED, Scope.PIPELINE)
    assert not isinstance(error, LakeUnavailableError)
    assert "value" not in str(error)


def tried(trace: str, tasks: type[RangeTasks[Any]] = RangeCopies) -> PgReplError:
    """Return the error of a table's copy, or of other `tasks`, that fail with `trace`."""

    def fail(_function: Any) -> None:
        raise JavaError(trace)

    context = SimpleNamespace(
        master="local[1]",
        defaultParallelism=1,
        _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False)),
        accumulator=lambda *_: SimpleNamespace(value=[]),
        parallelize=lambda *_: SimpleNamespace(foreach=fail),
    )
    job = SimpleNamespace(relation=SimpleNamespace(table="public.t"), copy=print)
    copies: Any = tasks(SimpleNamespace(sparkContext=context), job, None, 1)  # type: ignore[arg-type]
    found: PgReplError = copies._try({0: None}, {})
    return found


def test_copy_without_workers_is_sparks_failure_and_not_the_tables() -> None:
    assert (type(tried(NO_WORKER)).__name__, tried(NO_WORKER).message) == (
        "SparkError",
        "copying public.t: Spark could not start its Python workers",
    )


def test_copy_whose_tasks_crash_is_the_tables_failure() -> None:
    assert (
        tried("Python worker exited unexpectedly").message
        == "public.t: Spark tasks that copy it have crashed"
    )


def test_only_a_copy_whose_tasks_crash_asks_for_another_copy() -> None:
    crash = "Python worker exited unexpectedly"
    assert "Then resnapshot the table: pgrepl snapshot FILE.json --tables 'public.t'" in tried(crash).hint
    assert tried(crash, RangeTasks).hint.endswith("Then run the command again")
