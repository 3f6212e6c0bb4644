"""What Spark itself fails with, as one of our errors: no trouble of a table, and none of the lake."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import PgReplError, SparkError, ToolError
from airflow_provider_pgrepl.replication.lake.session_settings import DAEMON_MODULE

_NO_DAEMON = f"No module named {DAEMON_MODULE}"
_OTHER_PYTHON = "PYTHON_VERSION_MISMATCH"
_LACKING = "ModuleNotFoundError: No module named 'airflow_provider_pgrepl"
_WORKERS = "org.apache.spark.api.python.PythonWorkerFactory"
"""In the trace of every error by which Spark says that a Python worker did not start."""


@contextmanager
def spark_errors(doing: str) -> Iterator[None]:
    """`doing`: what Spark was at. Its own words, which may hold values of rows, are in the log of Spark."""
    failed: PgReplError | None = None
    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        failed = spark_error(doing, str(error))
    if failed is not None:
        raise failed


def spark_error(doing: str, trace: str) -> PgReplError:
    """From the words in which Spark failed: SparkError, or ToolError where an executor lacks something."""
    if lacking := what_executors_lack(trace):
        return ToolError(f"{doing}: {lacking}", hints.EXECUTORS)
    if _NO_DAEMON in trace:
        return ToolError(
            f"{doing}: Python on an executor does not look into its current folder, where the daemon of its"
            " workers is",
            "take PYTHONSAFEPATH out of the executors' environment, or set"
            " spark.python.daemon.module=pyspark.daemon",
        )
    if is_of_workers(trace):
        return SparkError(
            f"{doing}: Spark could not start its Python workers",
            "the host, or that of an executor, may be overloaded or short of memory; on a cluster its"
            " spark.pyspark.python must be the Python that has this package",
        )
    return SparkError(f"{doing}: Spark failed", "Spark's own log, above, says with what; then run it again")


def what_executors_lack(trace: str) -> str:
    """By the names of what Spark fails with before a task is at work; empty for all else."""
    if _LACKING in trace:
        return "the Python of Spark's executors lacks airflow_provider_pgrepl, or has another version"
    if _OTHER_PYTHON in trace:
        return (
            f"the Python of Spark's executors is not the driver's {sys.version_info[0]}.{sys.version_info[1]}"
        )
    return ""


def is_of_workers(trace: str) -> bool:
    """Whether no task was at work, because Spark could not start its Python workers."""
    return _WORKERS in trace
