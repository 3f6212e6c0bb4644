"""Rows of 100 MB, and as many columns as PostgreSQL allows: copied, received and applied, without Spark."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.support.handed import Handed

TEXT = b'ab,\n"cd'
BYTES = b"\x00\xff\x5c\x0a"


@pytest.mark.thorough("test_copy: rows longer than a block; large messages in test_message_limits")
def test_rows_of_100_mb_are_copied_and_streamed(dsn, run, tmp_path):
    """Text full of quotes and newlines, which CSV writes twice; bytea, which the stream sends as hexadecimal
    digits; then an update that does not send them again, and one of the key."""
    text_times, bytes_times = 100_000_000 // len(TEXT), 50_000_000 // len(BYTES)
    run(
        "create table large (id int primary key, n int, t text, b bytea)",
        "alter table large alter t set storage external, alter b set storage external",
        f"insert into large values (1, 0, repeat(E'ab,\\n\"cd', {text_times}), null), (2, 0, 'small', null)",
    )
    handed = Handed(dsn, tmp_path, ("public.large",))
    relation = handed.copy("public.large")
    run(
        f"insert into large values (3, 0, null, decode(repeat('00ff5c0a', {bytes_times}), 'hex'))",
        "update large set n = n + 1",
        "update large set id = 10 where id = 1",
    )
    assert handed.stream(relation).error is None
    rows = {row["id"]: row for row in pa.table(handed.lake_rows("public.large")).to_pylist()}
    assert {key: row["n"] for key, row in rows.items()} == {2: 1, 3: 1, 10: 1}
    # Compare outside of assert, whose report would print 100 MB.
    whole = rows[10]["t"].encode() == TEXT * text_times, rows[3]["b"] == BYTES * bytes_times
    assert whole == (True, True)


@pytest.mark.thorough("test_large_types: 1,500 columns; test_copy and test_evolution copy and stream")
def test_a_table_of_1600_columns_is_copied_and_streamed(dsn, run, tmp_path):
    columns = ", ".join(f"c{number} int" for number in range(1599))
    run(
        f"create table wide (id int primary key, {columns})",
        "insert into wide (id, c0, c1598) values (1, 1, 1), (2, 2, 2), (3, 3, 3)",
    )
    handed = Handed(dsn, tmp_path, ("public.wide",))
    relation = handed.copy("public.wide")
    run(
        "update wide set c1598 = 10 where id = 1",
        "delete from wide where id = 2",
        "insert into wide (id, c700) values (4, 4)",
    )
    assert handed.stream(relation).error is None
    handed.assert_equal("public.wide")
