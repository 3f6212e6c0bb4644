"""The trace of an unexpected exception: its class and frames, without its text.

The text of a library's exception may hold values of rows, so this package never logs or forwards it. Classes
and frames hold no values: they are names in source code.
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
"""The maximum number of frames for one exception: the last ones, in which it was raised."""
MOST_CAUSES = 5
"""The maximum number of exceptions after the first one."""
_MOST_LINES = 400
_MOST_LETTERS = 200

_PACKAGE = "/airflow_provider_pgrepl/"
_ROOT = re.compile(r".*/(?:site-packages|dist-packages|python3\.\d+|[^/]+\.(?:zip|egg|whl))/")
"""The last folder or archive in a path below which Python looks for modules."""
_NOT_IN_A_NAME = re.compile(r"[^\w.<>]")

Raised = TypeVar("Raised", bound=PgReplError)


def trace_of(error: BaseException) -> str:
    """Return the class and the last frames of an exception and of the exceptions that led to it, as lines.

    The first line is the class. Frames are `file:line in function`, the innermost last. A cause, the
    exception that was being handled, and the members of a group follow with their own class and frames.
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
    """Return `error` with the trace of `cause`, the exception that it replaces.

    The trace is pickled with the error. It is also added as a note, because Airflow and Spark show the notes
    of an exception but not its attributes.
    """
    error.trace = trace_of(cause)
    error.add_note(error.trace)
    return error


def log_unexpected(log: logging.Logger, doing: str, error: BaseException, level: int = logging.ERROR) -> None:
    """Log the trace of an exception.

    Does nothing for an error of this package, whose text is complete, and for a request to end the process.
    """
    if not isinstance(error, PgReplError | KeyboardInterrupt | SystemExit):
        log.log(level, "%s: unexpected %s", doing, trace_of(error))


def class_name(kind: type) -> str:
    """Return the name of a class with its module, shortened, and with "?" for characters not in Python names.

    Built-in classes have no module in their name.
    """
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return _NOT_IN_A_NAME.sub("?", name)[:_MOST_LETTERS]


def frame(file: str, line: int, function: str) -> str:
    """Return the line of a trace for one frame."""
    return f"  {_short(file)}:{line} in {_NOT_IN_A_NAME.sub('?', function)[:_MOST_LETTERS]}"


def _chain(error: BaseException) -> Iterator[tuple[str, BaseException]]:
    """Yield an exception and those that led to it, each once and with a phrase for the relation."""
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
        # Include an exception that `from None` hides because of its text: the trace holds no text.
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
    """Return a file's path relative to the package or to the folder in which Python found it, or its name."""
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
