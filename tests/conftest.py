"""Shared fixtures: a server of each PostgreSQL major and a Spark session a process, a database a test."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import logging
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.replication.runtime.spark_submit import SMALL_JVM, archive_options
from airflow_provider_pgrepl.replication.settings.store_variables import use_store
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.spark.connectors import JARS_VARIABLE
from airflow_provider_pgrepl.replication.spark.session import WORKERS, build_session
from demo.postgres import Server
from demo.rabbitmq import Broker
from demo.versitygw import Gateway
from tests.report import Measured, Report
from tests.selection import MAJORS, TIERS, is_left_out, mark_group, parametrize_majors, ring, select
from tests.support.debian_server import TEMPLATE, debian_server
from tests.support.rabbitmq import running_broker
from tests.support.s3 import new_lake, running_gateway
from tests.support.sessions import close_sessions, session
from tests.support.stores import AzureServer, GoogleServer, StoreServer, running_store
from tests.time_limits import Deadline, Watchdog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="all", help="tests to run; see tests/selection.py")
    parser.addoption("--times", action="store_true", help="measure fixtures and CPU; see tests/report.py")


MEMORY = Path("/dev/shm")
_WORKERS_NEED_BYTES = 8 << 30
"""Some GB lie there during a run, most of them WAL."""


def write_to_memory() -> None:
    """Put temporary files of tests, and of the servers that they start, into memory if there is room.

    Each database is some 300 files: on a disk creating and dropping it takes twice as long.
    """
    if "TMPDIR" in os.environ or not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return
    if shutil.disk_usage(MEMORY).free >= _WORKERS_NEED_BYTES:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


def parse_without_collecting() -> None:
    """Keep the garbage collector from running during `ast.parse`.

    Before 3.11.8 and 3.12.2 Python counts the depth of all syntax trees under construction in one place.
    A finalizer that parses meanwhile, as the formatting of a traceback does, fails the outer parse with
    a SystemError (python/cpython#106905).
    """
    if sys.version_info < (3, 11, 8) or (3, 12) <= sys.version_info < (3, 12, 2):
        ast.parse = _without_collecting(ast.parse)


def _without_collecting(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        collects = gc.isenabled()
        gc.disable()
        try:
            return call(*args, **kwargs)
        finally:
            if collects:
                gc.enable()

    return called


def pytest_configure(config: pytest.Config) -> None:
    write_to_memory()
    parse_without_collecting()
    os.environ.setdefault("SPARK_SUBMIT_OPTS", f"{SMALL_JVM} {archive_options()}".strip())
    # Two threads of deltalake mostly wake each other: with one, opening a table takes a fourth less CPU time.
    os.environ.setdefault("TOKIO_WORKER_THREADS", "1")
    config.pluginmanager.register(Watchdog(config))
    config.pluginmanager.register(Deadline())
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        config.pluginmanager.register(Report(config))
    if config.getoption("times") and (is_worker or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Measured(config))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_majors(metafunc)


def pytest_itemcollected(item: pytest.Item) -> None:
    mark_group(item)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if is_left_out(collection_path, config.getoption("tier")) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collect no garbage while tests are collected, and less often while they run.

    By default Python collects garbage whenever there are 700 more objects than before.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select(config, items)
    # Imported and collected objects stay to the end: each full garbage collection would visit them again.
    gc.freeze()


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[int], Server]]:
    """A real PostgreSQL of each major that is asked for, until the tests end."""
    running: dict[int, Server] = {}
    with contextlib.ExitStack() as stack:

        def server_of(major: int) -> Server:
            if major not in running:
                running[major] = stack.enter_context(running_server(major))
            return running[major]

        yield server_of


SETTINGS = {"fsync": "off", "max_wal_size": "512MB"}


@contextlib.contextmanager
def running_server(major: int) -> Iterator[Server]:
    # Not pytest's tmp_path: PostgreSQL's own user must be able to enter every folder above its data.
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-pg-") as folder:
        Path(folder).chmod(0o755)
        instance = Server(Path(folder) / "data", major=major, settings=SETTINGS)
        instance.create()
        instance.start()
        # The first session in a database writes a cache of its catalog, which its copies have, too.
        psycopg2.connect(instance.dsn("template1")).close()
        yield instance
        instance.stop(immediate=True)


@pytest.fixture(scope="session")
def major(request: pytest.FixtureRequest) -> int:
    """The major version of the test's server."""
    return int(getattr(request, "param", MAJORS[-1]))


@pytest.fixture(scope="session")
def server(servers: Callable[[int], Server], major: int) -> Server:
    """The test's server."""
    return servers(major)


@pytest.fixture(scope="session")
def debian() -> Iterator[Server]:
    """Debian's PostgreSQL, another major version with contrib's extensions and PostGIS."""
    with debian_server() as instance:
        yield instance


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """A RabbitMQ until the tests end, which takes messages of up to 100,000 bytes.

    Tests use exchanges and queues of their own. A test that stops or configures its broker starts one.
    """
    with running_broker(max_message_size="100000") as running:
        yield running


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    """A server that speaks S3, until the tests end."""
    with running_gateway() as running:
        yield running


@pytest.fixture(scope="session", params=[GoogleServer, AzureServer], ids=["google", "azure"])
def other_store(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    """An emulator of a store that does not speak S3, until the tests end."""
    with running_store(request.param) as running:
        yield running


@pytest.fixture
def other_lake(other_store: StoreServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a lake of the test's own there; the environment says how its store is reached."""
    for name, value in other_store.environment_of(other_store.port).items():
        monkeypatch.setenv(name, value)
    return other_store.new_lake()


@pytest.fixture(autouse=True)
def unflushed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no flush of the tests' own process reach the disk: one takes 5 ms, a commit needs several.

    Tests of what is flushed when have an `os.fsync` of their own; fault tests and the apps flush.
    """
    if ring(request.node) != "fault":
        monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(autouse=True)
def logger_levels() -> None:
    """Reset the levels of loggers: apps that run in the tests' own process set ours and their clients'."""
    ours = ("airflow_provider_pgrepl", "airflow_provider_pgrepl.replication.runtime.compiled_loops")
    for name in (*ours, "py4j", "pika", "nats", "confluent_kafka", "httpx2"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def no_store_given() -> Iterator[None]:
    """Remove the store settings that an Airflow task made in this process, before the next test."""
    yield
    use_store({})


@pytest.fixture
def s3_lake(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a lake of the test's own; the environment says how its store is reached."""
    for name, value in gateway.client_environment.items():
        monkeypatch.setenv(name, value)
    return new_lake()


@pytest.fixture
def dsn(server: Server) -> Iterator[str]:
    """The DSN of a database of the test's own; its slots and the database go with the test."""
    with fresh_database(server) as dsn:
        yield dsn


@pytest.fixture
def debian_dsn(debian: Server) -> Iterator[str]:
    """The DSN of a database of the test's own on Debian's server, with all extensions."""
    with fresh_database(debian, template=TEMPLATE) as dsn:
        yield dsn


@contextlib.contextmanager
def fresh_database(server: Server, template: str = "template1") -> Iterator[str]:
    name = f"t_{uuid.uuid4().hex[:12]}"
    with session(server.dsn()) as admin:
        # A third of the CPU time that the server's default takes; 14 knows no other way.
        by_files = " strategy file_copy" if admin.server_version >= 15_00_00 else ""
        admin.cursor().execute(f"create database {name} template {template}{by_files}")
    yield server.dsn(name)
    close_sessions(server.dsn(name))
    with session(server.dsn()) as admin, admin.cursor() as cursor:
        drop_slots(cursor, name)
        cursor.execute(f"drop database {name} with (force)")


def drop_slots(cursor: psycopg2.extensions.cursor, database: str) -> None:
    """End the sessions of the database, and drop its slots, which an ending walsender still holds briefly."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        cursor.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = %s and pid <> pg_backend_pid()",
            (database,),
        )
        cursor.execute("select slot_name, active from pg_replication_slots where database = %s", (database,))
        slots = cursor.fetchall()
        if not slots:
            return
        for slot, active in slots:
            if not active:
                with contextlib.suppress(psycopg2.errors.ObjectInUse, psycopg2.errors.UndefinedObject):
                    cursor.execute("select pg_drop_replication_slot(%s)", (slot,))
        if any(active for _, active in slots):
            time.sleep(0.05)


class closing_connection:  # noqa: N801 - reads as a function
    """An autocommit connection that is closed at the end of the block."""

    def __init__(self, dsn: str) -> None:
        self._connection = psycopg2.connect(dsn)
        self._connection.autocommit = True

    def __enter__(self) -> Connection:
        return self._connection

    def __exit__(self, *_: object) -> None:
        self._connection.close()


@pytest.fixture
def pg(dsn: str) -> Iterator[Connection]:
    """An autocommit connection to the test's own database."""
    with closing_connection(dsn) as connection:
        yield connection


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One Spark session a run: two slots, with Delta; `make jars` fetches what it needs."""
    os.environ.setdefault(JARS_VARIABLE, str(Path(__file__).parents[1] / ".jars"))
    session = build_session("pgrepl-tests", master="local[2]", extra_conf=WORKERS)
    yield session
    session.stop()
    # Its connections are closed later, when a handler of a test may write to what is closed already.
    logging.getLogger("py4j").setLevel(logging.WARNING)
