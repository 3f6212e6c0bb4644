"""An unexpected exception whose text is as one that holds a value of a row."""

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
"""Loggers of pyspark with handlers of their own, which no program of ours has a say in."""


class UnexpectedError(Exception):
    """What a library might raise."""


def raise_unexpected(*_: Any, **__: Any) -> NoReturn:
    """Raise, for another exception, one with the canary in its text, its arguments and its frames."""
    value = f"value {CANARY}"
    try:
        raise KeyError(value)
    except KeyError as error:
        raise UnexpectedError(f"row ({value})", {value: 1}) from error


def check(text: str, *names: str) -> None:
    """A trace holds both classes, the frame that raised and these words, and nothing of the text."""
    for part in ("UnexpectedError", "KeyError", "tests/support/canary.py:", " in raise_unexpected", *names):
        assert part in text, (part, text)
    assert CANARY not in text
    assert "raise KeyError" not in text


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """All that was logged, as programs write it: pyspark gives pytest's handler a formatter of its own."""
    form = process_io.formatter("")
    return "\n".join(form.format(record) for record in caplog.records if record.name not in _OF_SPARK)


def check_log(caplog: pytest.LogCaptureFixture, *names: str) -> None:
    """The log has a trace with these words, and nothing that the exception says."""
    check(logged(caplog), *names)


def bare(kind: type[Any], **fields: Any) -> Any:
    """An object of a class, with these fields alone: what it is not asked for is not there."""
    made = kind.__new__(kind)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def in_thread(work: Callable[[], Any]) -> None:
    """Run it as a thread of a program runs, to its end."""
    with process.traces_of_threads():
        thread = threading.Thread(target=work, name="pgrepl-test")
        thread.start()
        thread.join(LIMIT_S)
    assert not thread.is_alive()
