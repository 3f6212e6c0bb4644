"""Tables that are altered under an app which is killed at random times, while the catalog is checked.

PGREPL_SEEDS sets how many seeds are tried, PGREPL_FIRST_SEED the first of them.
"""

from __future__ import annotations

import os
import random
import subprocess

import pytest

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.in_process import InProcess
from tests.support.random_ddl import Following, ShiftingTables, lake_difference
from tests.support.replicated import execute, kill, wait_until

FIRST_SEED = int(os.environ.get("PGREPL_FIRST_SEED", "1"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("PGREPL_SEEDS", "1")))


class Ordeal:
    """A pipeline, its tables, and what happens to both."""

    def __init__(self, spark, dsn, folder, seed: int) -> None:
        self.chance = random.Random(seed)
        self.shifting = ShiftingTables.make(dsn, self.chance)
        self.replicated = InProcess(spark, dsn, folder, self.shifting.names)
        self.access = Access(self.replicated.pipeline, dsn, dsn)

    def run_until_killed(self) -> None:
        seen = len(self.replicated.log.read_bytes())
        process = self.replicated.start("replicate")
        try:
            wait_until(lambda: b"receiving from slot" in self.replicated.log.read_bytes()[seen:])
            for _ in range(6):
                self.shifting.take_steps(2)
                if self.chance.random() < 0.5:
                    self.wait_until_received(process)
                if self.chance.random() < 0.3:
                    check_drift(self.access)
        finally:
            kill(process)
        self.shifting.take_steps(self.chance.randint(0, 5))

    def wait_until_received(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until what was done is durable, or the app has ended by itself."""
        done = self.replicated.source_lsn()
        execute(self.replicated.dsn, "select pg_logical_emit_message(true, 'done', '')")
        wait_until(lambda: self.replicated.durable_lsn >= done or process.poll() is not None)

    def run_again(self) -> None:
        """Up to what is committed now; errored tables do not keep the others from getting there."""

        def is_done() -> bool:
            code = self.replicated.run("replicate", "--until", "caught-up")
            assert code in (0, 75, 78), self.replicated.log_tail()
            return code != 75

        wait_until(is_done, what="replication to catch up")

    def stopped(self) -> list[str]:
        """Errored tables, which must have had a reason; all others equal the source."""
        check_drift(self.access)
        names, states = [], self.replicated.states()
        for table in self.shifting.tables:
            record = states[table.sql]
            if record.state is TableState.ERRORED:
                assert record.error
                assert record.reason
                assert record.hint
                assert table.following is not Following.SURELY, (record.reason, table.said)
                names.append(table.sql)
            else:
                assert record.state is TableState.STREAMING
                assert lake_difference(self.replicated, table) == {}, table.said
        return names


@pytest.mark.real_kill
@pytest.mark.thorough("integration/test_evolution.py, and test_kill.py")
@pytest.mark.parametrize("seed", SEEDS)
def test_altered_tables_equal_the_source_or_say_why_they_stopped_though_the_app_is_killed(
    seed, spark, dsn, tmp_path
):
    ordeal = Ordeal(spark, dsn, tmp_path, seed)
    ordeal.shifting.take_steps(10, quietly=True)
    ordeal.replicated.snapshot()
    for _ in range(2):
        ordeal.run_until_killed()
    ordeal.shifting.insert_new()
    ordeal.run_again()
    stopped = ordeal.stopped()
    if stopped:
        # Without it the keyless one cannot be taken at all.
        execute(dsn, *(f"alter table {name} replica identity full" for name in stopped))
        ordeal.replicated.snapshot("--tables", ",".join(stopped))
        for table in ordeal.shifting.tables:
            if table.sql in stopped:
                table.forget_ddl()
    ordeal.shifting.take_steps(5, quietly=True)
    ordeal.run_again()
    assert ordeal.stopped() == []
