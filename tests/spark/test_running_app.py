"""The replication app as a whole, in the test's process: what it reports of the lake, and what it deletes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_pgrepl.replication.app import progress_writer
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.applied import read_applied
from airflow_provider_pgrepl.replication.app.operations.tables import pause_tables, resume_tables
from airflow_provider_pgrepl.replication.app.status import summary
from airflow_provider_pgrepl.replication.changelog.maintenance import DroppedHours, drop_expired
from airflow_provider_pgrepl.replication.changelog.reader import live_files, open_changelog, read_epoch
from airflow_provider_pgrepl.replication.lake import maintenance
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
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


def begun(spark: SparkSession, dsn: str, folder: Path, **options: Any) -> InProcess:
    """Return a pipeline of two empty tables, which are copied."""
    execute(dsn, "create table a (id int primary key)", "create table b (id int primary key)")
    pipeline = InProcess(spark, dsn, folder, (A, B), **options)
    pipeline.snapshot()
    return pipeline


def test_lake_has_every_transaction_up_to_the_time_that_the_app_reports(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PgAppliedSensor starts DAGs by this time."""
    pipeline = begun(spark, dsn, tmp_path, merge_interval_s=0.5)
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


def test_app_deletes_changes_only_once_every_table_has_them(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = begun(spark, dsn, tmp_path, maintenance_interval_s=0.1)
    access, runs = Access(pipeline.pipeline, dsn, dsn), list[datetime]()

    def drop_as_if_a_year_later(root: str, hours: float, needed: Any, now: datetime) -> DroppedHours:
        try:
            return drop_expired(root, hours, needed, now + timedelta(days=365))
        finally:
            runs.append(now)

    def files_above(lsn: LSN) -> set[str]:
        record = read_epoch(pipeline.changelog)
        return {file.path for file in live_files(open_changelog(pipeline.changelog), record.epoch, lsn)}

    def source_may_send_again_below(lsn: LSN) -> bool:
        with session(dsn) as connection, connection.cursor() as cursor:
            # The slot moves on with a record that a checkpoint writes.
            cursor.execute("checkpoint")
            cursor.execute(
                "select restart_lsn <= %s::pg_lsn from pg_replication_slots where slot_name = %s",
                (str(lsn), pipeline.pipeline.slot),
            )
            return bool(cursor.fetchone() == (True,))

    def work() -> None:
        pause_tables(access, [B])
        before = pipeline.source_lsn()
        execute(dsn, "begin; insert into a values (1); insert into b values (1); commit")
        after = pipeline.source_lsn()
        wait_until(lambda: pipeline.lake_rows(A).num_rows, what="the change of a")
        wait_until(lambda: not source_may_send_again_below(after), what="the slot to move on")
        wanted = len(runs) + 3
        wait_until(lambda: len(runs) > wanted, what="maintenance")
        changes = files_above(before)
        assert changes
        resume_tables(access, [B])
        wait_until(lambda: not changes & files_above(before), what="the changes to be deleted")
        assert pipeline.lake_rows(B).num_rows == 1

    monkeypatch.setattr(maintenance, "drop_expired", drop_as_if_a_year_later)
    run_until_done(pipeline, work)
    pipeline.catch_up()
    pipeline.assert_equal(A, B)
