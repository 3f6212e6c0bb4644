"""SIGTERM ends an app whatever it waits for."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.support.replicated import wait_until

APP = """
import sys, psycopg2
from airflow_provider_pgrepl.replication.app.process import StopSignal
connection = psycopg2.connect(sys.argv[1])
with StopSignal(limit_s=float(sys.argv[2])) as stop:
    print("waiting", flush=True)
    if sys.argv[3] == "in a library":
        connection.cursor().execute("select pg_sleep(600)")
    while not stop.wait(0.1):
        pass
print("ended in order", flush=True)
"""


def start(dsn: str, limit_s: float, where: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", APP, dsn, str(limit_s), where]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    return process


def test_one_that_waits_in_a_library_is_ended_when_its_time_is_over(dsn, pg):
    process = start(dsn, 1.0, "in a library")
    with pg.cursor() as cursor:

        def is_asked() -> bool:
            cursor.execute(
                "select 1 from pg_stat_activity where query like '%pg_sleep(600)' and state = 'active'"
            )
            return bool(cursor.fetchone())

        wait_until(is_asked)
    process.send_signal(signal.SIGTERM)
    assert process.wait(150) == 75


def test_one_that_ends_in_time_ends_in_order(dsn):
    process = start(dsn, 120.0, "in a loop")
    process.send_signal(signal.SIGTERM)
    assert process.wait(150) == 0
    assert process.stdout is not None
    assert process.stdout.read() == "ended in order\n"
