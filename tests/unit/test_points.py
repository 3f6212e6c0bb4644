"""lake/consistent_points.py on a real Delta table."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import FencedError, LakeError
from airflow_provider_pgrepl.replication.lake.consistent_points import (
    ConsistentPoint,
    ConsistentPoints,
    points_uri,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN

NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


def point(lsn: int, epoch: int = 1, ago: timedelta = timedelta(0), **tables: int) -> ConsistentPoint:
    named = {f"public.{name}": version for name, version in (tables or {"a": lsn}).items()}
    return ConsistentPoint(epoch, LSN(lsn), NOW - ago, named)


def test_a_lake_without_points_has_none(tmp_path: Path) -> None:
    points = ConsistentPoints(str(tmp_path))
    assert points.latest() is None
    assert points.at_or_before(10) is None
    assert points.kept_versions() == {}
    assert points.thin(NOW, 1, 10, 168) == 0


def test_appended_points_are_read_by_another_instance(tmp_path: Path) -> None:
    points = ConsistentPoints(str(tmp_path))
    written = [point(10), point(20, a=2, b=7), ConsistentPoint(1, LSN(30), None, {'"My S"."t.x"': 0})]
    for one in written:
        points.append(one)
    assert list(ConsistentPoints(str(tmp_path)).all()) == written == list(points.all())
    assert ConsistentPoints(str(tmp_path)).latest() == written[-1]


def test_the_newest_point_at_or_before_an_lsn_is_found_within_one_epoch(tmp_path: Path) -> None:
    points = ConsistentPoints(str(tmp_path))
    for one in (point(10), point(20), point(500), point(15, epoch=2), point(25, epoch=2)):
        points.append(one)
    assert points.at_or_before(24) == point(15, epoch=2)
    assert points.at_or_before(14) is None
    assert points.at_or_before(499, epoch=1) == point(20)
    assert points.at_or_before(20, epoch=1) == point(20)
    assert points.at_or_before(20, epoch=3) is None


def test_a_point_before_the_last_one_is_refused_and_not_written(tmp_path: Path) -> None:
    points = ConsistentPoints(str(tmp_path))
    points.append(point(0x20, epoch=2))
    with pytest.raises(LakeError, match="0/1F of epoch 2"):
        points.append(point(0x1F, epoch=2))
    with pytest.raises(LakeError, match="epoch 1"):
        points.append(point(0x99, epoch=1))
    assert [one.lsn for one in ConsistentPoints(str(tmp_path)).all()] == [0x20]


def test_later_point_at_same_lsn_wins_and_identical_point_is_not_written(tmp_path: Path) -> None:
    points = ConsistentPoints(str(tmp_path))
    points.append(point(10, a=1))
    points.append(point(10, a=1, b=4))
    version = DeltaTable(points_uri(str(tmp_path))).version()
    points.append(point(10, a=1, b=4))
    assert DeltaTable(points_uri(str(tmp_path))).version() == version
    assert ConsistentPoints(str(tmp_path)).latest() == point(10, a=1, b=4)
    assert ConsistentPoints(str(tmp_path)).at_or_before(11) == point(10, a=1, b=4)


def test_a_writer_that_another_one_overtook_is_refused(tmp_path: Path) -> None:
    stale, fresh = ConsistentPoints(str(tmp_path)), ConsistentPoints(str(tmp_path))
    stale.append(point(1))
    stale.append(point(2))
    fresh.append(point(3))
    with pytest.raises(FencedError):
        stale.append(point(4))
    assert [one.lsn for one in ConsistentPoints(str(tmp_path)).all()] == [1, 2, 3]


def test_thinning_through_another_instance_does_not_stop_the_writer(tmp_path: Path) -> None:
    writer = ConsistentPoints(str(tmp_path))
    for lsn in (1, 2, 3):
        writer.append(point(lsn, ago=timedelta(days=30)))
    assert ConsistentPoints(str(tmp_path)).thin(NOW, 1, 10, 168) == 2
    writer.append(point(4))
    assert (
        [one.lsn for one in ConsistentPoints(str(tmp_path)).all()]
        == [3, 4]
        == [one.lsn for one in writer.all()]
    )


def meanwhile(
    writer: ConsistentPoints, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]
) -> None:
    """Take one of these steps before each commit that the writer tries."""
    left, write = list(steps), writer._write

    def write_after_a_step(points: Sequence[ConsistentPoint], **how: bool) -> None:
        if left:
            left.pop(0)()
        write(points, **how)

    monkeypatch.setattr(writer, "_write", write_after_a_step)


@pytest.mark.parametrize("count", [2, 4], ids=["of one process", "of two processes"])
def test_thinnings_between_the_attempts_of_an_append_do_not_stop_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Maintenance thins points in two commits, and pgrepl maintain may do so at the same time."""
    writer = ConsistentPoints(str(tmp_path))
    for lsn in range(1, 7):
        writer.append(point(lsn))

    def thin() -> None:
        assert ConsistentPoints(str(tmp_path)).rewrite(lambda held: held[1:]) == 1

    meanwhile(writer, monkeypatch, *[thin] * count)
    for lsn in (7, 8):
        writer.append(point(lsn))
    assert [one.lsn for one in ConsistentPoints(str(tmp_path)).all()] == list(range(count + 1, 9))
    assert writer.all() == ConsistentPoints(str(tmp_path)).all()


def test_writer_that_another_one_overtakes_after_a_thinning_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ConsistentPoints(str(tmp_path))
    for lsn in (1, 2):
        writer.append(point(lsn))
    meanwhile(
        writer,
        monkeypatch,
        lambda: ConsistentPoints(str(tmp_path)).rewrite(lambda held: held[1:]),
        lambda: ConsistentPoints(str(tmp_path)).append(point(3)),
    )
    with pytest.raises(FencedError):
        writer.append(point(4))
    assert [one.lsn for one in ConsistentPoints(str(tmp_path)).all()] == [2, 3]


def test_a_thinning_that_knows_old_points_only_loses_no_newer_one(tmp_path: Path) -> None:
    writer, thinner = ConsistentPoints(str(tmp_path)), ConsistentPoints(str(tmp_path))
    writer.append(point(1, ago=timedelta(days=30)))
    writer.append(point(2, ago=timedelta(days=30)))
    assert thinner.latest() == point(2, ago=timedelta(days=30))
    writer.append(point(3))
    assert thinner.thin(NOW, 1, 10, 168) == 2
    assert [one.lsn for one in ConsistentPoints(str(tmp_path)).all()] == [3]


def test_many_appends_leave_few_files_and_lose_nothing(tmp_path: Path) -> None:
    points = ConsistentPoints(str(tmp_path))
    for lsn in range(1, 201):
        points.append(point(lsn))
    assert len(DeltaTable(points_uri(str(tmp_path))).file_uris()) <= 64
    assert [one.lsn for one in ConsistentPoints(str(tmp_path)).all()] == list(range(1, 201))
    assert points.kept_versions() == {"public.a": set(range(1, 201))}


def test_thinning_keeps_all_then_one_per_slot_then_none_but_the_latest(tmp_path: Path) -> None:
    points = ConsistentPoints(str(tmp_path))
    made = [point(lsn, ago=timedelta(minutes=age)) for lsn, age in enumerate(range(400, -1, -1), 1)]
    points.rewrite(lambda _: made)
    dropped = points.thin(NOW, keep_all_h=1, thin_min=10, keep_h=3)
    ages = [
        round((NOW - one.commit_ts).total_seconds() / 60)
        for one in ConsistentPoints(str(tmp_path)).all()
        if one.commit_ts
    ]
    assert [age for age in ages if age <= 60] == list(range(60, -1, -1))
    assert [age for age in ages if age > 60] == list(range(171, 60, -10))
    assert dropped == 401 - len(ages)
    assert points.thin(NOW, keep_all_h=1, thin_min=10, keep_h=3) == 0


def test_the_latest_point_stays_however_old_it_is(tmp_path: Path) -> None:
    points = ConsistentPoints(str(tmp_path))
    for lsn in (1, 2, 3):
        points.append(point(lsn, ago=timedelta(days=100)))
    assert points.thin(NOW, 1, 10, 168) == 2
    assert list(ConsistentPoints(str(tmp_path)).all()) == [point(3, ago=timedelta(days=100))]
    points.append(point(4))
    assert len(ConsistentPoints(str(tmp_path)).all()) == 2


@pytest.mark.parametrize("seed", range(1, 6))
def test_appending_thinning_and_reopening_in_any_order_never_loses_the_latest(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    points, last = ConsistentPoints(str(tmp_path)), None
    for lsn in range(1, 120):
        match chance.randrange(6):
            case 0:
                points.thin(NOW, 0.1, 10, 0.5)
            case 1:
                points = ConsistentPoints(str(tmp_path))
            case _:
                last = point(lsn, ago=timedelta(seconds=chance.randrange(7200)))
                points.append(last)
        assert points.latest() == last == ConsistentPoints(str(tmp_path)).latest()


def test_points_whose_files_somebody_joins_are_there_once(tmp_path: Path) -> None:
    """This also holds when an instance replaces files that it knows, and that no longer exist."""
    points = ConsistentPoints(str(tmp_path))
    written = [point(lsn) for lsn in (10, 20, 30)]
    for one in written:
        points.append(one)
    DeltaTable(points_uri(str(tmp_path))).optimize.compact()
    points.append(point(40))
    assert list(ConsistentPoints(str(tmp_path)).all()) == [*written, point(40)]
    DeltaTable(points_uri(str(tmp_path))).optimize.compact()
    points.rewrite(lambda held: held[1:])
    assert list(ConsistentPoints(str(tmp_path)).all()) == [*written[1:], point(40)]
