"""FileCache: small files of the changelog, as they were read."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.changelog.reader import CachedFile, FileCache
from tests.support.examples import examples


def rows(relations: list[int]) -> pa.Table:
    return pa.table({"relation_id": pa.array(relations, pa.int64()), "at": range(len(relations))})


@examples(100)
@given(st.lists(st.integers(0, 4)), st.integers(0, 4))
def test_a_relation_finds_its_rows_in_their_order(relations: list[int], wanted: int) -> None:
    found = CachedFile.of(rows(relations)).rows_of(wanted)
    assert found["at"].to_pylist() == [at for at, relation in enumerate(relations) if relation == wanted]


def test_full_file_cache_evicts_least_recently_read_file() -> None:
    size = rows([1, 2]).nbytes
    files = FileCache(most_bytes=2 * size)
    files.keep("a", rows([1, 2]))
    files.keep("b", rows([1, 2]))
    assert files.get("a") is not None
    files.keep("c", rows([1, 2]))
    assert [path for path in "abc" if files.get(path)] == ["a", "c"]
    files.keep("c", rows([1, 2]))
    assert [path for path in "abc" if files.get(path)] == ["a", "c"]
    assert FileCache(0).keep("larger than all", rows([1])).rows_of(1).num_rows == 1
