"""Spark's Python workers do not start, in sessions of their own: it says so in words that are known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough("unit/test_spark_failures.py, with Spark's words")

ROOT = Path(__file__).resolve().parents[2]

# A session of its own: whether workers come from a daemon is decided once for all.
PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from airflow_provider_pgrepl.errors import SparkError
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import RangeCopies
from airflow_provider_pgrepl.replication.spark.session import build_session
from airflow_provider_pgrepl.replication.spark.failures import spark_errors
from types import SimpleNamespace

spark = build_session("no workers", "local[1]", {{"spark.python.use.daemon": "false"}}, delta=False)
spark.sparkContext.pythonExec = {python!r}
try:
    with spark_errors("applying changes"):
        spark.range(1).mapInArrow(lambda batches: batches, "id long").collect()
except SparkError as error:
    print("said:", error.message)
job = SimpleNamespace(relation=SimpleNamespace(table="public.t"), copy=print)
found = RangeCopies(spark, job, None, 1)._try({{0: None}}, {{}})
print("said:", type(found).__name__, found.message)
spark.stop()
"""


def test_workers_that_do_not_start_are_said(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 30\n")
    python.chmod(0o755)
    program = PROGRAM.format(root=str(ROOT), python=str(python))
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    said = [line.removeprefix("said: ") for line in ended.stdout.splitlines() if line.startswith("said: ")]
    assert said == [
        "applying changes: Spark could not start its Python workers",
        "SparkError copying public.t: Spark could not start its Python workers",
    ], ended.stderr[-3000:]


def test_a_daemon_that_python_does_not_find_is_told_of_by_name(tmp_path: Path) -> None:
    """Executors with PYTHONSAFEPATH fail so. It is shown with a local master, whose files Spark keeps
    elsewhere.
    """
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from airflow_provider_pgrepl.errors import ToolError
from airflow_provider_pgrepl.replication.spark.session import build_session
from airflow_provider_pgrepl.replication.spark.session import DAEMON_MODULE
from airflow_provider_pgrepl.replication.spark.failures import spark_errors

spark = build_session("no daemon", "local[1]", {{"spark.python.daemon.module": DAEMON_MODULE}}, delta=False)
try:
    with spark_errors("asking executors what they have"):
        spark.sparkContext.parallelize([1], 1).map(str).collect()
except ToolError as error:
    print("said:", error.hint)
spark.stop()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert "said: take PYTHONSAFEPATH" in ended.stdout, ended.stderr[-3000:]
