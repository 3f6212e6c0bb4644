"""The trace of an unexpected exception: its class and frames, without its text.

The text of an exception that a library raises may hold values of rows, so it never leaves the place where the
exception is caught. Classes and frames hold none: they are names in source code.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import deque
from collections.abc import Iterator
from types import CodeType, TracebackType
from typing import TypeVar

from airflow_provider_pgrepl.errors import PgReplError, one_line

MOST_FRAMES = 30
"""Frames that are kept of one exception: the last ones, in which it was raised."""
MOST_CAUSES = 5
"""Exceptions that are kept behind the first one."""
_MOST_LINES = 400
_MOST_LETTERS = 200

_PACKAGE = "/airflow_provider_pgrepl/"
_ROOT = re.compile(r".*/(?:site-packages|dist-packages|python3\.\d+|[^/]+\.(?:zip|egg|whl))/")
"""The folder, or archive, below which Python looks for modules; the last one in a path."""
_NOT_IN_A_NAME = re.compile(r"[^\w.<>]")

Raised = TypeVar("Raised", bound=PgReplError)


def trace_of(error: BaseException) -> str:
    """Return an exception's class, its last frames, and those of the exceptions that led to it, in lines.

    The first line is the class. Frames are `file:line in function`, the innermost last. A cause, the
    exception that was being handled, and the members of a group follow with a class and frames of their own.
    The lines hold no text of an exception, no source text and no value.
    """
    lines: list[str] = []
    for relation, one in _chain(error):
        lines += [relation + class_name(type(one)), *_frames(one.__traceback__)]
        if isinstance(one, PgReplError) and one.trace:
            first, *others = one.trace.splitlines()
            lines += [f"caused by {first}", *others]
    return "\n".join(lines[:_MOST_LINES])


def traced(error: Raised, cause: BaseException) -> Raised:
    """Return `error` with the trace of the exception in whose place it is raised.

    The trace goes with the error from process to process, also as a note: Airflow and Spark show notes of an
    exception, and not its attributes.
    """
    error.trace = trace_of(cause)
    error.add_note(error.trace)
    return error


def log_unexpected(log: logging.Logger, doing: str, error: BaseException, level: int = logging.ERROR) -> None:
    """Log the trace of an exception.

    Does nothing for an error of this package, whose text says all, and for a request to end the process.
    """
    if not isinstance(error, PgReplError | KeyboardInterrupt | SystemExit):
        log.log(level, "%s: unexpected %s", doing, trace_of(error))


def class_name(kind: type) -> str:
    """Return the name of a class with its module, as far as it is one of Python's."""
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return _NOT_IN_A_NAME.sub("?", name)[:_MOST_LETTERS]


def frame(file: str, line: int, function: str) -> str:
    """Return one line of a trace."""
    return f"  {_short(file)}:{line} in {_NOT_IN_A_NAME.sub('?', function)[:_MOST_LETTERS]}"


def _chain(error: BaseException) -> Iterator[tuple[str, BaseException]]:
    """The exception and those that led to it, each once, with the words that say how."""
    waiting = deque([("", error)])
    seen: set[int] = set()
    while waiting and len(seen) <= MOST_CAUSES:
        relation, one = waiting.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield relation, one
        if isinstance(one, BaseExceptionGroup):
            waiting += (("one of them ", inner) for inner in one.exceptions)
        # One that `from None` hides for its text is named, too: its text is not here.
        if one.__cause__ is not None:
            waiting.append(("caused by ", one.__cause__))
        elif one.__context__ is not None:
            waiting.append(("raised while handling ", one.__context__))


def _frames(traceback: TracebackType | None) -> list[str]:
    last: deque[tuple[CodeType, int]] = deque(maxlen=MOST_FRAMES)
    count = 0
    while traceback is not None:
        last.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback, count = traceback.tb_next, count + 1
    lines = [frame(code.co_filename, line, code.co_qualname) for code, line in last]
    left_out = count - len(last)
    return [f"  ({left_out} frames before these)", *lines] if left_out else lines


def _short(path: str) -> str:
    """A file, below the package or the folder where Python has found it; else its name alone."""
    path = path.replace("\\", "/")
    if (root := _ROOT.match(path)) is not None:
        path = path[root.end() :]
    elif _PACKAGE in path:
        path = path[path.rindex(_PACKAGE) + 1 :]
    elif path.startswith("/"):
        folders = (f"{folder.rstrip('/')}/" for folder in sys.path if folder.startswith("/"))
        found = max((folder for folder in folders if path.startswith(folder)), key=len, default="")
        path = path.removeprefix(found) if len(found) > 1 else path.rpartition("/")[2]
    return one_line(path)[-_MOST_LETTERS:]
