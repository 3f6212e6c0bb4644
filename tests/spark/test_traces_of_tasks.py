"""Errors of Spark tasks reach the driver as classes and frames, without their text."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import SparkError, TableError
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import CopyJob, RangeCopies
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.spark.failures import spark_errors
from tests.support.canary import CANARY, logged
from tests.support.changes import work_of


class Odd:
    """Choices that fail at the first look, in the task that has them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise KeyError(CANARY)


def test_error_of_spark_names_classes_and_frames_of_its_worker(spark, caplog):
    def fail(batches: Any) -> Any:
        list(batches)
        raise KeyError(CANARY)

    with pytest.raises(SparkError) as found, spark_errors("applying changes"):
        spark.range(1).mapInArrow(fail, "id long").collect()
    error = found.value
    assert error.message.startswith("applying changes: Spark failed with KeyError")
    lines = error.trace.splitlines()
    assert "KeyError" in lines
    assert any(line.endswith(" in fail") and "test_traces_of_tasks.py:" in line for line in lines), lines
    assert any(line.startswith("  pyspark/worker.py:") for line in lines), lines
    assert any(line.startswith("org.apache.spark.") for line in lines), lines
    assert error.trace in logged(caplog)
    assert CANARY not in f"{error} {error.trace} {logged(caplog)}"


def test_error_of_an_rdd_names_classes_and_frames(spark, caplog):
    def fail(number: int) -> int:
        raise ZeroDivisionError(CANARY, number)

    with (
        pytest.raises(SparkError, match="Spark failed with ZeroDivisionError") as found,
        spark_errors("applying changes"),
    ):
        spark.sparkContext.parallelize([1], 1).map(fail).collect()
    assert " in fail" in found.value.trace
    assert "org.apache.spark.api.python.PythonException" in found.value.trace
    assert CANARY not in f"{found.value} {found.value.trace} {logged(caplog)}"


def test_copy_that_raises_in_a_task_leaves_its_trace(spark, caplog):
    caplog.set_level(logging.INFO)
    work = work_of(7)
    options: Any = Odd()
    job = CopyJob("", "", work.relation, options, "/lake", LSN(5), datetime.now(UTC))
    keeper: Any = SimpleNamespace(check=lambda: None)
    with pytest.raises(TableError, match="unexpected KeyError") as found:
        RangeCopies(spark, job, keeper, 1).run([SimpleNamespace(copied=None)])
    lines = found.value.trace.splitlines()
    assert lines[0] == "KeyError"
    ours = "  airflow_provider_pgrepl/replication/lake/snapshot/range_copy.py:"
    assert any(line.startswith(ours) and " in CopyJob.copy" in line for line in lines), lines
    assert CANARY not in f"{found.value} {found.value.trace} {logged(caplog)}"


def test_copy_whose_tasks_crash_names_classes_and_frames(spark, caplog):
    def crash(*_: Any) -> None:
        raise MemoryError(CANARY)

    part: Any = SimpleNamespace()
    job: Any = SimpleNamespace(relation=SimpleNamespace(table="public.t"), copy=crash)
    keeper: Any = SimpleNamespace(check=lambda: None)
    found = RangeCopies(spark, job, keeper, 1)._try({0: part}, {})
    assert found is not None
    assert found.message == "public.t: Spark tasks that copy it have crashed"
    assert "MemoryError" in found.trace.splitlines()
    assert " in crash" in found.trace
    assert found.trace in logged(caplog)
    assert CANARY not in f"{found} {found.trace} {logged(caplog)}"


def test_error_of_the_driver_is_named_by_its_class(spark, caplog):
    with pytest.raises(SparkError) as found, spark_errors("reading"):
        spark.sql(f"select `{CANARY}` from range(1)").collect()
    assert found.value.message.startswith("reading: Spark failed with ")
    assert "AnalysisException" in found.value.message
    assert CANARY not in f"{found.value} {found.value.trace} {logged(caplog)}"
