"""Text that a process leaves for others: log lines, its result, and files written whole.

Spark's JVM and Python itself write into the same stream, in forms of their own.
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
# Of a request that a token signs; a client's own text may tell it, and be in a traceback.
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
    """What was said, without its time of day. `is_ours`: by this package, not by Spark or Python."""

    level: int
    text: str
    at: datetime | None = None
    is_ours: bool = False


class Printable(logging.Formatter):
    """Names in a record are whatever their makers chose; nothing in it is for a terminal to obey, and no
    signature for anybody to use. Of an exception it has the trace without texts, which may hold values."""

    def format(self, record: logging.LogRecord) -> str:
        record = copy(record)
        # Another handler may have left the text there.
        record.exc_text = None
        if record.name == "asyncio" and record.exc_info:
            # It goes on with what its tasks and callbacks were given.
            said = record.getMessage().partition("\n")[0]
            record.msg = _OF_CALLBACK if said.startswith(_OF_CALLBACK) else said
            record.args = ()
        return escaped(_SIGNATURE.sub(r"\1=***", super().format(record)))

    def formatException(  # noqa: N802 - logging's name
        self, ei: tuple[type[BaseException], BaseException, Any] | tuple[None, None, None]
    ) -> str:
        return "" if ei[1] is None else trace_of(ei[1])


class JsonLines(Printable):
    """Each record as one line, however many its message has."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "pgrepl": 1,
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "text": super().format(record),
        }
        return json.dumps(fields, ensure_ascii=False)


def formatter(name: str) -> logging.Formatter:
    """The form that the environment asks for: `json`, or else one for people."""
    return JsonLines("%(message)s") if name == JSON else Printable(_FOR_PEOPLE)


def level(name: str) -> int:
    """INFO, unless a level is named."""
    return _LEVELS.get(name.strip().upper(), logging.INFO)


def parse(line: str) -> LogLine:
    """Any line; what is neither ours nor Spark's own is said at level INFO."""
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
    """Whether this package says here that something failed."""
    return line.is_ours and line.level >= logging.ERROR


def _parse_ours(line: str) -> LogLine | None:
    try:
        fields = json.loads(line)
        at = datetime.fromisoformat(fields["at"])
        return LogLine(_LEVELS[fields["level"]], escaped(str(fields["text"])), at, is_ours=True)
    except (ValueError, KeyError, TypeError):
        return None


def leave_result(result: Mapping[str, Any]) -> None:
    """Write it, whole or not at all; nothing, when nobody asked for it."""
    named = os.environ.get(RESULT_VARIABLE)
    if not named:
        return
    unfinished = Path(f"{named}.{os.getpid()}")
    with suppress(OSError):
        unfinished.write_text(json.dumps(dict(result)), encoding="utf-8")
        unfinished.replace(named)


def read_text(what: str, path: str | Path) -> str:
    """The text of a UTF-8 file, without the byte order mark of some editors. Raises ConfigError."""
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
