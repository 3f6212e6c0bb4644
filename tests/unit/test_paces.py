"""The times at which a table is merged, and the merges that run concurrently."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.lake.apply import merge_task
from airflow_provider_pgrepl.replication.lake.apply.merge_policy import (
    FREE_BYTES_PER_S,
    MergePolicy,
    MergeStatistics,
)
from airflow_provider_pgrepl.replication.lake.apply.merge_task import (
    MergeJob,
    MergeSlots,
    make_shares,
    run_share,
)
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableResult
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from tests.support.changes import work_of

CADENCE = MergePolicy(
    merge_interval_s=2, max_staleness_s=30, max_write_amplification=10, consistent_point_bytes=2
)
MIB = 1 << 20


def job(oid: int) -> MergeJob:
    return MergeJob(work_of(oid), LSN(1), 1, (), 1)


def seconds(*long: int, of: float = 5.0) -> dict[int, float]:
    return dict.fromkeys(long, of)


def begun(lanes: MergeSlots, takes: dict[int, float], now: float = 100.0) -> list[list[int]]:
    shares = lanes.begin(lambda job: takes.get(job.oid, 0.1), now)
    return [[job.oid for job in share] for share in shares]


def test_a_table_is_merged_as_soon_as_it_wishes():
    pace = MergeStatistics()
    assert pace.turn(CADENCE, 100.0, 1, 100.0).at <= 100.0
    pace.start(100.0)
    assert pace.turn(CADENCE, 100.5, 1, 100.5).at == 102.0


def test_one_that_wrote_too_much_waits_and_never_longer_than_it_may():
    pace = MergeStatistics()
    pace.start(0.0)
    pace.end(1.0, 1.0, 100 * MIB, MIB)
    turn = pace.turn(CADENCE, 10.0, 1, 10.0)
    assert (turn.at > 10.0, turn.reason) == (True, "max_write_amplification")
    assert pace.turn(CADENCE, 10.0, 1, 41.0).at <= 41.0, "it has waited for as long as it may"
    assert pace.turn(CADENCE, 10.0, 20 * MIB, 11.0).at <= 11.0, "so much has changed that it is worth it"


def test_a_small_table_may_write_a_little_however_little_changes():
    pace = MergeStatistics()
    for now in range(600):
        assert pace.turn(CADENCE, now, 10, now).reason != "max_write_amplification"
        pace.start(now)
        pace.end(now, 0.1, FREE_BYTES_PER_S // 2, 10)


def settled_spacing(cadence: MergePolicy, live: int, written: int, changed: int = 1) -> float:
    """Return the settled seconds between merges of a table of `live` bytes that each write `written`."""
    pace, now, began = MergeStatistics(), 0.0, 0.0
    cadence = replace(cadence, max_write_amplification=1e12)
    for _ in range(1000):
        pace.start(now)
        pace.end(now, 0.1, written, changed, live=live)
        began, now = now, pace.turn(cadence, now, 1, now).at
    return now - began


def test_merge_spacing_bounds_replaced_bytes_by_live_table_size():
    assert settled_spacing(CADENCE, 1000 * MIB, 2 * MIB) == 2.0
    spacing = settled_spacing(CADENCE, 100 * MIB, 2 * MIB)
    assert 2.0 < spacing < 4.0
    assert 150 / spacing * 2 <= 1.4 * 100 * 2 / 3, "what is replaced in two and a half minutes"
    assert settled_spacing(replace(CADENCE, consistent_point_bytes=6), 100 * MIB, 2 * MIB) == 2.0
    assert settled_spacing(CADENCE, MIB, 200 << 10) == 2.0, "a small table may leave some"
    assert settled_spacing(CADENCE, MIB, 500 * MIB) == 30.0, "it waits as long as it may"


def test_merge_spacing_stays_minimal_while_merges_write_only_the_changes():
    """Less frequent merges would not write less: a table with 100,000 changes a second would only lag."""
    assert settled_spacing(CADENCE, 10 * MIB, 20 * MIB, changed=40 * MIB) == 2.0
    assert settled_spacing(CADENCE, 10 * MIB, 21 * MIB, changed=40 * MIB) > 2.0


def test_bytes_that_make_a_table_larger_replace_nothing():
    pace = MergeStatistics()
    for now in range(600):
        pace.start(now)
        pace.end(now, 0.1, 10 * MIB, 10 * MIB, live=(now + 1) * 10 * MIB)
        assert pace.turn(CADENCE, now, 1, now).reason == "freshness"


def test_old_writes_do_not_count_toward_write_amplification():
    pace = MergeStatistics()
    pace.end(0.0, 1.0, 1000 * MIB, 1)
    pace.end(4000.0, 1.0, 1, 1)
    assert (pace.written, pace.changed) == (1, 1)
    assert pace.turn(CADENCE, 4001.0, 1, 4001.0).reason != "max_write_amplification"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"merge_interval_s": -1}, "merge_interval_s: -1 must not be negative"),
        ({"max_write_amplification": 0}, "max_write_amplification: 0 must be greater than 0"),
        ({"max_staleness_s": 0.5}, "must not be less than merge_interval_s"),
        ({"per_table": {"public.t": {"merge_interval_s": "1"}}}, "must be a number"),
        ({"per_table": {"public.t": {"merge_interval_s": True}}}, "must be a number"),
        (
            {"per_table": {"public.t": {"max_write_amplification": -1}}},
            "max_write_amplification: -1 must be greater than 0",
        ),
        ({"per_table": {"public.t": {"merge_interval_s": 61}}}, 'per_table["public.t"].max_staleness_s'),
        ({"per_table": {"public.t": {"merge_interval_s": 1e30}}}, "must not be more than"),
    ],
)
def test_paces_that_cannot_be_are_refused(given, told):
    with pytest.raises(ConfigError) as refused:
        Pipeline(name="p", lake="/lake", tables=("public.t",), **given)
    assert told in str(refused.value)


def test_short_merges_share_the_slots_and_long_ones_leave_them_one():
    lanes = MergeSlots(2)
    for oid in (1, 2, 3, 4, 5):
        lanes.add(job(oid))
    first = begun(lanes, seconds(1, 2))
    assert sorted(map(len, first)) == [1, 3]
    assert [1] in first or [2] in first
    lanes.end([job(3), job(4), job(5)], [])
    assert lanes.has_ready


def test_a_long_merge_never_takes_the_last_slot_while_short_ones_come():
    lanes = MergeSlots(2)
    lanes.add(job(3))
    (short,) = lanes.begin(lambda _: 0.1, 100.0)
    lanes.end(short, [TableResult(3)])
    for oid in (1, 2):
        lanes.add(job(oid))
    assert len(begun(lanes, seconds(1, 2), 101.0)) == 1
    lanes.add(job(3))
    assert begun(lanes, seconds(1, 2), 102.0) == [[3]]


def test_without_short_ones_long_merges_take_all_slots():
    lanes = MergeSlots(2)
    for oid in (1, 2, 3):
        lanes.add(job(oid))
    assert len(begun(lanes, seconds(1, 2, 3))) == 2
    assert begun(lanes, seconds(1, 2, 3)) == []


def test_long_merges_begin_though_short_ones_always_wait():
    lanes = MergeSlots(2)
    lanes.add(job(3))
    lanes.add(job(4))
    first, second = lanes.begin(lambda _: 0.1, 100.0)
    lanes.add(job(1))
    lanes.add(job(5))
    lanes.end(first, [TableResult(one.oid) for one in first])
    assert begun(lanes, seconds(1), 101.0) == [[1]]
    lanes.end(second, [TableResult(one.oid) for one in second])
    assert begun(lanes, seconds(1), 102.0) == [[5]]


def test_a_table_that_moves_has_its_turn_however_many_lag_behind():
    """The next merge of a lagging table begins as soon as its last one has ended."""
    lanes, ended = MergeSlots(2), 0
    for oid in (1, 2, 3, 4):
        lanes.add(replace(job(oid), upto_lsn=LSN(9)))
    running: list[list[MergeJob]] = []
    waits = True
    for now in range(40):
        if waits and lanes.choose([7], lambda _: 3.0):
            lanes.add(job(7))
            waits = False
        running += lanes.begin(lambda _: 3.0, float(now))
        share = running.pop(0)
        lanes.end(share, [TableResult(one.oid) for one in share])
        for one in share:
            if one.oid == 7:
                ended, waits = ended + 1, True
            else:
                lanes.add(one)
    assert ended >= 5


def test_long_merges_go_on_when_one_slot_is_left():
    """An executor was lost while some waited."""
    lanes = MergeSlots(2)
    for oid in (1, 2, 3):
        lanes.add(job(oid))
    running = lanes.begin(lambda _: 3.0, 0.0)
    lanes.slots = 1
    for _ in range(4):
        for share in running:
            lanes.end(share, [TableResult(one.oid) for one in share])
        running = lanes.begin(lambda _: 3.0, 1.0)
    assert lanes.choose([7], lambda _: 3.0) == [7]


def test_with_one_slot_everything_runs_in_the_order_in_which_it_came():
    lanes = MergeSlots(1)
    for oid in (1, 2, 3):
        lanes.add(job(oid))
    assert begun(lanes, seconds(1)) == [[1, 2, 3]]
    assert begun(lanes, seconds(1)) == []


def test_shares_are_even_and_keep_the_order():
    shares = make_shares([(job(oid), float(oid)) for oid in range(1, 7)], 2)
    found = [[one.oid for one in share] for share in shares]
    assert sorted(oid for share in found for oid in share) == [1, 2, 3, 4, 5, 6]
    assert all(share == sorted(share) for share in found), "in the order in which they came"
    assert abs(sum(found[0]) - sum(found[1])) <= 3


def test_job_skipped_by_timed_out_share_starts_in_next_share(monkeypatch):
    monkeypatch.setattr(merge_task, "SHARE_S", -1.0)
    monkeypatch.setattr(merge_task, "bring_forward", lambda work, *_: TableResult(work.relation.oid))
    lanes = MergeSlots(2)
    for oid in (1, 2, 3, 4):
        lanes.add(job(oid))
    first, _ = lanes.begin(lambda _: 0.1, 0.0)
    results = run_share(first)
    assert [result.relation_id for result in results] == [first[0].oid]
    lanes.end(first, results)
    assert begun(lanes, {}) == [[first[1].oid]]


@pytest.mark.parametrize(("size", "most"), [(1, 3), (merge_task._SMALL_BYTES, 1)])
def test_small_merges_of_a_share_wait_for_a_store_beside_each_other(monkeypatch, size, most):
    """Large ones take their memory one after the other: in one thread."""
    beside, threads = threading.Barrier(most), set()

    def bring(work, *_):
        threads.add(threading.get_ident())
        beside.wait(120)
        return TableResult(work.relation.oid)

    monkeypatch.setattr(merge_task, "bring_forward", bring)
    share = [
        replace(job(oid), bytes=size, work=replace(work_of(oid), lake_root="s3://bucket/lake"))
        for oid in (1, 2, 3)
    ]
    assert {result.relation_id for result in run_share(share)} == {1, 2, 3}
    assert len(threads) == most


def test_slots_of_which_each_merges_many_at_once_have_time_for_more():
    assert MergeSlots(2, 4).choose(range(100), lambda _: 0.25) == list(range(16))


def test_tables_that_no_slot_has_time_for_go_on_waiting():
    lanes = MergeSlots(2)
    assert lanes.choose(range(100), lambda _: 0.25) == [0, 1, 2, 3]
    assert 190 < len(lanes.choose(range(1000), lambda _: 0.0)) < 210
    assert lanes.choose([1, 2, 3, 4], lambda oid: 5.0 if oid < 3 else 0.1) == [1, 3, 4], "one long at a time"
    lanes.add(job(1))
    lanes.begin(lambda _: 5.0, 100.0)
    lanes.add(job(2))
    lanes.add(job(3))
    lanes.begin(lambda _: 0.1, 100.0)
    assert lanes.choose([4, 5], lambda _: 0.1) == [], "nothing is free"
