"""Classes and frames read from Spark's failure messages by their form, without any text."""

from __future__ import annotations

import logging

import pytest

from airflow_provider_pgrepl.replication.spark.failures import spark_error, text_of, trace_in_words
from tests.support.canary import CANARY, UnexpectedError, logged, raise_unexpected

# ruff: noqa: E501 - lines as Spark writes them
WORDS = f"""An error occurred while calling o57.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times, most\
 recent failure: Lost task 0.3 in stage 3.0 (TID 9) (host executor 1): org.apache.spark.api.python.PythonException:\
 Traceback (most recent call last):
  File "/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", line 1247, in main
    process({CANARY!r})
    ^^^^^^^
  File "/opt/venv/lib/python3.11/site-packages/airflow_provider_pgrepl/replication/lake/x.py", line 7, in <lambda>
    {CANARY}
  [Previous line repeated 3 more times]
KeyError: '{CANARY}'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/pyarrow/table.pxi", line 4, in pyarrow.lib.Table.f
pyarrow.lib.ArrowInvalid: Could not convert {CANARY}
{CANARY}Error: of another line
  File {CANARY}
Caused by {CANARY}

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:572)
\tat {CANARY}.f(X.scala:1)
Driver stacktrace:
Caused by: java.io.IOException: {CANARY}
Caused by: com.amazonaws.services.s3.model.AmazonS3Exception: {CANARY}
Caused by: java.io.IOException: again
"""


def test_classes_and_frames_are_read_from_the_words() -> None:
    assert trace_in_words(WORDS).splitlines() == [
        "org.apache.spark.SparkException",
        "org.apache.spark.api.python.PythonException",
        "KeyError",
        "  pyspark/worker.py:1247 in main",
        "  airflow_provider_pgrepl/replication/lake/x.py:7 in <lambda>",
        "pyarrow.lib.ArrowInvalid",
        "  pyarrow/table.pxi:4 in pyarrow.lib.Table.f",
        "java.io.IOException",
        "com.amazonaws.services.s3.model.AmazonS3Exception",
    ]


def test_error_names_the_classes_and_keeps_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    error = spark_error("applying changes", WORDS)
    assert error.message == (
        "applying changes: Spark failed with KeyError, pyarrow.lib.ArrowInvalid, org.apache.spark.SparkException,"
        " org.apache.spark.api.python.PythonException, java.io.IOException"
    )
    assert error.trace == trace_in_words(WORDS)
    assert error.trace in logged(caplog)
    assert CANARY not in f"{error} {error.trace} {error.__notes__} {logged(caplog)}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        CANARY,
        f"{CANARY}: {CANARY}",
        f"Traceback (most recent call last):\n{CANARY}\n",
        f"x.{CANARY}Exception:",
    ],
)
def test_words_without_classes_and_frames_give_none(text: str) -> None:
    assert trace_in_words(text) == ""
    assert spark_error("reading", text).message == "reading: Spark failed"


def test_words_that_break_off_keep_their_frames() -> None:
    text = 'Traceback (most recent call last):\n  File "/a/site-packages/b/c.py", line 3, in f\n'
    assert trace_in_words(text).splitlines() == ["a Python worker", "  b/c.py:3 in f"]


def test_very_long_words_give_a_bounded_trace() -> None:
    frame = '  File "/a/site-packages/b/c.py", line {}, in f\n'
    blocks = "".join(
        "Traceback (most recent call last):\n" + "".join(frame.format(100 * block + line) for line in range(90))
        + f"KeyError: {block}\n" for block in range(100)
    )  # fmt: skip
    lines = trace_in_words(blocks).splitlines()
    assert 90 < len(lines) < 140
    classes = "".join(f"Caused by: java.lang.A{number}Error: x\n" for number in range(1000))
    assert len(trace_in_words(classes).splitlines()) == 15


def test_class_of_the_exception_stands_for_words_without_any() -> None:
    class FailureError(Exception):
        _stackTrace = "java.io.IOException: x"  # noqa: N815 - pyspark's name

    assert text_of(FailureError(CANARY)).splitlines() == [CANARY, "java.io.IOException: x"]
    with pytest.raises(UnexpectedError) as found:
        raise_unexpected()
    assert text_of(found.value).startswith("tests.support.canary.UnexpectedError: ")
