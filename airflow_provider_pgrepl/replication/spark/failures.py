"""What Spark itself fails with, as one of our errors: no trouble of a table, and none of the lake."""

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
from airflow_provider_pgrepl.replication.spark.session_settings import DAEMON_MODULE
from airflow_provider_pgrepl.trace import MOST_FRAMES, class_name, frame

log = logging.getLogger(__name__)

_NO_DAEMON = f"No module named {DAEMON_MODULE}"
_OTHER_PYTHON = "PYTHON_VERSION_MISMATCH"
_LACKING = "ModuleNotFoundError: No module named 'airflow_provider_pgrepl"
_WORKERS = ("org.apache.spark.api.python.PythonWorkerFactory", "Python worker failed to connect back")
"""In every error by which Spark says that a Python worker did not start: in its trace, or in its text where
the error is a streaming query's, which has no such trace."""

_NOT_CONNECTED = "Timed out while waiting for the Python worker to connect back"
_IDLE = "worker process terminated due to idle timeout"
"""What Spark says of a worker of Python that was silent for `spark.python.worker.idleTimeoutSeconds`."""

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s+File "([^"]{1,500})", line (\d{1,7}), in ([\w.<>]{1,200})')
_OF_PYTHON = re.compile(r"([A-Za-z_][\w.]{0,200})(?::|$)")
_OF_JAVA = re.compile(
    r"(?<![\w.$])((?:javax?|scala|io\.delta|org\.apache|py4j|pyspark|com\.(?:amazonaws|google|microsoft|azure))"
    r"(?:\.[\w$]{1,60}){1,12}(?:Exception|Error))(?=[:\s)]|$)"
)
_MOST_LINES = 100
_MOST_CLASSES = 5
"""Exception classes that an error names, and thrice as many that its trace does."""


@contextmanager
def spark_errors(doing: str) -> Iterator[None]:
    """`doing`: what Spark was at. Its own words, which may hold values of rows, are in the log of Spark."""
    failed: PgReplError | None = None
    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        failed = spark_error(doing, text_of(error))
    if failed is not None:
        raise failed


def spark_error(doing: str, trace: str) -> PgReplError:
    """From the words in which Spark failed: SparkError, or ToolError where an executor lacks something."""
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
    """All that Spark says of an exception: its text, and the stack of its JVM where the text lacks that.

    Begins with the class of the exception, if the text names no other.
    """
    stack = getattr(error, "_stackTrace", None) or ""
    text = str(error)
    if stack not in text:
        text = f"{text}\n{stack}"
    return text if _read_trace(text)[0] else f"{class_name(type(error))}: {text}"


def trace_in_words(trace: str) -> str:
    """Return the classes and frames, in lines, that the words hold in which Spark failed, and no more."""
    return "\n".join(_read_trace(trace)[1])


def _read_trace(trace: str) -> tuple[list[str], list[str]]:
    """The classes of the exceptions, each once, those of Python first; and the lines of their trace.

    Frames and classes are read by their form alone, and where they are to be: the text of an exception, which
    may hold values of rows, has other forms. Classes of Java are only those of known packages.
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
            # The line after the frames, the only one of its block that begins where the line does.
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
    """Spark says the same several times."""
    if "\n".join(block) not in "\n".join(lines) and len(lines) < _MOST_LINES:
        lines += block


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
    return any(words in trace for words in (*_WORKERS, _NOT_CONNECTED))
