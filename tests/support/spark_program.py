"""A program with a Spark session of its own, as a reader has it: what it says, line by line as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.settings.stores import AZURE_KEY, AZURE_SAS
from airflow_provider_pgrepl.replication.spark.connectors import JARS_VARIABLE
from tests.support.replicated import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JARS = ROOT / ".jars"
END = "{}"
"""The line after the last of an answer."""
_LONGEST_S = 560.0
"""Less than pytest allows a test."""
_OF_SEVERAL_TESTS_S = 1800.0


def said_by(program: Path, *arguments: str, jars: Path = JARS, folder: Path | None = None) -> list[Any]:
    """Run a program to its end, in a folder, and return its output.

    Asserts that the output, in which a reader's program prints Spark's settings, contains no store's secret.
    """
    ended = subprocess.run(
        [sys.executable, str(program), *arguments],
        env={**os.environ, JARS_VARIABLE: str(jars), "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
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
def asking(program: Path, *arguments: str, folder: Path) -> Iterator[Callable[[str], list[Any]]]:
    """Run a program, in a folder, until the end of the block. Yields a function that sends it one line and
    returns its answer, lines of JSON.
    """
    log = folder / "program.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(program), *arguments],
            env={**os.environ, JARS_VARIABLE: str(JARS), "PYTHONPATH": str(ROOT)},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    asked, answers = process.stdin, process.stdout

    def ask(line: str) -> list[Any]:
        asked.write(f"{line}\n")
        asked.flush()
        said = []
        for answer in answers:
            if answer.rstrip() == END:
                return said
            if answer.startswith("{"):
                said.append(json.loads(answer))
        raise AssertionError(f"the program ended: {log.read_text()[-3000:]}")

    # Ends a program that hangs, and with it what waits for its answer.
    end = threading.Timer(_OF_SEVERAL_TESTS_S, process.kill)
    end.start()
    try:
        yield ask
    finally:
        asked.close()
        process.wait()
        end.cancel()
        answers.close()


@contextmanager
def saying_errors(spark: SparkSession) -> Iterator[None]:
    """Print this package's errors as JSON in such a program, and end the session."""
    try:
        yield
    except PgReplError as error:
        print(json.dumps({"error": type(error).__name__, "said": str(error)}))
    finally:
        spark.stop()
