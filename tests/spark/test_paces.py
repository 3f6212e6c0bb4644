"""Tables are merged each at its own pace: none waits for another, and points show one moment of all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.lake.applying import catch_up_planner, merge_job, merge_rounds
from airflow_provider_pgrepl.replication.lake.points import Points
from tests.support.in_process import InProcess
from tests.support.replicated import execute, wait_until

SLOW, QUICK, OTHER = "public.slow", "public.quick", "public.other"
TABLES = (SLOW, QUICK, OTHER)
TAKES_S = 6.0
SUM = 'select (select sum(v) from "public.slow") + (select sum(v) from "public.quick") as total'


@pytest.fixture
def replicated(spark, dsn, tmp_path: Path) -> InProcess:
    for name in ("slow", "quick", "other"):
        execute(
            dsn,
            f"create table {name}(id int primary key, v int)",
            f"insert into {name} values (1, 100), (2, 0)",
        )
    replicated = InProcess(spark, dsn, tmp_path, TABLES, points_every_s=1.0)
    replicated.snapshot()
    return replicated


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each merge of one table takes long; what is defined here travels to Spark's workers by value."""

    class SlowJob(merge_job.MergeJob):
        def run(self) -> Any:
            if self.work.relation.table.name == "slow" and self.paths:
                time.sleep(TAKES_S)
            return super().run()

    monkeypatch.setattr(catch_up_planner, "MergeJob", SlowJob)
    monkeypatch.setattr(merge_rounds, "MergeJob", SlowJob)


def move(replicated: InProcess, number: int) -> None:
    """The sum over both tables stays; only whole transactions keep it."""
    execute(
        replicated.dsn,
        f"begin; update slow set v = v - {number} where id = 1;"
        f" update quick set v = v + {number} where id = 1; commit",
    )


def test_no_table_waits_for_the_merge_of_another(replicated, slow):
    with replicated.replicating() as running:
        running.wait_for(replicated.source_lsn())
        execute(replicated.dsn, "update slow set v = 1 where id = 2")
        wait_until(lambda: running.applier._rounds.is_running)
        began, positions = time.monotonic(), []
        while time.monotonic() < began + TAKES_S / 2:
            before = replicated.position(QUICK)
            execute(replicated.dsn, "update quick set v = v + 1 where id = 2")
            wait_until(lambda before=before: replicated.position(QUICK) > before)
            positions.append(replicated.position(QUICK))
        assert len(positions) >= 2
        assert replicated.position(SLOW) < positions[0]
        running.wait_for(replicated.source_lsn())
    replicated.assert_equal(*TABLES)


def test_points_show_whole_transactions_though_one_table_is_slow(replicated, slow):
    with replicated.replicating() as running:
        running.wait_for(replicated.source_lsn())
        for number in range(1, 30):
            move(replicated, number)
            time.sleep(0.5)
        running.wait_for(replicated.source_lsn())
    replicated.assert_equal(*TABLES)
    totals = [row["total"] for row in replicated.at_every_point(SUM, *TABLES)]
    assert set(totals) == {200}
    lsns = [point.lsn for point in Points(replicated.pipeline.lake_root).all()]
    assert len(lsns) >= 4, "there are points while the slow table is merged again and again"


def test_a_table_over_its_budget_waits_and_the_points_bring_it_along(replicated):
    replicated.configure(per_table={SLOW: {"freshness_s": 30.0}}, points_every_s=2.0)
    with replicated.replicating() as running:
        running.wait_for(replicated.source_lsn())
        move(replicated, 1)
        running.wait_for(replicated.source_lsn())
        began = time.monotonic()
        move(replicated, 2)
        running.wait_for(replicated.source_lsn())
        assert time.monotonic() - began < 25, "a boundary does not wait for the table's turn"
    replicated.assert_equal(*TABLES)
    assert {row["total"] for row in replicated.at_every_point(SUM, *TABLES)} == {200}
