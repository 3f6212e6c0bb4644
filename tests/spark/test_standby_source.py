"""A standby as the source, with the publication of its primary and the state in another database."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import running_server
from tests.spark.test_verify import Verified
from tests.support.replicated import execute
from tests.support.standby import PHYSICAL_SLOT, promote, silent, standby_of
from tests.support.traffic import INSERT_ONLY, SETUP, TABLES, traffic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.thorough("spark/test_verify.py: the same with a primary")


def test_pipeline_reads_from_standby_and_is_resynced_when_it_is_promoted(
    spark: SparkSession,
    dsn: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGREPL_STATE_DSN", dsn)
    feedback = {"hot_standby_feedback": "on", "primary_slot_name": PHYSICAL_SLOT}
    with ExitStack() as stack:
        primary = stack.enter_context(running_server(18))
        execute(primary.dsn(), f"select pg_create_physical_replication_slot('{PHYSICAL_SLOT}')")
        standby = stack.enter_context(standby_of(primary, **feedback))
        execute(primary.dsn(), *SETUP, f"create publication ours for table {', '.join(TABLES)}")
        pipeline = Verified(
            spark,
            standby.dsn(),
            tmp_path,
            TABLES,
            insert_only=INSERT_ONLY,
            publication="ours",
            publication_mode="use",
        )
        monkeypatch.setenv("PGREPL_PRIMARY_DSN", primary.dsn())
        with silent(primary):
            with traffic(primary.dsn(), 1) as writing:
                writing.wait_for_more(10)
                pipeline.snapshot()
                writing.wait_for_more(20)
            pipeline.catch_up()
            code, found = pipeline.verify(capsys)
        assert code == 0, found
        promote(standby)
        with traffic(standby.dsn(), 2) as writing:
            writing.wait_for_more(20)
            # A standby keeps no token that would distinguish it from other standbys of that primary.
            assert pipeline.run("replicate", "--until", "caught-up") == 78
            assert "the source is on timeline 2" in pipeline.log_tail()
            pipeline.resync()
        pipeline.catch_up()
        code, found = pipeline.verify(capsys)
        assert code == 0, found
