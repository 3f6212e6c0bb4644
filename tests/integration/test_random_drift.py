"""Random DDL, safe and unsafe, among random rows: a table equals the source, or says why it stopped.

A receiver sees each DDL at once, or much later when many have followed; the catalog is compared at random
times, as the drift sensor does. A table that stopped is resnapshotted, and equals the source again.

PGREPL_SEEDS sets how many seeds are tried, PGREPL_FIRST_SEED the first of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError, TableError
from airflow_provider_pgrepl.replication.changelog.relation_index import (
    EffectiveFrom,
    RelationIndex,
    relations_uri,
)
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift import DriftKind
from airflow_provider_pgrepl.replication.drift.judge import compare_catalog
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableContext, bring_forward
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import RELATION_APP, app_id, open_table
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import write_range
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source import publication
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation, read_relation
from airflow_provider_pgrepl.replication.source.copy.copy_stream import plan_ranges
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.values import lake_schema, partitioning
from tests.conftest import closing_connection
from tests.support.partitioned import check_partitions
from tests.support.random_ddl import Following, Shifting, ShiftingTables, lake_difference
from tests.support.random_partitions import Partitioned
from tests.support.received import Received, wait_until_seen
from tests.support.replicated import execute

FIRST_SEED = int(os.environ.get("PGREPL_FIRST_SEED", "1"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("PGREPL_SEEDS", "4")))


class Drifting(Received):
    """A pipeline without Spark over tables that change their shape."""

    def __init__(self, seed: int, dsn: str, folder: Path, *, has_trigger: bool) -> None:
        self.chance = random.Random(seed)
        self.shifting = ShiftingTables.make(dsn, self.chance, Partitioned("whole", self.chance))
        self.tables = self.shifting.tables
        super().__init__(dsn, folder, self.shifting.names, flush_interval_s=0.02, event_trigger=has_trigger)
        self.copied: dict[str, Relation] = {}
        self.errors: dict[str, str] = {}

    def run(self, steps: int) -> None:
        """Take random DDL steps, and apply and compare at times. The seed decides the order."""
        self.shifting.take_steps(10, quietly=True)
        position = LSN(self.begin() - 1)
        if self.pipeline.event_trigger:
            with self.source() as source:
                trigger.install(source, self.pipeline)
        for table in self.tables:
            self.copy(table, position)
        while steps > 0:
            share = self.chance.randint(1, 12)
            steps -= share
            with self._looking_on() if self.chance.random() < 0.6 else nullcontext():
                self.shifting.take_steps(share)
            if self.chance.random() < 0.7:
                self.apply()
            if self.chance.random() < 0.2:
                self.compare_catalogs()

    @contextmanager
    def _looking_on(self) -> Iterator[None]:
        with self.receiving() as receiver:
            yield
            wait_until_seen(receiver, self.source_lsn())

    def copy(self, table: Shifting, position: LSN) -> None:
        """Copy a table while no session writes to it."""
        with self.source() as source:
            watching = trigger.read_watching(source, self.pipeline)
        with closing_connection(self.dsn) as keeper, keeper.cursor() as cursor:
            cursor.execute("begin isolation level repeatable read read only")
            cursor.execute("select pg_export_snapshot()")
            snapshot = cursor.fetchone()[0]
            relation = find_relation(keeper, TableName.parse(table.sql), self.pipeline.publication)
            assert relation is not None
            ranges = plan_ranges(keeper, relation, 1 << 40)
            now = self._now(cursor)
            self._partition(relation)
            options, root = self.pipeline.options(relation.table), self.pipeline.lake_root
            files = [
                file
                for part in ranges
                for file in write_range(self.dsn, snapshot, part, relation, options, root, position, now)
            ]
        record = RelationRecord.of_catalog(relation)
        place = None if watching is None else EffectiveFrom(position, watching)
        RelationIndex(relations_uri(self.pipeline.lake_root)).add(Epoch(1), record, place)
        commit_snapshot(
            self.lake_path(table.sql),
            lake_schema(relation, options),
            files,
            position,
            self.pipeline.name,
            Epoch(1),
            now,
            record.version,
        )
        self.copied[table.name] = relation
        self.errors.pop(table.name, None)
        table.forget_ddl()

    def _partition(self, relation: Relation) -> None:
        """Set the table's `partition_by` to a random column that can be used, or to none."""
        forms = [shown for c in relation.columns for shown in (c.name, f"month({c.name})", f"day({c.name})")]
        usable = [by for by in forms if not self._is_refused(relation, by)]
        by = self.chance.choice(usable) if usable and self.chance.random() < 0.6 else None
        self.configure(per_table={**self.pipeline.per_table, str(relation.table): {"partition_by": by}})

    def _is_refused(self, relation: Relation, by: str) -> bool:
        try:
            options = replace(self.pipeline, per_table={str(relation.table): {"partition_by": by}})
            partitioning(relation, options.options(relation.table))
        except (ConfigError, TableError):
            return True
        return False

    def _now(self, cursor: Any) -> Any:
        cursor.execute("select now()")
        return cursor.fetchone()[0]

    def apply(self) -> None:
        """Receive what was committed, and apply it to each table that has not stopped."""
        self.receive()
        paths = [file.path for file in self.changelog_files()]
        for table in self.tables:
            if table.name in self.errors:
                continue
            relation, pipeline = self.copied[table.name], self.pipeline
            work = TableContext(
                relation,
                pipeline.options(relation.table),
                app_id(pipeline.name, Epoch(1)),
                pipeline.lake_root,
                pipeline.slice_bytes,
            )
            if self.chance.random() < 0.3:
                work.close()
            result = bring_forward(work, paths, self.durable_lsn)
            if result.error is not None:
                self._stop(table, result.error)

    def compare_catalogs(self) -> None:
        """Compare the tables with the catalog, and stop those with unsafe drift, as the drift sensor does."""
        index = RelationIndex(relations_uri(self.pipeline.lake_root))
        with self.source() as source:
            for table in self.tables:
                if table.name in self.errors:
                    continue
                version = open_table(self.lake_path(table.sql)).transaction_version(RELATION_APP)
                record = index.find_version(version)
                assert record is not None
                assert record.catalog is not None
                recorded = record.catalog
                current = read_relation(source, recorded.oid, self.pipeline.publication)
                verdict = compare_catalog(recorded, current, self.pipeline.options(recorded.table))
                if verdict.kind is DriftKind.UNSAFE:
                    assert verdict.hint
                    self._stop(table, verdict.reason)

    def _stop(self, table: Shifting, reason: str) -> None:
        assert reason
        assert not reason.startswith("unexpected"), (reason, table.said)
        is_of_partitions = reason.startswith("partition_by names column")
        assert is_of_partitions or table.following is not Following.SURELY, (reason, table.said)
        self.errors[table.name] = reason

    def assert_equal_or_stopped(self) -> None:
        self.shifting.insert_new()
        self.apply()
        self.compare_catalogs()
        for table in self.tables:
            if table.name not in self.errors:
                assert lake_difference(self, table) == {}, table.said
                self._check_partitions(table)

    def _check_partitions(self, table: Shifting) -> None:
        lake = open_table(self.lake_path(table.sql))
        version = lake.transaction_version(RELATION_APP)
        record = RelationIndex(relations_uri(self.pipeline.lake_root)).find_version(version)
        relation = record.catalog
        check_partitions(self.lake_path(table.sql), relation, self.pipeline.options(relation.table))

    def resnapshot_stopped_tables(self) -> None:
        stopped = [table for table in self.tables if table.name in self.errors]
        for table in stopped:
            execute(self.dsn, *table.fixing_statements())
            with self.source() as source:
                found = find_relation(source, TableName.parse(table.sql), self.pipeline.publication)
                assert found is not None
                publication.add_tables(self.dsn, self.pipeline.publication, [found], 10)
            # As a slot's snapshot would: it sees all that was done until now.
            self.copy(table, self.source_lsn())
        for table in self.tables:
            assert lake_difference(self, table) == {}, table.said


@pytest.mark.differs_by_major(
    "catalogs differ: column lists and schemas in publications since 15, generated columns in them since 18;"
    " before 15 walsenders hear less of DDL",
    since=(15, 18),
)
@pytest.mark.parametrize(
    "has_trigger",
    [
        False,
        True,
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.thorough("unit/test_drift_of_random_ddl; test_evolution, test_event_trigger")
def test_a_table_equals_the_source_or_says_why_it_stopped(seed, dsn, tmp_path, has_trigger):
    drifting = Drifting(seed, dsn, tmp_path, has_trigger=has_trigger)
    drifting.run(steps=40)
    drifting.assert_equal_or_stopped()
    drifting.resnapshot_stopped_tables()
    drifting.shifting.take_steps(10, quietly=True)
    drifting.assert_equal_or_stopped()
