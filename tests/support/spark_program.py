"""A program with a Spark session of its own, as a reader has it: what it says, line by line as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.lake.spark_jars import JARS_VARIABLE
from airflow_provider_pgrepl.replication.store_variables import AZURE_KEY, AZURE_SAS
from tests.support.replicated import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JARS = ROOT / ".jars"


def said_by(program: Path, *arguments: str, jars: Path = JARS, folder: Path | None = None) -> list[Any]:
    """Run it to its end, in a folder; it may say nothing of a store's secret, nor may Spark's settings, which
    a reader's program tells."""
    ended = subprocess.run(
        [sys.executable, str(program), *arguments],
        env={**os.environ, JARS_VARIABLE: str(jars), "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    for name in ("AWS_SECRET_ACCESS_KEY", AZURE_KEY, AZURE_SAS):
        if secret := os.environ.get(name):
            assert secret not in ended.stdout + ended.stderr
    said = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert said, ended.stderr[-3000:]
    return said


@contextmanager
def saying_errors(spark: SparkSession) -> Iterator[None]:
    """In such a program: our own errors are said, and the session ends."""
    try:
        yield
    except PgReplError as error:
        print(json.dumps({"error": type(error).__name__, "said": str(error)}))
    finally:
        spark.stop()
