"""Sums of ranges that a comparison has read: which ones the next may use, and which are deleted."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from airflow_provider_pgrepl.replication.lake.snapshot import kept_ranges
from airflow_provider_pgrepl.replication.lake.verify.buckets import Buckets, BucketSums, RowShape
from airflow_provider_pgrepl.replication.lake.verify.kept_sums import KeptSums, find_kept_sums, forget_sums
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Column, PgType, Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange
from tests.support.changelogs import epoch_record
from tests.unit import test_kept_ranges
from tests.unit.test_kept_ranges import RELATION, XMIN

SHAPE = RowShape(("id",), ("id",), (1, 2))
FOUR = Buckets(np.arange(4))


def find(
    lake: Path,
    shape: RowShape = SHAPE,
    buckets: Buckets = FOUR,
    xmin: int = XMIN,
    position: int = 500,
    relation: Relation = RELATION,
) -> KeptSums:
    moment = (epoch_record(), LSN(position), xmin)
    return find_kept_sums(str(lake), relation, TableOptions(), *moment, shape, buckets)


def part(start: int, size: int = 1 << 20) -> CopyRange:
    return replace(test_kept_ranges.part(start), bytes=size)


def sums_of(rows: int, buckets: Buckets = FOUR) -> BucketSums:
    sums = BucketSums.zero(buckets.count)
    sums.counts[0], sums.s1[0], sums.s2[-1] = rows, 2**63 + rows, 2**64 - 1
    return sums


def files(lake: Path) -> list[Path]:
    return sorted((lake / "_pgrepl/copies/public/t").glob("*"))


def test_the_next_comparison_gets_the_sums_with_their_seed_and_buckets(tmp_path):
    find(tmp_path).add(part(0), sums_of(7))
    again = find(tmp_path, replace(SHAPE, seed=(3, 4)), Buckets(np.arange(8)), xmin=XMIN + 1)
    assert (again.shape, again.buckets.count) == (SHAPE, 4)
    (copied,) = again.ranges
    assert copied == part(0).as_copied(7, XMIN)
    found, wanted = again.read(copied), sums_of(7)
    assert found is not None
    assert found.is_kept
    assert not len(found.differing(wanted))


@pytest.mark.parametrize(
    "other",
    [
        {"shape": replace(SHAPE, columns=("id", "v"))},
        {"shape": replace(SHAPE, keys=())},
        {"relation": replace(RELATION, oid=2)},
        {"relation": replace(RELATION, columns=(*RELATION.columns, Column("v", 2, 25, -1, "text")))},
        {"position": 499},
        {"xmin": XMIN - 1},
    ],
)
def test_sums_of_other_columns_and_of_later_snapshots_are_deleted(tmp_path, other):
    find(tmp_path).add(part(0), sums_of(7))
    assert not find(tmp_path, **other).ranges
    assert not files(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:20],
        lambda content: content[:-1],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: content.replace(b'"xmin": 1000', b'"xmin": 1001'),
        lambda content: content.replace(b'"seed": [1, 2]', b'"seed": [1, 3]'),
    ],
    ids=["empty", "torn header", "torn", "a bit of the sums", "another xmin", "another seed"],
)
def test_damaged_sums_are_not_used(tmp_path, damage):
    find(tmp_path).add(part(0), sums_of(7))
    (file,) = files(tmp_path)
    damaged = damage(file.read_bytes())
    assert damaged != file.read_bytes()
    file.write_bytes(damaged)
    again = find(tmp_path, xmin=XMIN + 5)
    assert [again.read(one) for one in again.ranges] in ([], [None])


def test_newer_sums_of_a_range_and_those_of_most_rows_are_kept(tmp_path):
    find(tmp_path).add(part(0), sums_of(7))
    second = find(tmp_path, xmin=XMIN + 1)
    second.add(part(0), sums_of(8))
    second.add(part(10), sums_of(9))
    # Another app that began before these were written has a seed of its own.
    other = replace(second, shape=replace(SHAPE, seed=(3, 4)))
    other.add(part(20), sums_of(10))
    again = find(tmp_path, xmin=XMIN + 2)
    assert [(one.start, one.rows) for one in sorted(again.ranges, key=lambda one: one.start)] == [
        (0, 8),
        (10, 9),
    ]
    assert len(files(tmp_path)) == 2


def test_ranges_without_room_pages_or_a_file_are_not_kept(tmp_path):
    kept = find(tmp_path)
    kept.add(part(0, size=24 * 4 * 20 - 1), sums_of(7))
    kept.add(replace(part(0), pages=0), sums_of(7))
    kept.add(replace(part(0), filenode=0), sums_of(7))
    assert not files(tmp_path)
    kept.add(part(0, size=24 * 4 * 20), sums_of(7))
    assert len(files(tmp_path)) == 1


def test_sums_are_not_kept_where_texts_change_without_the_row(tmp_path):
    money = Column("m", 2, 790, -1, "money", type=PgType(790, name="money"))
    kept = find(tmp_path, relation=replace(RELATION, columns=(*RELATION.columns, money)))
    kept.add(part(0), sums_of(7))
    assert not files(tmp_path)


def test_file_that_cannot_be_written_or_is_gone_stops_nothing(tmp_path):
    kept = find(tmp_path)
    (tmp_path / "_pgrepl").write_text("not a folder")
    kept.add(part(0), sums_of(7))
    (tmp_path / "_pgrepl").unlink()
    kept.add(part(0), sums_of(7))
    again = find(tmp_path)
    files(tmp_path)[0].unlink()
    assert again.read(again.ranges[0]) is None


@pytest.mark.parametrize("way", ["compared", "copied", "expired"])
def test_sums_are_deleted_when_their_table_is_compared_or_copied_or_they_are_old(tmp_path, way):
    find(tmp_path).add(part(0), sums_of(7))
    if way == "compared":
        forget_sums(str(tmp_path), RELATION.table)
    elif way == "copied":
        copy = test_kept_ranges.kept(tmp_path)
        copy.find(XMIN)
        copy.forget([])
    else:
        kept_ranges.expire(str(tmp_path), datetime.now(UTC) - timedelta(minutes=5))
        assert files(tmp_path)
        kept_ranges.expire(str(tmp_path), datetime.now(UTC) + timedelta(minutes=5))
    assert not files(tmp_path)
    forget_sums(str(tmp_path), RELATION.table)
