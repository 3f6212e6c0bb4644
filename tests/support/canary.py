"""An unexpected exception whose text looks like one that quotes a value of a row."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.runtime import process_io

CANARY = "canary-4711"
LIMIT_S = 120
_OF_SPARK = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""Loggers of pyspark with handlers of their own, which this package's programs do not configure."""


class UnexpectedError(Exception):
    """An exception as a library might raise it."""


def raise_unexpected(*_: Any, **__: Any) -> NoReturn:
    """Raise, for another exception, one with the canary in its text, its arguments and its frames."""
    value = f"value {CANARY}"
    try:
        raise KeyError(value)
    except KeyError as error:
        raise UnexpectedError(f"row ({value})", {value: 1}) from error


def check(text: str, *names: str) -> None:
    """Assert that a trace holds both classes, the frame that raised and `names`, and nothing of the text."""
    for part in ("UnexpectedError", "KeyError", "tests/support/canary.py:", " in raise_unexpected", *names):
        assert part in text, (part, text)
    assert CANARY not in text
    assert "raise KeyError" not in text


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """Return the log as programs write it: pyspark gives pytest's handler a formatter of its own."""
    form = process_io.formatter("")
    return "\n".join(form.format(record) for record in caplog.records if record.name not in _OF_SPARK)


def check_log(caplog: pytest.LogCaptureFixture, *names: str) -> None:
    """Assert that the log has a trace with `names`, and nothing of the exception's text."""
    check(logged(caplog), *names)


def bare(kind: type[Any], **fields: Any) -> Any:
    """Return an object of a class that has only these fields, created without `__init__`."""
    made = kind.__new__(kind)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def in_thread(work: Callable[[], Any]) -> None:
    """Run `work` to its end in a thread, as a program runs its threads."""
    with process.traces_of_threads():
        thread = threading.Thread(target=work, name="pgrepl-test")
        thread.start()
        thread.join(LIMIT_S)
    assert not thread.is_alive()
