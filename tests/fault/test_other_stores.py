"""A lake in a store of Google's, and in one of Azure's: whole as on a disk, after a kill, and maintained."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.maintain import maintain
from airflow_provider_pgrepl.replication.lake.read import consistent_arrow
from tests.support.in_process import InProcess
from tests.support.replicated import execute, kill, wait_for_end
from tests.support.traffic import INSERT_ONLY, SETUP, TABLES, traffic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DYING = Path(__file__).with_name("dying.py")


@pytest.fixture
def replicated(spark: SparkSession, other_lake: str, dsn: str, tmp_path: Path) -> InProcess:
    execute(dsn, *SETUP)
    return InProcess(
        spark, dsn, tmp_path, TABLES, lake=other_lake, insert_only=INSERT_ONLY, merge="merge_on_read"
    )


@pytest.mark.real_kill
def test_lake_in_other_store_equals_source_after_kill_and_maintenance(replicated, dsn, monkeypatch):
    replicated.snapshot()
    with traffic(dsn, 1) as writing:
        writing.wait_for_more(40)
        monkeypatch.setenv("PGREPL_TEST_POINT", "rows marked and committed")
        process = replicated.start("replicate", "replicate", script=DYING)
        try:
            assert wait_for_end(process) == -signal.SIGKILL, replicated.log_tail()
        finally:
            kill(process)
        writing.wait_for_more(10)
        execute(dsn, "alter table accounts add column remark text")
        writing.wait_for_more(10)
    replicated.catch_up()
    replicated.assert_equal(*TABLES)
    view = consistent_arrow(replicated.pipeline.lake_root)
    assert view.table("public.accounts").num_rows == replicated.lake_rows("public.accounts").num_rows
    maintain(Access(replicated.pipeline, dsn, dsn), wait=lambda _: False)
    replicated.assert_equal(*TABLES)
