"""Text that a process exchanges with others: log lines, its result, and text files.

Spark's JVM and Python itself write to the same stream, in their own formats.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from airflow_provider_pgrepl.errors import ConfigError, escaped, one_line
from airflow_provider_pgrepl.trace import trace_of

FORMAT_VARIABLE = "PGREPL_LOG_FORMAT"
LEVEL_VARIABLE = "PGREPL_LOG_LEVEL"
JSON = "json"

_FOR_PEOPLE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# The signature of a request. A client's error text may contain it, and appear in a traceback.
_SIGNATURE = re.compile(r"\b(sig|signature|x-(?:amz|goog)-signature)=[^&\s\"']+", re.I)
_OF_SPARK = re.compile(r"(\d\d/\d\d/\d\d \d\d:\d\d:\d\d) (TRACE|DEBUG|INFO|WARN|ERROR|FATAL) (.*)", re.DOTALL)
_OF_CALLBACK = "Exception in callback"
_AT_EVERY_START = ("WARNING: Using incubator modules", "Picked up JAVA_TOOL_OPTIONS")
_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.ERROR,
    "CRITICAL": logging.ERROR,
}
RESULT_VARIABLE = "PGREPL_RESULT_FILE"


@dataclass(frozen=True)
class LogLine:
    """A parsed log line; `text` lacks its time. `is_ours`: logged by this package, not by Spark or Python."""

    level: int
    text: str
    at: datetime | None = None
    is_ours: bool = False


class SafeFormatter(logging.Formatter):
    """A formatter that escapes control characters, removes signatures of requests, and shortens exceptions.

    Names in a record may contain any characters. Of an exception, only the trace is logged: its text may hold
    values of rows.
    """

    def format(self, record: logging.LogRecord) -> str:
        record = copy(record)
        # Another handler may have cached the exception's text there.
        record.exc_text = None
        if record.name == "asyncio" and record.exc_info:
            # The rest of the message shows the arguments of tasks and callbacks.
            said = record.getMessage().partition("\n")[0]
            record.msg = _OF_CALLBACK if said.startswith(_OF_CALLBACK) else said
            record.args = ()
        return escaped(_SIGNATURE.sub(r"\1=***", super().format(record)))

    def formatException(  # noqa: N802 - logging's name
        self, ei: tuple[type[BaseException], BaseException, Any] | tuple[None, None, None]
    ) -> str:
        return "" if ei[1] is None else trace_of(ei[1])


class JsonLines(SafeFormatter):
    """A formatter that writes each record as one line of JSON, also if its message has several lines."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "pgrepl": 1,
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "text": super().format(record),
        }
        return json.dumps(fields, ensure_ascii=False)


def formatter(name: str) -> logging.Formatter:
    """Return the formatter of a name: `json`, or, for any other name, the plain text format."""
    return JsonLines("%(message)s") if name == JSON else SafeFormatter(_FOR_PEOPLE)


def level(name: str) -> int:
    """Return the logging level of a name; INFO if the name is unknown."""
    return _LEVELS.get(name.strip().upper(), logging.INFO)


def parse(line: str) -> LogLine:
    """Parse any log line. A line in neither this package's nor Spark's format gets the level INFO.

    Messages that Java writes at every start get the level DEBUG.
    """
    if line.startswith('{"pgrepl": 1'):
        found = _parse_ours(line)
        if found is not None:
            return found
    line = one_line(line)
    if spark := _OF_SPARK.match(line):
        return LogLine(_LEVELS[spark[2]], spark[3])
    if line.startswith(_AT_EVERY_START):
        return LogLine(logging.DEBUG, line)
    return LogLine(logging.INFO, line)


def is_error(line: LogLine) -> bool:
    """Return True if this package logged the line as an error."""
    return line.is_ours and line.level >= logging.ERROR


def _parse_ours(line: str) -> LogLine | None:
    try:
        fields = json.loads(line)
        at = datetime.fromisoformat(fields["at"])
        return LogLine(_LEVELS[fields["level"]], escaped(str(fields["text"])), at, is_ours=True)
    except (ValueError, KeyError, TypeError):
        return None


def leave_result(result: Mapping[str, Any]) -> None:
    """Write the result of this process to the file that RESULT_VARIABLE names, in one step.

    Does nothing if the variable is not set. Errors are ignored.
    """
    named = os.environ.get(RESULT_VARIABLE)
    if not named:
        return
    unfinished = Path(f"{named}.{os.getpid()}")
    with suppress(OSError):
        unfinished.write_text(json.dumps(dict(result)), encoding="utf-8")
        unfinished.replace(named)


def read_text(what: str, path: str | Path) -> str:
    """Return the text of a UTF-8 file, without a byte order mark. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        why = error.strerror or error.__class__.__name__
        hint = (
            ""
            if Path(path).is_absolute()
            else f"the path begins in {Path.cwd()}: go to its folder, or give it whole"
        )
        raise ConfigError(f"cannot read the {what} {path}: {why}", hint) from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read the {what} {path}: it is not UTF-8 text") from None
