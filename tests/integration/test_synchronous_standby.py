"""A server that takes our walsender for a synchronous standby: we do not wait for ourselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg2
import pytest

from airflow_provider_pgrepl.replication.app.source_problems import source_problems
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.preflight.check import server_warnings
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from demo.postgres import Server
from tests.support.own_server import running_server
from tests.support.received import Received

HANGS_S = 120


@pytest.fixture
def synchronous() -> Iterator[Server]:
    with running_server(synchronous_standby_names="*") as server:
        yield server


@pytest.fixture
def received(synchronous: Server, tmp_path: Path) -> Received:
    """Set up while no standby is there that a commit could wait for."""
    dsn = synchronous.dsn()
    with closing(psycopg2.connect(dsn, options="-c synchronous_commit=local")) as admin:
        admin.autocommit = True
        admin.cursor().execute("create table t (id int primary key); create table unpublished (id int)")
    one = Received(dsn, tmp_path, ("public.t",), flush_interval_s=3600)
    with StateDatabase(dsn, "test") as state_db:
        state_db.migrate()
    one.begin()
    return one


def commit(dsn: str, sql: str) -> threading.Thread:
    """A commit of the application's, which waits for a synchronous standby."""

    def run() -> None:
        with closing(psycopg2.connect(dsn)) as connection:
            connection.autocommit = True
            connection.cursor().execute(sql)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_commits_that_wait_for_the_receiver_are_confirmed_at_once(received):
    with received.receiving():
        for sql in ("insert into t values (1)", "insert into unpublished values (1)"):
            waiting = commit(received.dsn, sql)
            waiting.join(HANGS_S)
            assert not waiting.is_alive(), sql


def test_synchronous_standby_warning_names_setting_and_value_to_set(received):
    with closing(connect(received.dsn, "test")) as source:
        (problem,) = source_problems(source, received.pipeline, {})
        assert problem in list(server_warnings(source, received.pipeline.slot))
    assert "synchronous_standby_names of the source (*) covers this pipeline's walsender" in problem
    assert "ANY 1 (<NAME>, <NAME>)" in problem, "no value that the server would accept"
