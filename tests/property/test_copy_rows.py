"""The copy's CSV is cut where rows end, whatever the values and wherever the blocks end."""

from __future__ import annotations

import csv
import io

from hypothesis import example, given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.lake.snapshot.csv import whole_rows
from tests.support.examples import examples

VALUES = st.text(alphabet='ab",\n', max_size=300)


@examples(200)
@given(st.lists(st.tuples(VALUES, VALUES), max_size=8), st.integers(1, 400))
@example([('\n"' * 2000, "x"), ("y", "\n" * 500)], 700)
def test_pieces_together_are_the_stream_and_each_ends_where_a_row_ends(rows, block_bytes):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    whole = text.getvalue().encode()
    pieces = list(whole_rows(io.BytesIO(whole), block_bytes))
    assert b"".join(pieces) == whole
    assert [tuple(row) for piece in pieces for row in csv.reader(io.StringIO(piece.decode()))] == rows
    assert all(piece.endswith(b"\n") and piece.count(b'"') % 2 == 0 for piece in pieces)
