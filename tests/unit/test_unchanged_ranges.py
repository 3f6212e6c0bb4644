"""The check of ranges that an earlier copy has read, while statements at the source need the table's lock."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import SourceError, TableSnapshotError
from airflow_provider_pgrepl.replication.lake.snapshot import range_copy
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import RangeCopies
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.copy.copy_stream import (
    CopiedRange,
    CopyRange,
    checked_together,
)


def copied(leaf: int, start: int, size: int = 10) -> CopyRange:
    earlier = CopiedRange(leaf, 1, start, start + 1, "", 7, 100)
    return CopyRange(leaf, TableName("public", "t"), "", 1, leaf, bytes=size, start=start, copied=earlier)


RANGES = [copied(1, 0), copied(1, 1), copied(1, 2), copied(1, 3), copied(2, 0)]
NEW = CopyRange(1, TableName("public", "t"), "", 1, 1)


class Job:
    """A copy job under a snapshot."""

    def __init__(self, snapshot: str) -> None:
        self.dsn, self.snapshot = "", snapshot

    def under(self, snapshot: str) -> Job:
        return Job(snapshot)


def check(
    monkeypatch: pytest.MonkeyPatch, *, is_lent: bool, error: SourceError
) -> tuple[set[int], list[int]]:
    """Check the ranges, of which one fails under the first snapshot. Return those that are found unchanged,
    and those that were reported as finished."""

    def unchanged(_dsn: str, snapshot: str, group: Sequence[CopyRange]) -> list[CopyRange]:
        if snapshot == "first" and RANGES[2] in group:
            raise error
        return [one for one in group if one is not RANGES[1]]

    monkeypatch.setattr(range_copy, "unchanged", unchanged)
    finished: list[int] = []
    spark: Any = None
    keeper: Any = SimpleNamespace(renew=lambda: is_lent, snapshot="second")
    job: Any = Job("first")
    copies = RangeCopies(spark, job, keeper, 2, lambda number, _result: finished.append(number))
    return copies._find_unchanged([NEW, *RANGES]), finished


def test_ranges_are_checked_in_groups_of_one_leaf() -> None:
    assert checked_together([NEW, *RANGES], 2) == [RANGES[:2], RANGES[2:4], RANGES[4:]]
    assert checked_together([NEW, *RANGES], 100) == [[one] for one in RANGES]
    large = [copied(1, 0, 3 << 30), copied(1, 1, 1 << 30), copied(1, 2, 1 << 30)]
    assert checked_together(large, 1) == [large[:1], large[1:]]
    assert checked_together([NEW], 2) == []


def test_check_that_gave_way_to_a_statement_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    found, finished = check(monkeypatch, is_lent=True, error=TableSnapshotError("a statement waits"))
    assert found == set(finished) == {1, 3, 4, 5}
    assert len(finished) == 4


def test_ranges_whose_check_fails_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    found, finished = check(monkeypatch, is_lent=False, error=SourceError("cancelled"))
    assert found == set(finished) == {1, 5}
