"""Repeated maintenance by hand while the replication app runs: no change is lost, and the app continues."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.maintain import MaintenanceReport, maintain
from tests.support.in_process import InProcess
from tests.support.replicated import execute

TABLES = ("public.rewritten", "public.marked", "public.kept")


@pytest.mark.thorough("integration/test_maintain")
def test_a_lake_is_maintained_while_it_is_written(spark, dsn: str, tmp_path: Path) -> None:
    for table in TABLES:
        execute(
            dsn,
            f"create table {table}(id int primary key, v text)",
            f"insert into {table} select g, 'old' from generate_series(1, 200) g",
        )
    options = {
        "public.rewritten": {"merge": "rewrite"},
        "public.marked": {"merge": "merge_on_read"},
        "public.kept": {"merge": "merge_on_read", "history": True},
    }
    replicated = InProcess(spark, dsn, tmp_path, TABLES, per_table=options)
    replicated.snapshot()
    ended, done = threading.Event(), list[MaintenanceReport]()

    def again_and_again() -> None:
        access = Access(replicated.pipeline, dsn, dsn)
        while not ended.is_set():
            done.append(maintain(access, wait=ended.wait))

    with Access(replicated.pipeline, dsn, dsn).state_db("replicate") as app:
        app.lock(replicated.pipeline.name, "replicate")
        with replicated.replicating() as running:
            worker = threading.Thread(target=again_and_again)
            worker.start()
            try:
                for number in range(1, 41):
                    for table in TABLES:
                        execute(dsn, f"update {table} set v = 'n{number}' where id % 40 = {number % 40}")
                    if number % 8 == 0:
                        running.wait_for(replicated.source_lsn())
            finally:
                ended.set()
                worker.join()
            running.wait_for(replicated.source_lsn())
    assert {table: replicated.differences(table) for table in TABLES} == {table: {} for table in TABLES}
    assert all(one.app_runs for one in done if one.rest is not None)
    assert [failure for one in done for failure in one.failures.items()] == []
    assert sum(table.compaction.before != table.compaction.after for one in done for table in one.tables)
