"""Random tables of random types under random transactions, with PostgreSQL as the oracle.

Whatever stops or breaks meanwhile, the lake comes to equal the source, and what the source showed at any LSN
can be read back.

PGREPL_SEEDS sets how many seeds are tried, PGREPL_FIRST_SEED the first of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import PgReplError, Retry
from airflow_provider_pgrepl.replication.changelog.messages import read_messages
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import arrow_view_as_of
from tests.support.in_process import InProcess, Running
from tests.support.partitioned import check_partitions
from tests.support.random_oracle import difference, lake_rows
from tests.support.random_tables import Table, random_tables, statements
from tests.support.random_workload import Workload
from tests.support.replicated import execute, wait_until

FIRST_SEED = int(os.environ.get("PGREPL_FIRST_SEED", "1"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("PGREPL_SEEDS", "2")))


WHOLE = ("boolean", "integer", "text", "varchar(20)", "date", "uuid", "public.mood")


class BreakageError(Exception):
    """An error that a test raises on purpose."""


@contextmanager
def broken(chance: random.Random, owner: Any, name: str, *, after: bool) -> Iterator[None]:
    """Let the method fail at times during the block, before or after it has done its work."""
    real = getattr(owner, name)

    def failing(*arguments: Any, **named: Any) -> Any:
        if after:
            real(*arguments, **named)
        if chance.random() < 0.4:
            raise BreakageError
        return None if after else real(*arguments, **named)

    setattr(owner, name, failing)
    try:
        yield
    finally:
        setattr(owner, name, real)


def partition_by(table: Table, chance: random.Random) -> str | None:
    """Return a column or a unit of one to partition a table by, or, less often, None."""
    whole = [column.sql for column in table.columns if column.type.sql in WHOLE]
    dated = [column.sql for column in table.columns if column.type.sql.startswith(("date", "timestamp"))]
    units = [f"{chance.choice(('year', 'month', 'day'))}({sql})" for sql in dated]
    return chance.choice([*whole, *units]) if (whole or units) and chance.random() < 0.7 else None


class Ordeal:
    """One pipeline under one seed."""

    def __init__(self, seed: int, spark: Any, dsn: str, folder: Path) -> None:
        self.chance = chance = random.Random(seed)
        self.tables = random_tables(chance, chance.randint(3, 5))
        execute(dsn, *statements(self.tables))
        self.names = tuple(table.sql for table in self.tables)
        self.replicated = InProcess(
            spark,
            dsn,
            folder,
            self.names,
            insert_only=tuple(table.sql for table in self.tables if table.kind == "insert only"),
            flush_interval_s=chance.choice((0.05, 0.1, 0.3)),
            part_bytes=chance.choice((1 << 10, 1 << 14, 1 << 20)),
            batch_bytes=chance.choice((1 << 14, 1 << 24)),
            slice_bytes=chance.choice((1, 1 << 12, 1 << 24)),
            snapshot_range_bytes=chance.choice((8192, 1 << 20)),
            merge=chance.choice(("auto", "rewrite", "merge_on_read", "merge_on_read")),
            per_table={table.sql: {"partition_by": partition_by(table, chance)} for table in self.tables},
        )
        self.workload = Workload(dsn, self.tables, seed)

    def run(self) -> None:
        workload, chance = self.workload, self.chance
        workload.run(chance.randint(0, 200))
        with workload.running():
            workload.allow(300)
            self.replicated.snapshot()
            self.messages_before = len(workload.messages)
            for _ in range(chance.randint(1, 3)):
                self._phase()
            workload.wait_for_more(50)
        workload.end()
        wait_until(self._has_caught_up)

    def _has_caught_up(self) -> bool:
        """Return True if a run catches up; at first, work that a cut batch left running may block it."""
        code = self.replicated.run("replicate", "--until", "caught-up")
        assert code in (0, 75), self.replicated.log_tail()
        return code == 0

    def _phase(self) -> None:
        ends: list[Callable[[], None]] = [self._stop, self._lose_the_source, self._stop_amid_a_batch]
        for owner, name in ((ChangelogWriter, "append"), (ConsistentPoints, "append")):
            for after in (False, True):
                ends.append(lambda owner=owner, name=name, after=after: self._break(owner, name, after=after))
        self.chance.choice(ends)()
        if self.chance.random() < 0.2:
            self._resnapshot()

    def _resnapshot(self) -> None:
        self.workload.allow(100)
        self.replicated.resnapshot(self.chance.choice(self.names))

    def _stop(self) -> None:
        with self._replicating() as running:
            self.workload.wait_for_more(self.chance.randint(10, 150))
            if self.chance.random() < 0.3:
                self._resnapshot()
            running.wait_for(self.replicated.source_lsn())

    def _lose_the_source(self) -> None:
        with self._replicating() as running:
            self.workload.wait_for_more(self.chance.randint(10, 150))
            execute(
                self.replicated.dsn,
                "select pg_terminate_backend(active_pid) from pg_replication_slots"
                f" where slot_name = '{self.replicated.pipeline.slot}' and active",
            )
            running.receiver.failed.wait(30)

    def _stop_amid_a_batch(self) -> None:
        with self._replicating() as running:
            self.workload.wait_for_more(self.chance.randint(10, 150))
            running.applier.stop()

    def _break(self, owner: Any, name: str, *, after: bool) -> None:
        with broken(self.chance, owner, name, after=after), self._replicating() as running:
            for _ in range(50):
                self.workload.wait_for_more(10)
                if running.receiver.error or running.applier.error:
                    break

    @contextmanager
    def _replicating(self) -> Iterator[Running]:
        """Replicate during the block; an error for which a retry may help ends the run quietly."""
        try:
            with self.replicated.replicating() as running:
                yield running
        except BreakageError:
            pass
        except PgReplError as error:
            if error.retry is not Retry.TIMED:
                raise

    def assert_equal(self) -> None:
        with self.replicated.source() as source:
            last = self.workload.moments[-1]
            for table in self.tables:
                lake = lake_rows(source, table, self.replicated.lake_rows(table.sql))
                assert difference(last.rows[table.name], lake) == {}, f"{table}"

    def assert_partitioned(self) -> None:
        for name, record in self.replicated.states().items():
            options = self.replicated.pipeline.options(record.table)
            check_partitions(self.replicated.lake_path(name), record.relation, options)

    def assert_past_can_be_read(self, most: int = 8) -> None:
        """Compare the lake with what the source showed at up to `most` recorded LSNs.

        Each table is compared from the first point that names it.
        """
        first: dict[str, int] = {}
        for point in ConsistentPoints(self.replicated.pipeline.lake_root).all():
            first = dict.fromkeys(point.tables, point.lsn) | first
        # An LSN includes what committed at or before it. A commit record may begin right at a recorded LSN.
        moments = [moment for moment in self.workload.moments if moment.lsn > min(first.values())]
        with self.replicated.source() as source:
            for moment in self.chance.sample(moments, min(most, len(moments))):
                view = arrow_view_as_of(self.replicated.pipeline, lsn=moment.lsn - 1)
                for table in self.tables:
                    if first[table.sql] < moment.lsn:
                        lake = lake_rows(source, table, view.table(table.sql))
                        assert difference(moment.rows[table.name], lake) == {}, f"{moment.lsn}: {table}"

    def assert_messages_kept(self) -> None:
        kept = read_messages(self.replicated.pipeline, prefix="random")["content"].to_pylist()
        sent = self.workload.messages
        # Messages from before the slot was created are not received.
        assert kept == sent[len(sent) - len(kept) :]
        assert len(kept) >= len(sent) - self.messages_before


@pytest.mark.thorough("spark/test_streaming_scenarios, test_invariants, test_put_back: by themselves")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_lake_comes_to_equal_the_source(seed, spark, dsn, tmp_path):
    ordeal = Ordeal(seed, spark, dsn, tmp_path)
    ordeal.run()
    ordeal.assert_equal()
    ordeal.assert_partitioned()
    ordeal.assert_past_can_be_read()
    ordeal.assert_messages_kept()
