"""Apps that start at once on one host, as commands. tests/unit/test_start_queue.py has the queue."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from airflow_provider_pgrepl.replication.runtime.start_queue import StartTurn, start_slots
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.in_process import InProcess
from tests.support.replicated import ROOT, Replicated, execute, kill, wait_until


@pytest.mark.slow
@pytest.mark.thorough("unit/test_start_queue.py shows that starts of processes do not overlap")
def test_three_replications_started_at_once_queue_and_all_stream(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(dsn, *(f"create table t{number} (id int primary key)" for number in range(3)))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    queue = tmp_path / "tmp" / f"pgrepl-{os.geteuid()}"
    queue.mkdir(parents=True, mode=0o700)
    pipelines: list[Replicated] = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        pipelines.append(InProcess(spark, dsn, folder, (f"public.t{number}",), name=f"p{number}"))
        pipelines[-1].snapshot()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with contextlib.ExitStack() as starting:
            for _ in range(start_slots()):
                starting.enter_context(StartTurn("replicate busy", folder=queue))
            processes += [replicate(pipeline) for pipeline in pipelines]
            for pipeline in pipelines:
                wait_until(lambda one=pipeline: "waiting for the start of replicate busy" in one.log_tail())
        with StateDatabase(dsn, "test") as state_db:

            def states(pipeline: Replicated) -> set[TableState]:
                assert all(process.poll() is None for process in processes), pipeline.log_tail()
                return {one.state for one in state_db.read_conditions(pipeline.pipeline.name).values()}

            for pipeline in pipelines:
                wait_until(lambda one=pipeline: states(one) == {TableState.STREAMING}, 600)
    finally:
        for process in processes:
            kill(process)


def replicate(pipeline: Replicated) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "airflow_provider_pgrepl", "replicate", str(pipeline.file)]
    env = {**os.environ, "PGREPL_DSN": pipeline.dsn, "PYTHONPATH": str(ROOT)}
    with pipeline.log.open("ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
