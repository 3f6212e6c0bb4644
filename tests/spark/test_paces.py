"""Tables are merged each at its own pace: none waits for another, and a point shows one LSN of all."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.lake.apply import merge_task, scheduler
from airflow_provider_pgrepl.replication.lake.apply import scheduler as catch_up_planner
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from tests.support.in_process import InProcess
from tests.support.replicated import execute, wait_until

SLOW, QUICK, OTHER = "public.slow", "public.quick", "public.other"
TABLES = (SLOW, QUICK, OTHER)
NEVER_S = 3600.0
SUM = "select (select sum(v) from public.slow) + (select sum(v) from public.quick) as total"


@pytest.fixture
def replicated(spark, dsn, tmp_path: Path) -> InProcess:
    for name in ("slow", "quick", "other"):
        execute(
            dsn,
            f"create table {name}(id int primary key, v int)",
            f"insert into {name} values (1, 100), (2, 0)",
        )
    replicated = InProcess(spark, dsn, tmp_path, TABLES, consistent_point_interval_s=1.0)
    replicated.snapshot()
    return replicated


class Gate:
    """Holds each merge of one table while it is closed; a folder that Spark's workers see, too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_open = folder / "open"
        self.open()

    def open(self) -> None:
        self._is_open.touch()

    def close(self) -> None:
        self._is_open.unlink()

    @property
    def held(self) -> int:
        """Return the number of merges held by now."""
        return len(list(self._folder.glob("held-*")))

    def wait_for_more(self, before: int) -> None:
        wait_until(lambda: self.held > before, what="a merge that is held")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gate]:
    """A gate for merges of `slow`. The job class is defined here, so that it travels to workers by value."""
    folder = tmp_path / "gate"
    folder.mkdir()

    class HeldJob(merge_task.MergeJob):
        def run(self) -> Any:
            end = time.monotonic() + 300
            if self.work.relation.table.name == "slow" and self.paths and not (folder / "open").exists():
                (folder / f"held-{uuid.uuid4()}").touch()
                while not (folder / "open").exists() and time.monotonic() < end:
                    time.sleep(0.02)
            return super().run()

    monkeypatch.setattr(catch_up_planner, "MergeJob", HeldJob)
    monkeypatch.setattr(scheduler, "MergeJob", HeldJob)
    gate = Gate(folder)
    yield gate
    gate.open()


def move(replicated: InProcess, number: int) -> None:
    """The sum over both tables stays; only whole transactions keep it."""
    execute(
        replicated.dsn,
        f"begin; update slow set v = v - {number} where id = 1;"
        f" update quick set v = v + {number} where id = 1; commit",
    )


def merge_quick(replicated: InProcess, change: Callable[[], None]) -> LSN:
    """Wait until a change of the quick table is in the lake; returns its position there."""
    before = replicated.position(QUICK)
    change()
    wait_until(lambda: replicated.position(QUICK) > before, what="the quick table's merge")
    return replicated.position(QUICK)


def test_no_table_waits_for_the_merge_of_another(replicated, gate):
    with replicated.replicating() as running:
        running.wait_for(replicated.source_lsn())
        gate.close()
        execute(replicated.dsn, "update slow set v = 1 where id = 2")
        gate.wait_for_more(0)
        update = partial(execute, replicated.dsn, "update quick set v = v + 1 where id = 2")
        positions = [merge_quick(replicated, update) for _ in range(3)]
        assert running.applier._rounds.is_running
        assert replicated.position(SLOW) < positions[0]
        gate.open()
        running.wait_for(replicated.source_lsn())
    replicated.assert_equal(*TABLES)


@pytest.mark.thorough("test_consistent_read, and the other paces of this file")
def test_points_show_whole_transactions_though_one_table_is_slow(replicated, gate):
    numbers = itertools.count(1)
    with replicated.replicating() as running:
        running.wait_for(replicated.source_lsn())
        for _ in range(4):
            gate.close()
            before = gate.held
            move(replicated, next(numbers))
            gate.wait_for_more(before)
            for _ in range(3):
                merge_quick(replicated, lambda: move(replicated, next(numbers)))
            gate.open()
            replicated.wait_for_points(1, *TABLES)
        running.wait_for(replicated.source_lsn())
    replicated.assert_equal(*TABLES)
    totals = [row["total"] for row in replicated.at_every_point(SUM, *TABLES)]
    assert set(totals) == {200}
    lsns = [point.lsn for point in ConsistentPoints(replicated.pipeline.lake_root).all()]
    assert len(lsns) >= 4, "there are points while the slow table is merged again and again"


def test_a_table_over_its_budget_waits_and_the_points_bring_it_along(replicated):
    never = {"merge_interval_s": NEVER_S, "max_staleness_s": NEVER_S}
    replicated.configure(per_table={SLOW: never}, consistent_point_interval_s=2.0)
    with replicated.replicating() as running:
        running.wait_for(replicated.source_lsn())
        move(replicated, 1)
        running.wait_for(replicated.source_lsn())
        began = time.monotonic()
        move(replicated, 2)
        running.wait_for(replicated.source_lsn())
        assert time.monotonic() - began < NEVER_S / 2, "a boundary does not wait for the table's turn"
    replicated.assert_equal(*TABLES)
    assert {row["total"] for row in replicated.at_every_point(SUM, *TABLES)} == {200}
