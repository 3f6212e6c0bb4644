"""A budget for storage: points of a table that is rewritten repeatedly are also deleted by bytes."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.maintenance import (
    HOLD,
    Maintenance,
    left_for_points,
    within_budget,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

NOW = datetime(2026, 1, 2, 12, 0, 30, tzinfo=UTC)
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
DAY = 24 * HOUR
MIB = 1 << 20
OURS = CommitProperties(app_transactions=[Transaction("shop:1", 1)])


def every(interval: timedelta, since: timedelta) -> list[ConsistentPoint]:
    """Return points of one table, each at a version of its own, oldest first."""
    ages = [since - interval * step for step in range(int(since / interval) + 1)]
    return [ConsistentPoint(1, LSN(100 + n), NOW - age, {"public.hot": n}) for n, age in enumerate(ages)]


def thinned(points: list[ConsistentPoint], fits, now: datetime = NOW, keep: timedelta = HOUR):
    return within_budget(points, now, fits, keep)


def at_most(count: int):
    return lambda points: len(points) <= count


def ages(points: list[ConsistentPoint]) -> list[timedelta]:
    return [NOW - point.commit_ts for point in points if point.commit_ts is not None]


def test_points_within_the_budget_stay_as_they_are():
    points = every(SECOND, since=MINUTE)
    assert thinned(points, at_most(61)) == points


def test_points_over_it_are_kept_at_the_finest_even_spacing_that_fits():
    kept = thinned(every(SECOND, since=HOUR), at_most(40))
    assert 30 <= len(kept) <= 40
    assert [point.lsn for point in kept] == sorted(point.lsn for point in kept)
    gaps = [older - newer for older, newer in zip(ages(kept)[1:-5], ages(kept)[2:-4], strict=True)]
    assert {round(gap / SECOND) for gap in gaps} <= {112, 113}, "an hour in 32"


def test_the_newest_of_the_last_minute_stay_whatever_they_cost():
    kept = thinned(every(SECOND, since=HOUR), at_most(0))
    assert [age // MINUTE for age in ages(kept) if age <= MINUTE] == [0, 0]
    assert ages(kept)[-1] == timedelta(0)


@pytest.mark.parametrize("room", [0, 2, 3, 10])
def test_a_moment_of_half_of_the_kept_time_ago_can_always_be_read(room: int):
    """Run after run, also with a budget that nothing fits, as after a TRUNCATE of a large table."""
    keep, points, began = 10 * HOUR, [], NOW
    for number in range(500):
        now = began + 5 * MINUTE * number
        points.append(ConsistentPoint(1, LSN(100 + number), now, {"public.hot": number}))
        points = [point for point in points if now - point.commit_ts <= keep]
        points = thinned(points, at_most(room), now, keep)
        assert now - points[0].commit_ts >= min(keep / 2, now - began)
        assert len(points) <= max(room, 4)


def test_the_newest_point_stays_however_old_it_is():
    points = every(SECOND, since=MINUTE)
    kept = thinned(points, at_most(0), NOW + 100 * HOUR)
    assert kept[-1] == points[-1]
    assert len(kept) <= 3


@pytest.mark.parametrize("off", [DAY, 400 * DAY, -DAY], ids=["a day ahead", "a year ahead", "a day behind"])
def test_a_clock_of_the_source_that_is_off_keeps_no_more(off: timedelta):
    points = [replace(point, commit_ts=point.commit_ts + off) for point in every(SECOND, since=HOUR)]
    kept = thinned(points, at_most(40), keep=168 * HOUR)
    assert len(kept) <= 40
    assert kept[-1] == points[-1]


def test_a_clock_of_the_source_that_was_ahead_for_a_while_keeps_no_more():
    points = every(SECOND, since=HOUR)
    points[1000:2800] = [replace(point, commit_ts=point.commit_ts + DAY) for point in points[1000:2800]]
    assert len(thinned(points, at_most(20))) <= 20


@pytest.mark.parametrize("off", [DAY, 400 * DAY])
def test_points_of_a_clock_that_is_ahead_grow_old(off: timedelta):
    """Run after run: older ones stay as far as they would by a clock that is right."""
    keep, points, began = 10 * HOUR, [], NOW
    for number in range(300):
        now = began + 5 * MINUTE * number
        points.append(ConsistentPoint(1, LSN(100 + number), now + off, {"public.hot": number}))
        points = thinned(points, at_most(0), now, keep)
        assert now + off - points[0].commit_ts >= min(keep / 2, now - began)


def test_points_have_at_least_half_of_the_budget():
    assert left_for_points(100, 0) == 100
    assert left_for_points(100, 30) == 40
    assert left_for_points(100, 1000) == 25


def test_points_of_two_epochs_are_not_taken_for_one_another():
    old = [ConsistentPoint(1, LSN(1), NOW - MINUTE, {}), ConsistentPoint(2, LSN(2), NOW - MINUTE, {})]
    assert thinned(old, at_most(1)) == old


class Hot:
    """A table of a lake, of which each merge rewrites all: about 1 MiB."""

    def __init__(self, lake: Path) -> None:
        self._uri = f"{lake}/public/hot"
        self._table: DeltaTable | None = None

    def merge(self) -> int:
        """Return a new version."""
        rows = pa.table({"v": pa.array([random.randbytes(MIB)])})
        write_deltalake(self._table or self._uri, rows, mode="overwrite", commit_properties=OURS)
        self._table = self._table or DeltaTable(self._uri)
        return int(self._table.version())


def bytes_on_disk(lake: Path) -> int:
    return sum(file.stat().st_size for file in (lake / "public/hot").glob("*.parquet"))


@pytest.mark.thorough("the shorter histories of this file")
def test_an_hour_of_a_hot_table_stays_within_its_budget(tmp_path: Path) -> None:
    """A batch each 20 seconds, which rewrites the table; maintenance looks every 40 seconds."""
    settings = {"name": "shop", "lake": str(tmp_path), "tables": ["public.*"], "consistent_point_bytes": 10.0}
    maintenance, points = Maintenance(Pipeline.from_dict(settings)), ConsistentPoints(str(tmp_path))
    hot, began, most, batches = Hot(tmp_path), datetime.now(UTC), 0, 180
    for batch in range(batches):
        moment = began + 20 * SECOND * batch
        points.append(ConsistentPoint(1, LSN(100 + batch), moment, {"public.hot": hot.merge()}))
        if batch % 2 == 1:
            before = bytes_on_disk(tmp_path)
            maintenance.keep_budget(moment)
            points = ConsistentPoints(str(tmp_path))
            most = max(most, before)
    live = 1.1 * MIB
    held = (HOLD + 40 * SECOND) / (20 * SECOND) * live
    assert most <= live + 10 * live + held + 3 * live
    measured = maintenance.measure()["public/hot"]
    assert measured.live <= live
    assert measured.written >= batches * MIB
    kept = points.all()
    assert kept[-1].commit_ts == began + 20 * SECOND * (batches - 1), "the newest can be read"
    assert kept[0].commit_ts is not None
    assert kept[0].commit_ts < began + HOUR / 2, "so can older moments, as far as the budget goes"


def hot_for_half_an_hour(lake: Path) -> datetime:
    """Write a version a minute up to now; return the time at which no reader holds a replaced one."""
    hot, points, now = Hot(lake), ConsistentPoints(str(lake)), datetime.now(UTC)
    for minute in range(30):
        moment = now - MINUTE * (30 - minute)
        points.append(ConsistentPoint(1, LSN(100 + minute), moment, {"public.hot": hot.merge()}))
    return datetime.now(UTC) + HOLD + SECOND


def test_version_that_waits_for_its_point_stays_beyond_the_budget_and_costs_no_point(tmp_path: Path) -> None:
    lake, other = tmp_path / "lake", tmp_path / "other"
    now = hot_for_half_an_hour(lake)
    hot = Hot(lake)
    waiting, _ = hot.merge(), hot.merge()
    shutil.copytree(lake, other)
    for root, versions in ((lake, {"public/hot": {waiting}}), (other, {})):
        settings = {"name": "shop", "lake": str(root), "tables": ["public.*"], "consistent_point_bytes": 1.0}
        maintenance = Maintenance(
            Pipeline.from_dict(settings), versions_for_points=lambda known=versions: known
        )
        assert maintenance.keep_budget(now + SECOND).points > 0
    assert ConsistentPoints(str(lake)).all() == ConsistentPoints(str(other)).all()
    files = {
        root: set(DeltaTable(f"{root}/public/hot", version=waiting).file_uris()) for root in (lake, other)
    }
    assert [all(Path(file).exists() for file in files[root]) for root in (lake, other)] == [True, False]


def test_all_points_may_be_kept_longer_than_thinned_ones(tmp_path: Path) -> None:
    settings = {
        "name": "shop",
        "lake": str(tmp_path),
        "tables": ["public.*"],
        "consistent_point_retention_h": 0.02,
    }
    now = hot_for_half_an_hour(tmp_path)
    Maintenance(Pipeline.from_dict(settings)).keep_budget(now)
    assert len(ConsistentPoints(str(tmp_path)).all()) <= 8


def test_the_largest_settings_are_no_obstacle(tmp_path: Path) -> None:
    hours = dict.fromkeys(
        ("consistent_point_keep_all_h", "consistent_point_retention_h", "changelog_retention_h"), 876_000
    )
    settings = {
        "name": "shop",
        "lake": str(tmp_path),
        "tables": ["public.*"],
        "consistent_point_bytes": 2**53,
    }
    now = hot_for_half_an_hour(tmp_path)
    done = Maintenance(Pipeline.from_dict(settings | hours)).run(now, needed_above={1: 200})
    assert done.failed == {}
    assert len(ConsistentPoints(str(tmp_path)).all()) == 30


def test_a_table_within_its_budget_costs_no_run(tmp_path: Path) -> None:
    settings = {"name": "shop", "lake": str(tmp_path), "tables": ["public.*"]}
    hot, points = Hot(tmp_path), ConsistentPoints(str(tmp_path))
    for lsn, moment in ((100, NOW - 500 * HOUR), (101, NOW)):
        points.append(ConsistentPoint(1, LSN(lsn), moment, {"public.hot": hot.merge()}))
    done = Maintenance(Pipeline.from_dict(settings)).keep_budget(NOW)
    assert (done.points, done.files) == (0, 0)
