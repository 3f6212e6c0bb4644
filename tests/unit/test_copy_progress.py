"""Progress of a copy: its text, its count of ranges, and the line on a terminal."""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from airflow_provider_pgrepl.replication.lake.snapshot.copy_report import TableCopy
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.quantities import show_number
from airflow_provider_pgrepl.replication.runtime.terminal import COLUMNS_VARIABLE, Terminal, log_handler
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange
from airflow_provider_pgrepl.replication.state.reports import CopyProgress

HALF = CopyProgress(1_200_000, 5_000_000, 240, 1000, 250_000.0, 15.2)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1 k"),
        (9_960, "10 k"),
        (1_249_000, "1.2 M"),
        (999_600, "1 M"),
        (2.5e12, "2.5 T"),
    ],
)
def test_number_is_shown_in_at_most_three_digits(number, text):
    assert show_number(number) == text


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (HALF, "1.2 M of 5 M rows, 250 k/s, 15 s left"),
        (replace(HALF, rows=0, bytes=0, rows_per_s=None, seconds_left=None), "0 of 5 M rows"),
        (
            replace(HALF, expected=None),
            "1.2 M rows (total unknown), 24 % of the bytes, 250 k/s, 15 s left",
        ),
        (replace(HALF, expected=1_000_000), "1.2 M rows, 250 k/s, 15 s left"),
        (
            replace(HALF, reported_at=datetime.now(UTC) - timedelta(days=5)),
            "1.2 M of 5 M rows, no report for 5 days",
        ),
    ],
)
def test_progress_is_shown_with_what_is_known(progress, text):
    assert progress.to_text() == text


def copied_range(rows: int | None, size: int) -> CopyRange:
    return CopyRange(1, TableName("public", "t"), "", 1, rows=rows, bytes=size)


def test_copy_counts_each_finished_range_once():
    copy = TableCopy([copied_range(100, 1000), copied_range(50, 500)])
    empty = copy.progress()
    assert (empty.rows, empty.expected, empty.bytes, empty.total_bytes) == (0, 150, 0, 1500)
    assert (empty.rows_per_s, empty.seconds_left) == (None, None)
    for _ in range(2):
        copy.finish(1, [SimpleNamespace(rows=40), SimpleNamespace(rows=20)])
    half = copy.progress()
    assert (half.rows, half.bytes) == (60, 500)
    assert half.rows_per_s is not None
    copy.finish(0, [])
    assert (copy.progress().bytes, copy.progress().seconds_left) == (1500, 0.0)


def test_one_range_without_estimate_makes_the_expected_rows_unknown():
    assert TableCopy([copied_range(100, 10), copied_range(None, 10)]).progress().expected is None


def test_log_is_written_above_the_line_of_the_terminal():
    stream = io.StringIO()
    handler = log_handler(stream, {COLUMNS_VARIABLE: "20"})
    assert isinstance(handler, Terminal)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    handler.show("copying 1.2 M rows of 5 M")
    logger.info("copied public.t")
    handler.show("")
    erase, line = "\r\x1b[K", "copying 1.2 M ro..."
    assert stream.getvalue() == f"{erase}{line}{erase}copied public.t\n{erase}{line}{erase}"
    assert len(line) < 20


def test_log_without_terminal_has_no_control_characters():
    assert type(log_handler(io.StringIO(), {})) is logging.StreamHandler
