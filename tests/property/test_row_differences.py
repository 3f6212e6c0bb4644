"""lake/verify: what reductions and row lists find is what counting the rows themselves finds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.lake.verify.buckets import Buckets, Collection, RowShape
from airflow_provider_pgrepl.replication.lake.verify.row_differences import find_differences

_SCHEMA = pa.schema([("id", pa.int32()), ("n", pa.int32()), ("v", pa.string())])
_VALUES = {"n": st.sampled_from([None, 0, 1]), "v": st.sampled_from([None, "", "a"])}
Row = dict[str, Any]


def _rows_with_key(least: int) -> st.SearchStrategy[list[Row]]:
    row = st.fixed_dictionaries({"id": st.integers(least, least + 20), **_VALUES})
    return st.lists(row, unique_by=lambda row: row["id"], max_size=20)


_ANY_ROWS = st.lists(st.fixed_dictionaries({"id": st.integers(0, 2), **_VALUES}), max_size=20)


def _collected(collection: Collection, rows: list[Row], parts: int) -> Any:
    """Reduce the rows in several parts, and merge the results."""
    results = []
    for part in range(parts):
        collector = collection.begin()
        collector.add(pa.Table.from_pylist(rows[part::parts], schema=_SCHEMA))
        results.append(collector.result)
    return collection.merge(results)


def _listed(shape: RowShape, buckets: Buckets, rows: list[Row], wanted: np.ndarray[Any, Any]) -> Any:
    return _collected(Collection(shape, buckets, wanted), rows, 2)


def _counts(rows: list[Row]) -> Counter[tuple[Any, ...]]:
    return Counter((row["id"], row["n"], row["v"]) for row in rows)


@settings(deadline=None)
@given(source=_rows_with_key(0), lake=_rows_with_key(5))
def test_rows_with_key_that_differ_are_found_in_differing_buckets(source: list[Row], lake: list[Row]) -> None:
    shape, buckets = RowShape(tuple(_SCHEMA.names), ("id",), (3, 4)), Buckets(np.arange(4, dtype=np.int64))
    sums = [_collected(Collection(shape, buckets), rows, parts) for rows, parts in ((source, 3), (lake, 2))]
    differing = sums[0].differing(sums[1])
    assert (len(differing) == 0) == (_counts(source) == _counts(lake))
    if not len(differing):
        return
    finer = buckets.split(differing)
    wanted = np.ones(finer.count, np.bool_)
    found = find_differences(*(_listed(shape, finer, rows, wanted) for rows in (source, lake)), shape)
    ours, theirs = ({row["id"]: row for row in rows} for rows in (source, lake))
    both = [(ours[key], theirs[key]) for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]]
    assert (found.missing, found.extra) == (
        len(ours.keys() - theirs.keys()),
        len(theirs.keys() - ours.keys()),
    )
    assert found.changed == len(both)
    assert found.columns == Counter(name for a, b in both for name in ("n", "v") if a[name] != b[name])


@settings(deadline=None)
@given(source=_ANY_ROWS, lake=_ANY_ROWS)
def test_rows_without_key_are_counted(source: list[Row], lake: list[Row]) -> None:
    shape, buckets = RowShape(tuple(_SCHEMA.names), (), (3, 4)), Buckets(np.arange(4, dtype=np.int64))
    wanted = np.ones(4, np.bool_)
    found = find_differences(*(_listed(shape, buckets, rows, wanted) for rows in (source, lake)), shape)
    expected = _counts(source), _counts(lake)
    assert found.missing == (expected[0] - expected[1]).total()
    assert found.extra == (expected[1] - expected[0]).total()
    assert found.changed == 0
