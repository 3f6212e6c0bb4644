"""Lines of a log: written for a program, and parsed from other programs' logs."""

from __future__ import annotations

import io
import logging
from datetime import UTC, datetime

import pytest

from airflow_provider_pgrepl.replication.runtime.process_io import (
    JSON,
    LogLine,
    formatter,
    is_error,
    level,
    parse,
)


def written(form: str, *, fail: bool = False) -> list[str]:
    """Return the lines that a logger writes in this form."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(form))
    logger = logging.Logger("airflow_provider_pgrepl.replication.somewhere")
    logger.addHandler(handler)
    try:
        1 / (0 if fail else 1)
        logger.error("SlotError: slot %s is lost\n  hint: begin a new epoch – at once", "pgrepl_shop")
    except ZeroDivisionError:
        logger.exception("ended by an error of its own")
    return stream.getvalue().splitlines()


def test_a_message_of_several_lines_is_one_line_for_a_program() -> None:
    [line] = written(JSON)
    read = parse(line)
    assert read.level == logging.ERROR
    assert read.text == "SlotError: slot pgrepl_shop is lost\n  hint: begin a new epoch – at once"
    assert read.at is not None
    assert abs((datetime.now(UTC) - read.at).total_seconds()) < 60
    assert is_error(read)


def test_trace_of_an_exception_stays_with_its_message() -> None:
    [line] = written(JSON, fail=True)
    text = parse(line).text
    assert text.startswith("ended by an error of its own\nZeroDivisionError\n  tests/unit/test_log_lines.py:")
    assert "division" not in text


def test_people_see_time_level_and_place() -> None:
    first, hint = written("")
    assert first.split(" ", 2)[2].startswith("ERROR airflow_provider_pgrepl.replication.somewhere: SlotError")
    assert hint == "  hint: begin a new epoch – at once"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("26/11/22 01:18:44 WARN NativeCodeLoader: no library", LogLine(30, "NativeCodeLoader: no library")),
        ("26/11/22 01:18:44 ERROR Executor: Exception in task", LogLine(40, "Executor: Exception in task")),
        ("26/11/22 01:18:44 FATAL Main: gone", LogLine(40, "Main: gone")),
        ("WARNING: Using incubator modules: jdk.incubator.vector", LogLine(10, "")),
        ("anything else", LogLine(20, "anything else")),
        ("", LogLine(20, "")),
        ('{"pgrepl": 1, "level": "ERROR"}', LogLine(20, "")),
        ('{"pgrepl": 1, "level": "ODD", "at": "2026-01-01T00:00:00+00:00", "text": ""}', LogLine(20, "")),
        ('{"pgrepl": 1, "level": [], "at": "2026-01-01T00:00:00+00:00", "text": ""}', LogLine(20, "")),
        ('{"pgrepl": 1', LogLine(20, "")),
    ],
)
def test_parsing_foreign_log_line_keeps_level_and_removes_timestamp(line: str, expected: LogLine) -> None:
    read = parse(line)
    assert (read.level, read.text) == (expected.level, expected.text or line)
    assert not is_error(read), "what Spark says is not this package's own error"


@pytest.mark.parametrize(("name", "wanted"), [("", 20), ("DEBUG", 10), ("warning", 30), ("nonsense", 20)])
def test_a_level_is_named(name: str, wanted: int) -> None:
    assert level(name) == wanted


@pytest.mark.parametrize("form", [JSON, ""])
def test_log_formatter_masks_request_signatures(form: str) -> None:
    """A store's client has it in its errors' texts."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(form))
    logger = logging.Logger("somewhere")
    logger.addHandler(handler)
    try:
        raise OSError("failed: https://a/x?se=2099&sig=SECRET%3D&sp=rl Azure Error: [] 500")
    except OSError as error:
        logger.exception("GET x?X-Amz-Signature=SECRET&a=1 %s", error)
    assert "SECRET" not in stream.getvalue()
    assert "sig=***&sp=rl Azure Error" in stream.getvalue()
