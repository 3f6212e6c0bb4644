"""The replication app as a whole, in the test's process: what it reports of the lake."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from airflow_provider_pgrepl.replication.app import progress_writer
from airflow_provider_pgrepl.replication.app.applied import read_applied
from airflow_provider_pgrepl.replication.app.status import summary
from tests.support.in_process import InProcess
from tests.support.replicated import execute, wait_until
from tests.support.sessions import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

A, B = "public.a", "public.b"


def run_until_done(pipeline: InProcess, work: Callable[[], None]) -> None:
    """Run the replication app while `work` runs in a thread, and ask it to end as Airflow does."""
    failed: list[BaseException] = []

    def act() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    # If the app has ended by itself, the signal must not end the tests.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    thread = threading.Thread(target=act)
    try:
        thread.start()
        code = pipeline.run("replicate")
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)
    if failed:
        raise failed[0]
    assert code == 0, pipeline.log_tail()


def test_lake_has_every_transaction_up_to_the_time_that_the_app_reports(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PgAppliedSensor starts DAGs by this time."""
    execute(dsn, "create table a (id int primary key)", "create table b (id int primary key)")
    pipeline = InProcess(spark, dsn, tmp_path, (A, B), merge_interval_s=0.5)
    pipeline.snapshot()
    # A reading does not wait until the lake has what was in the WAL then: an earlier one is answered.
    monkeypatch.setattr(summary, "_ANSWER_S", 0.0)
    monkeypatch.setattr(summary, "INTERVAL_S", 0.1)
    monkeypatch.setattr(progress_writer, "_INTERVAL_S", 0.1)
    committed, over = list[tuple[int, datetime]](), threading.Event()

    def write() -> None:
        with session(dsn) as connection, connection.cursor() as cursor:
            for number in range(1_000_000):
                cursor.execute(
                    f"begin; insert into a values ({number}); insert into b values ({number}); commit"
                )
                cursor.execute("select clock_timestamp()")
                committed.append((number, cursor.fetchone()[0]))  # type: ignore[index]
                if over.wait(0.02):
                    return

    def complete_at() -> datetime | None:
        return read_applied(dsn, pipeline.pipeline.name).complete_at

    def work() -> None:
        writing = threading.Thread(target=write)
        writing.start()
        try:
            seen = None
            for _ in range(10):
                wait_until(lambda: complete_at() not in (None, seen), what="another time")  # noqa: B023
                seen = complete_at()
                assert seen is not None
                wanted = {number for number, at in list(committed) if at <= seen}
                for table in (A, B):
                    assert wanted <= set(pipeline.lake_rows(table)["id"].to_pylist())
            assert len(wanted) > 10
        finally:
            over.set()
            writing.join()

    run_until_done(pipeline, work)
    pipeline.catch_up()
    pipeline.assert_equal(A, B)
