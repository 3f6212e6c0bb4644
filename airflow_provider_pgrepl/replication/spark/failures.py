"""Conversion of Spark's own failures, which neither a table nor the lake caused, to this package's errors."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import PgReplError, SparkError, ToolError
from airflow_provider_pgrepl.trace import MOST_FRAMES, class_name, frame

from .session import DAEMON_MODULE

log = logging.getLogger(__name__)

_NO_DAEMON = f"No module named {DAEMON_MODULE}"
_OTHER_PYTHON = "PYTHON_VERSION_MISMATCH"
_LACKING = "ModuleNotFoundError: No module named 'airflow_provider_pgrepl"
_WORKERS = ("org.apache.spark.api.python.PythonWorkerFactory", "Python worker failed to connect back")
"""One of these is in every error that Spark raises when a Python worker did not start: in its trace, or in
its text."""

_NOT_CONNECTED = "Timed out while waiting for the Python worker to connect back"
_IDLE = "worker process terminated due to idle timeout"
"""Spark's text for a Python worker that was silent for `spark.python.worker.idleTimeoutSeconds`."""

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s+File "([^"]{1,500})", line (\d{1,7}), in ([\w.<>]{1,200})')
_OF_PYTHON = re.compile(r"([A-Za-z_][\w.]{0,200})(?::|$)")
_OF_JAVA = re.compile(
    r"(?<![\w.$])((?:javax?|scala|io\.delta|org\.apache|py4j|pyspark|com\.(?:amazonaws|google|microsoft|azure))"
    r"(?:\.[\w$]{1,60}){1,12}(?:Exception|Error))(?=[:\s)]|$)"
)
_MOST_LINES = 100
_MOST_CLASSES = 5
"""The number of exception classes that an error names. Its trace has up to three times as many."""


@contextmanager
def spark_errors(doing: str) -> Iterator[None]:
    """Convert Spark's errors inside the block. `doing`: the operation, for the message. Spark's own text,
    which may hold values of rows, stays in Spark's log only."""
    failed: PgReplError | None = None
    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        failed = spark_error(doing, text_of(error))
    if failed is not None:
        raise failed


def spark_error(doing: str, trace: str) -> PgReplError:
    """Return the error for Spark's text `trace`: ToolError if an executor lacks something, otherwise
    SparkError. The classes and frames of an unknown failure are logged."""
    if lacking := what_executors_lack(trace):
        return ToolError(f"{doing}: {lacking}", errors.EXECUTORS)
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
    if _IDLE in trace:
        return SparkError(
            f"{doing}: Spark's Python worker timed out, and Spark ended it",
            "the host may be overloaded. If it happens again, raise or unset"
            " spark.python.worker.idleTimeoutSeconds, or unset spark.python.worker.killOnIdleTimeout",
        )
    classes, lines = _read_trace(trace)
    named = f" with {', '.join(classes[:_MOST_CLASSES])}" if classes else ""
    failed = SparkError(
        f"{doing}: Spark failed{named}",
        "Spark's own log, above, says with what; then run it again",
    )
    failed.trace = "\n".join(lines)
    if failed.trace:
        failed.add_note(failed.trace)
        log.error("%s: Spark failed:\n%s", doing, failed.trace)
    return failed


def text_of(error: BaseException) -> str:
    """Return Spark's text of an exception, with the stack of its JVM if the text lacks it.

    The text begins with the class of the exception if it names no other class.
    """
    stack = getattr(error, "_stackTrace", None) or ""
    text = str(error)
    if stack not in text:
        text = f"{text}\n{stack}"
    return text if _read_trace(text)[0] else f"{class_name(type(error))}: {text}"


def trace_in_words(trace: str) -> str:
    """Return the exception classes and the frames in Spark's text, one a line, and nothing else of it."""
    return "\n".join(_read_trace(trace)[1])


def _read_trace(trace: str) -> tuple[list[str], list[str]]:
    """Return the exception classes, each once and those of Python first, and the lines of the trace.

    Classes and frames are recognized by their form and position. The message of an exception, which may hold
    values of rows, has another form. Java classes are accepted only from known packages.
    """
    python: list[str] = []
    java: list[str] = []
    lines: list[str] = []
    frames: list[str] | None = None
    for line in trace.splitlines():
        if _TRACEBACK in line:
            before = line.partition(_TRACEBACK)[0]
            _add_java(before.rstrip(), java, lines)
            frames = []
        elif frames is not None and (found := _FRAME.fullmatch(line)):
            frames.append(frame(found[1], int(found[2]), found[3]))
        elif frames and (kind := _OF_PYTHON.match(line)):
            # The line after the frames is the only one of its block that is not indented.
            if kind[1] not in python:
                python.append(kind[1])
            _add(lines, [kind[1], *frames[-MOST_FRAMES:]])
            frames = None
        elif not frames:
            _add_java(line, java, lines)
    if frames:
        _add(lines, ["a Python worker", *frames[-MOST_FRAMES:]])
    return [*python, *java], lines


def _add_java(line: str, classes: list[str], lines: list[str]) -> None:
    for kind in _OF_JAVA.findall(line):
        if kind not in classes and len(classes) < 3 * _MOST_CLASSES:
            classes.append(kind)
            lines.append(kind)


def _add(lines: list[str], block: list[str]) -> None:
    """Append a block unless it is there already: Spark repeats the same traceback."""
    if "\n".join(block) not in "\n".join(lines) and len(lines) < _MOST_LINES:
        lines += block


def what_executors_lack(trace: str) -> str:
    """Return a phrase if Spark's text names an error that occurs before a task starts because of the
    executors' Python; otherwise ""."""
    if _LACKING in trace:
        return "the Python of Spark's executors lacks airflow_provider_pgrepl, or has another version"
    if _OTHER_PYTHON in trace:
        return (
            f"the Python of Spark's executors is not the driver's {sys.version_info[0]}.{sys.version_info[1]}"
        )
    return ""


def is_of_workers(trace: str) -> bool:
    """Return True if no task ran because Spark could not start its Python workers."""
    return any(words in trace for words in (*_WORKERS, _NOT_CONNECTED))
