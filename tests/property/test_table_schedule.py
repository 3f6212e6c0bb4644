"""Tables that are merged at different paces: pending and running merges, and versions common to all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.lake.apply.merge_task import MergeJob
from airflow_provider_pgrepl.replication.lake.apply.schedule import BEFORE_ALL, CaughtUpTable, TableSchedule
from airflow_provider_pgrepl.replication.lake.apply.work_item import BatchEnd, WorkItem
from airflow_provider_pgrepl.replication.lake.apply.write_budget import MergePolicy
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from tests.support.changes import work_of
from tests.support.examples import examples

TABLES = (7, 8, 9)
AT_ONCE = MergePolicy(0, 60, 20, 2)
SNAPSHOT = LSN(5)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("batch"), st.sets(st.sampled_from(TABLES)), st.integers(1, 3)),
        st.tuples(
            st.sampled_from(["begin", "end", "plan", "lose", "pause", "stop", "take"]),
            st.sampled_from(TABLES),
        ),
        st.tuples(st.sampled_from(["seal", "point", "cut"])),
    ),
    max_size=60,
)


@dataclass
class World:
    """A model of the changelog's versions, with the tables that each one changes, and of the tables: the
    content of a table's version is the set of changelog versions that are merged into it."""

    limit: int
    commits: dict[int, set[int]] = field(default_factory=dict)
    versions: dict[int, list[frozenset[int]]] = field(
        default_factory=lambda: {oid: [frozenset()] for oid in TABLES}
    )
    ends: list[int] = field(default_factory=list)
    passed: int = BEFORE_ALL
    streaming: set[int] = field(default_factory=lambda: set(TABLES))

    def __post_init__(self) -> None:
        self.schedule = TableSchedule(lambda _: AT_ONCE, self.limit)
        self.batch(set(), 1)

    def batch(self, tables: set[int], count: int, *, cut: bool = False) -> None:
        begin = max(self.commits, default=0)
        for version in range(begin + 1, begin + count + 1):
            self.commits[version] = tables if version == begin + 1 else set()
        end = begin + count
        items = [WorkItem(oid, begin, end, (str(begin + 1),), 1) for oid in sorted(tables)]
        known = BEFORE_ALL if cut or not self.ends else begin
        self.schedule.add(BatchEnd(end, LSN(100 * end), None), known, [] if cut else items, 0.0)
        self.ends.append(end)

    def begin(self, oid: int) -> None:
        if oid not in self.schedule.turns(0.0):
            return
        portion, through = self.schedule.next_of(oid)
        self.schedule.start(oid, job(oid, through, portion.paths), 0.0)

    def plan(self, oid: int) -> None:
        if oid not in self.schedule.lagging(TABLES, 1.0):
            return
        newest = self.schedule.newest
        paths = tuple(str(version) for version, tables in self.commits.items() if oid in tables)
        planned = job(oid, newest, paths, upto=LSN(100 * newest))
        self.schedule.start(oid, planned, 0.0)

    def end(self, oid: int) -> None:
        running = self.schedule.running.get(oid)
        if running is None:
            return
        content = self.versions[oid][-1] | {int(path) for path in running.paths}
        self.versions[oid].append(content)
        caught_up = CaughtUpTable(
            SNAPSHOT, running.through, running.through, len(self.versions[oid]) - 1, 0, None, ""
        )
        self.schedule.finish(oid, caught_up if running.is_last else None)

    def pause(self, oid: int) -> None:
        """Resume a table after a stop: it catches up from its snapshot."""
        self.follow(oid, {oid: SNAPSHOT})

    def lose(self, oid: int) -> None:
        """Forget a table, as after another program has changed it."""
        self.follow(oid)

    def stop(self, oid: int) -> None:
        """Stop a table; the stop is noticed before the table's record is read again."""
        self.schedule.caught_up.forget(oid)
        self.point()
        self.streaming.discard(oid)
        self.follow()

    def take(self, oid: int) -> None:
        """Set a table to streaming again."""
        self.streaming.add(oid)

    def follow(self, but: int = 0, catching_up: Mapping[int, LSN] = MappingProxyType({})) -> None:
        self.schedule.follow(dict.fromkeys(self.streaming - {but}, SNAPSHOT), catching_up)

    def seal(self) -> None:
        self.schedule.seal()

    def cut(self) -> None:
        self.batch(set(TABLES), 1, cut=True)
        self.passed = BEFORE_ALL

    def point(self) -> None:
        version = self.schedule.common(self.streaming)
        if version is not None and version > self.passed:
            self.passed = version
        self.schedule.forget_before(self.passed, self.streaming)

    def check(self) -> None:
        """Assert that a table's version known for a changelog version holds exactly the commits up to it."""
        for oid in TABLES:
            for version in self.ends:
                known = self.schedule.caught_up.at(oid, version)
                if known is not None:
                    assert self.versions[oid][known.version] == self.committed(oid, version)
        common = self.schedule.common(self.streaming)
        if common is not None:
            assert common in self.ends
            assert all(self.schedule.caught_up.at(oid, common) is not None for oid in self.streaming)
            assert self.schedule.ends[common].version == common

    def committed(self, oid: int, upto: int) -> set[int]:
        return {version for version, tables in self.commits.items() if version <= upto and oid in tables}


def job(oid: int, through: int, paths: tuple[str, ...], upto: LSN | None = None) -> MergeJob:
    return MergeJob(work_of(oid), SNAPSHOT, through, paths, 1, **({} if upto is None else {"upto_lsn": upto}))


@examples(400)
@given(steps=steps, limit=st.sampled_from([1, 3, 1000]))
def test_a_table_is_never_said_to_hold_another_moment_than_it_does(steps, limit):
    world = World(limit)
    for name, *arguments in steps:
        getattr(world, name)(*arguments)
        world.check()


@examples(200)
@given(steps=steps, limit=st.sampled_from([1, 3, 1000]))
def test_all_tables_catch_up_and_reach_common_version_after_any_history(steps, limit):
    world = World(limit)
    for name, *arguments in steps:
        getattr(world, name)(*arguments)
    world.streaming = set(TABLES)
    for _ in range(len(steps) + 3):
        for oid in TABLES:
            world.end(oid)
            world.plan(oid)
            world.begin(oid)
    assert world.schedule.is_settled(TABLES)
    assert world.schedule.through(TABLES) == world.schedule.newest
    assert world.schedule.common(TABLES) == world.schedule.newest
    world.check()


def test_a_table_that_lags_goes_on_at_once_and_after_a_failure_in_a_moment():
    world = World(1)
    world.batch({7}, 1)
    oid = 7
    for _ in range(2):
        world.plan(oid)
        world.schedule.finish(oid, None)
        assert oid in world.schedule.lagging(TABLES, 1.0)
    world.plan(oid)
    world.schedule.finish(oid, None, failed_at=1.0)
    assert oid not in world.schedule.lagging(TABLES, 1.0)
    assert oid in world.schedule.lagging(TABLES, 1.3)


@examples(200)
@given(others=st.lists(st.sets(st.sampled_from([8, 9])), min_size=1, max_size=10))
def test_all_tables_have_a_version_at_a_boundary_however_long_one_takes(others):
    world = World(1000)
    for oid in TABLES:
        world.plan(oid)
        world.end(oid)
    world.batch({7, 8}, 1)
    world.begin(7)
    world.begin(8)
    world.end(8)
    world.batch({7, 9}, 1)
    world.seal()
    boundary = world.schedule.newest
    assert world.schedule.is_passing(TABLES, world.passed)
    for tables in others:
        world.batch({7, *tables}, 1)
        for oid in (8, 9, 8, 9):
            world.begin(oid)
            world.end(oid)
        world.point()
    for _ in range(2):
        world.end(7)
        world.begin(7)
    world.point()
    assert world.passed >= boundary
    world.check()
