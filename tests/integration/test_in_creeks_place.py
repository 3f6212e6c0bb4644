"""`pgrepl creek`: the process that creek's deployment runs once its image is changed."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from demo.nats import NatsServer
from tests.conftest import closing_connection, fresh_database
from tests.support.jetstream import CreekStream
from tests.support.replicated import execute, wait_until

SLOT = "creek_slot"
OPTIONS = {"trust_table_owners": True, "flush_interval_s": 0.1}
SPARK_S = 400.0
"""Limit of what waits for two sessions of Spark, one after the other, on a busy machine."""


class CreeksPlace:
    def __init__(self, dsn: str, uri: str, folder: Path) -> None:
        self.dsn, self.log = dsn, folder / "creek.log"
        found = psycopg2.extensions.parse_dsn(dsn)
        self.database = found["dbname"]
        self.slot = f"{SLOT}_{self.database}"
        self.lake = folder / "lake"
        self.stream = CreekStream(uri, self.database)
        self.environment = {
            "PG_URI": f"postgres://{found['user']}@{found['host']}:{found['port']}/{self.database}"
            "?pool_max_conns=2",
            "PG_PUBLICATION_NAME": "creek_pub",
            "PG_PUBLICATION_SLOT": self.slot,
            "PG_TABLES": "public.orders",
            "NATS_URI": uri,
            "NATS_TIMEOUT": "30s",
            "PROMETHEUS_PORT": "0",
            "PGREPL_LAKE": str(self.lake),
            # The tests connect as a superuser.
            "PGREPL_PIPELINE_OPTIONS": json.dumps(OPTIONS),
        }

    def with_lake_tables(self) -> None:
        self.environment["PGREPL_PIPELINE_OPTIONS"] = json.dumps({**OPTIONS, "lake_tables": "all"})

    def seen(self) -> list[tuple[str, str, int]]:
        """Table, operation and key of each message."""
        return [
            (one.subject.rpartition(".")[2], one.op, (one.value["after"] or one.value["before"])["id"])
            for one in self.stream.messages()
        ]

    def wait_for(self, *wanted: tuple[str, str, int]) -> None:
        wait_until(lambda: set(wanted) <= set(self.seen()), SPARK_S, f"{wanted}")

    def states(self) -> dict[str, str]:
        with StateDatabase(self.dsn, "look at states") as state_db:
            found = state_db.read_tables(self.slot) if state_db.is_set_up() else {}
        return {str(name): str(record.state) for name, record in found.items()}


@pytest.fixture
def creeks(dsn: str, tmp_path: Path, jetstream: NatsServer) -> Iterator[CreeksPlace]:
    one = CreeksPlace(dsn, jetstream.uri, tmp_path)
    execute(dsn, "create table orders (id int primary key, v text)")
    yield one
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        cursor.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
            " where database = current_database() and not active"
        )


def run_while(one: CreeksPlace, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command in this process, its apps as processes, until `act` is done or has failed."""
    for name, value in one.environment.items():
        monkeypatch.setenv(name, value)
    failures: list[BaseException] = []

    def acting() -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=acting)
    ours, before = logging.getLogger("airflow_provider_pgrepl"), signal.getsignal(signal.SIGTERM)
    handler = logging.FileHandler(one.log)
    ours.addHandler(handler)
    thread.start()
    try:
        code = main(["creek"])
    finally:
        thread.join()
        ours.removeHandler(handler)
        signal.signal(signal.SIGTERM, before)
    if failures:
        raise failures[0]
    return code


def children(word: str, parent: int | None = None) -> list[int]:
    """Return the children of a process, by default this one, whose commands have this word."""
    found = []
    for child in psutil.Process(parent).children():
        with suppress(psutil.NoSuchProcess):
            if word in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


@pytest.mark.real_kill
@pytest.mark.thorough("test_a_first_start_makes_the_publication_and_a_later_one_goes_on")
def test_the_image_is_changed_and_nothing_is_lost_whatever_is_killed(creeks, monkeypatch):
    creeks.with_lake_tables()
    execute(
        creeks.dsn,
        "create publication creek_pub for table orders with (publish_via_partition_root = true)",
        f"select pg_create_logical_replication_slot('{creeks.slot}', 'pgoutput')",
        "insert into orders values (1, 'creek has published it')",
        f"select pg_logical_slot_get_binary_changes('{creeks.slot}', null, null, 'proto_version', '1',"
        " 'publication_names', 'creek_pub')",
        "insert into orders values (2, 'creek was stopped before it came to this')",
        "create table lines (id int primary key)",
        "create table heap (id int)",
    )

    def act() -> None:
        creeks.wait_for(("orders", "c", 2))
        execute(creeks.dsn, "insert into orders values (3)")
        creeks.wait_for(("orders", "c", 3))
        # Its first row is written before the service has looked.
        execute(creeks.dsn, "select _creek.add_table('creek_pub', 'lines')", "insert into lines values (1)")
        creeks.wait_for(("lines", "c", 1))
        wait_until(lambda: creeks.states().get("public.lines") == "streaming", SPARK_S)
        for app in ("publish", "replicate"):
            os.kill(children(f"{app}.py")[0], signal.SIGKILL)
        execute(creeks.dsn, "insert into lines values (2)", "delete from orders where id = 1")
        creeks.wait_for(("lines", "c", 2), ("orders", "d", 1))
        execute(creeks.dsn, "select _creek.remove_table('creek_pub', 'lines')")
        wait_until(lambda: creeks.states()["public.lines"] == "removed", SPARK_S)
        execute(creeks.dsn, "insert into lines values (3)", "insert into orders values (4)")
        creeks.wait_for(("orders", "c", 4))
        assert ("lines", "c", 3) not in creeks.seen()

    assert run_while(creeks, act, monkeypatch) == process.DONE
    assert creeks.seen()[0] == ("orders", "c", 2)
    assert children(".py --pipeline") == []
    said = creeks.log.read_text()
    assert "without effect, as with creek: NATS_TIMEOUT" in said
    assert f"SELECT pg_drop_replication_slot('{creeks.slot}')" in said
    pipeline = Pipeline.read(creeks.lake / "_pgrepl" / "pipeline.json")
    assert pipeline.name == creeks.slot
    assert json.loads(pipeline.to_json())["tables"] == ["public.orders"]


def test_a_first_start_makes_the_publication_and_a_later_one_goes_on(creeks, monkeypatch):
    def first() -> None:
        wait_until(lambda: creeks.states().get("public.orders") == "streaming", SPARK_S)
        execute(creeks.dsn, "insert into orders values (1)")
        creeks.wait_for(("orders", "c", 1))
        # Receiver and publisher are in this very process.
        assert children(".py --pipeline") == []

    assert run_while(creeks, first, monkeypatch) == process.DONE
    assert [path.name for path in creeks.lake.iterdir()] == ["_pgrepl"]
    execute(
        creeks.dsn,
        "create table lines (id int primary key)",
        "select _creek.add_table('creek_pub', 'lines')",
        "insert into lines values (1)",
        "insert into orders values (2)",
    )
    assert run_while(creeks, lambda: creeks.wait_for(("orders", "c", 2), ("lines", "c", 1)), monkeypatch) == 0


def test_other_database_than_the_lakes_gets_no_functions_and_no_publication(
    creeks, server, monkeypatch, capsys
):
    def begin() -> None:
        wait_until(lambda: creeks.states().get("public.orders") == "streaming", SPARK_S)

    assert run_while(creeks, begin, monkeypatch) == process.DONE
    with fresh_database(server) as other, closing_connection(other) as connection:
        cursor = connection.cursor()
        cursor.execute("create table orders (id int primary key, v text)")
        name = psycopg2.extensions.parse_dsn(other)["dbname"]
        monkeypatch.setenv("PG_URI", creeks.environment["PG_URI"].replace(creeks.database, name))
        assert main(["creek"]) == process.WILL_NOT_HELP
        assert (
            f"the lake {creeks.lake} was written from database {creeks.database}" in capsys.readouterr().err
        )
        cursor.execute(
            "select nspname from pg_namespace where nspname ~ '_creek|_pgrepl'"
            " union select pubname from pg_publication"
        )
        assert cursor.fetchall() == []


@pytest.mark.thorough("test_a_first_start_makes_the_publication_and_a_later_one_goes_on")
def test_a_table_that_cannot_be_taken_leaves_the_others_alone(creeks, monkeypatch):
    execute(creeks.dsn, "create table heap (id int)", "create table good (id int primary key)")

    def act() -> None:
        wait_until(lambda: creeks.states().get("public.orders") == "streaming", SPARK_S)
        execute(creeks.dsn, "alter publication creek_pub add table heap, good")
        wait_until(lambda: "public.heap cannot be added" in creeks.log.read_text(), SPARK_S)
        wait_until(lambda: creeks.states().get("public.good") == "streaming", SPARK_S)
        execute(creeks.dsn, "insert into orders values (1)", "insert into good values (1)")
        creeks.wait_for(("orders", "c", 1), ("good", "c", 1))

    def again() -> None:
        wait_until(lambda: "the others go on" in creeks.log.read_text(), SPARK_S)
        execute(creeks.dsn, "insert into orders values (2)", "alter table good rename to better")
        creeks.wait_for(("orders", "c", 2))
        wait_until(lambda: creeks.states().get("public.better") == "streaming", SPARK_S)
        wait_until(lambda: creeks.states().get("public.good") == "removed", SPARK_S)

    assert run_while(creeks, act, monkeypatch) == process.DONE
    assert run_while(creeks, again, monkeypatch) == process.DONE


@pytest.mark.thorough("the other tests of this file")
def test_another_deployment_leaves_this_ones_lake_alone(creeks, monkeypatch):
    def act() -> None:
        wait_until(lambda: creeks.states().get("public.orders") == "streaming", SPARK_S)
        execute(creeks.dsn, "insert into orders values (1)")
        creeks.wait_for(("orders", "c", 1))

    assert run_while(creeks, act, monkeypatch) == process.DONE
    file = creeks.lake / "_pgrepl" / "pipeline.json"
    before = file.read_text()
    monkeypatch.setenv("PG_PUBLICATION_SLOT", "another")
    assert main(["creek"]) == process.WILL_NOT_HELP
    assert file.read_text() == before


@pytest.mark.real_kill
@pytest.mark.parametrize(
    "app",
    [
        "snapshot.py",
        pytest.param("publish.py", marks=pytest.mark.thorough("with the snapshot app")),
    ],
)
def test_it_ends_with_its_apps_when_it_is_killed(creeks, app):
    creeks.with_lake_tables()
    command = [sys.executable, "-m", "airflow_provider_pgrepl", "creek"]
    with creeks.log.open("ab") as log:
        running = subprocess.Popen(
            command, env={**os.environ, **creeks.environment}, stdout=log, stderr=log, start_new_session=True
        )
    # As early as can be: its apps have only just been started.
    try:
        wait_until(lambda: children(app, running.pid))
    finally:
        running.kill()
        running.wait()

    def are_left() -> bool:
        lake, each = str(creeks.lake), psutil.process_iter(["cmdline"])
        return any(lake in " ".join(one.info["cmdline"] or ()) for one in each)

    wait_until(lambda: not are_left(), what="its apps to have ended")


def test_creek_command_exits_78_and_lists_missing_environment_variables(monkeypatch, capsys):
    for name in ("PG_URI", "NATS_URI", "PGREPL_LAKE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["creek"]) == process.WILL_NOT_HELP
    assert "PG_URI, PG_PUBLICATION_NAME, PG_PUBLICATION_SLOT, NATS_URI, PGREPL_LAKE: not set" in (
        capsys.readouterr().err
    )
