"""A lake in a store of Google's, and in one of Azure's: whole as on a disk, after a kill, and maintained."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.maintain import maintain
from airflow_provider_pgrepl.replication.lake.read import consistent_arrow
from tests.support.replicated import Replicated, execute, kill
from tests.support.traffic import INSERT_ONLY, SETUP, TABLES, traffic

DYING = Path(__file__).with_name("dying.py")


@pytest.fixture
def replicated(other_lake: str, dsn: str, tmp_path: Path) -> Replicated:
    execute(dsn, *SETUP)
    return Replicated(dsn, tmp_path, TABLES, lake=other_lake, insert_only=INSERT_ONLY, merge="merge_on_read")


def test_a_stream_that_is_killed_and_run_again(replicated, dsn, monkeypatch):
    replicated.snapshot()
    with traffic(dsn, 1) as writing:
        writing.wait_for_more(40)
        monkeypatch.setenv("PGREPL_TEST_POINT", "rows marked and committed")
        process = replicated.start("replicate", "replicate", script=DYING)
        try:
            assert process.wait(120) == -signal.SIGKILL, replicated.log_tail()
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
