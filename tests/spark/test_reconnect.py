"""The replication app outlives its connections to the source."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from airflow_provider_pgrepl.replication.app import process
from tests.conftest import closing_connection
from tests.support.in_process import InProcess
from tests.support.replicated import execute, wait_until


def end_all_connections(dsn: str) -> None:
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and application_name like 'pgrepl %'"
        )


def test_the_app_goes_on_when_the_server_ends_all_its_connections(spark, dsn: str, tmp_path: Path) -> None:
    execute(dsn, "create table t(id int primary key, v text)")
    replicated = InProcess(spark, dsn, tmp_path, ("public.t",))
    replicated.snapshot()
    failed: list[BaseException] = []

    def write_and_disturb() -> None:
        try:
            for n in range(2):
                execute(dsn, f"insert into t select {n} * 100 + g, 'x' from generate_series(0, 99) g")
                # The server names a reader of the slot before its stream has begun.
                wait_until(lambda: "receiving from slot" in replicated.log.read_text(), what="the stream")
                wait_until(lambda: replicated.slot().active_pid, what="the receiver")
                end_all_connections(dsn)
                execute(dsn, f"update t set v = 'y{n}'")
                wait_until(lambda: not replicated.differences("public.t"), what="the lake to be equal")
        except BaseException as error:
            failed.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    disturber = threading.Thread(target=write_and_disturb)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        disturber.start()
        code = replicated.run("replicate")
        disturber.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not failed, failed
    assert code == process.DONE, replicated.log_tail()
    replicated.assert_equal("public.t")
    log = replicated.log.read_text()
    assert log.count("connecting again") >= 2
    assert len(log.splitlines()) < 150
