"""Rows that differ are collected by their hashes, and are bounded: they are held in memory."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.files.row_search import RowLocations
from airflow_provider_pgrepl.replication.lake.verify import buckets
from airflow_provider_pgrepl.replication.lake.verify.buckets import RowPicking, RowShape
from airflow_provider_pgrepl.replication.lake.verify.repair import PickedRows, _last_copies

_SHAPE = RowShape(("id", "v"), ("id",), (1, 2))
_ROWS = pa.table({"id": list(range(100)), "v": ["v" * 1000] * 100})


def _picking(rows: pa.Table) -> RowPicking:
    _, whole = _SHAPE.hash_rows(rows)
    return RowPicking(_SHAPE, np.stack([whole.h1, whole.h2], axis=1))


def _collected(picking: RowPicking, rows: pa.Table) -> pa.Table | None:
    collector = picking.begin()
    collector.add(rows)
    return collector.result


def test_wanted_rows_are_collected_from_all_parts() -> None:
    picking = _picking(_ROWS.slice(10, 2))
    found = picking.merge(_collected(picking, part) for part in (_ROWS.slice(0, 11), _ROWS.slice(11)))
    assert found is not None
    assert found["c0"].to_pylist() == [10, 11]


def test_rows_beyond_the_limit_are_refused_in_a_task_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    picking = _picking(_ROWS)
    halves = [_collected(picking, _ROWS.slice(0, 50)), _collected(picking, _ROWS.slice(50))]
    monkeypatch.setattr(buckets, "MOST_PICKED_BYTES", 70_000)
    with pytest.raises(LakeTableError, match="the rows that differ have more than"):
        _collected(picking, _ROWS)
    with pytest.raises(LakeTableError, match="have more than"):
        picking.merge(halves)


def test_last_copies_of_equal_rows_are_removed() -> None:
    """Three copies of the first row, of which two leave; two of the second, of which one leaves."""
    places = RowLocations(np.array([0, 0, 1, 1, 2]), np.array([4, 7, 0, 5, 1]), np.array([0, 1, 0, 1, 0]))
    extra = PickedRows(_ROWS.slice(0, 2), np.array([2, 1]))
    found = _last_copies(places, extra)
    assert list(zip(found.file.tolist(), found.row.tolist(), strict=True)) == [(1, 0), (1, 5), (2, 1)]
    with pytest.raises(LakeTableError, match="not in the lake table any more"):
        _last_copies(places, PickedRows(_ROWS.slice(0, 3), np.array([2, 1, 1])))
