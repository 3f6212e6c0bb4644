"""lake/files/row_search.py: where the rows that a merge looks for may be."""

from __future__ import annotations

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.replication.lake.files.row_search import Search


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [(5, 9, True), (1, 5, True), (5, 5, True), (6, 9, False), (1, 4, False)],
)
def test_file_is_searched_for_its_own_bounds_too(least: int, most: int, expected: bool) -> None:
    search = Search(pa.table({"id": pa.array([5], pa.int64()), "v": ["x"]}))
    assert search.may_be_between({"id": least}, {"id": most}) is expected
    assert search.may_be_between({}, {})
