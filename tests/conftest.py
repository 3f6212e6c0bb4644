"""Shared fixtures: one PostgreSQL server (or two) and one Spark session a run, a fresh database a test."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.replication.lake.session import JARS_VARIABLE, build_session
from demo.postgres import Server
from tests.support.debian_server import TEMPLATE, debian_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Connection = psycopg2.extensions.connection


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A real PostgreSQL; PGREPL_TEST_PG_MAJOR chooses 14 to 18."""
    # Not pytest's tmp_path: PostgreSQL's own user must be able to enter every folder above its data.
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-pg-") as folder:
        Path(folder).chmod(0o755)
        major = int(os.environ.get("PGREPL_TEST_PG_MAJOR", "18"))
        instance = Server(Path(folder) / "data", major=major, settings={"fsync": "off"})
        instance.create()
        instance.start()
        yield instance
        instance.stop(immediate=True)


@pytest.fixture(scope="session")
def debian() -> Iterator[Server]:
    """Debian's PostgreSQL, another major version with contrib's extensions and PostGIS."""
    with debian_server() as instance:
        yield instance


@pytest.fixture
def dsn(server: Server) -> Iterator[str]:
    """The DSN of a database of the test's own; its slots and the database go with the test."""
    with fresh_database(server) as dsn:
        yield dsn


@pytest.fixture
def debian_dsn(debian: Server) -> Iterator[str]:
    """Likewise on Debian's server; it has all extensions."""
    with fresh_database(debian, template=TEMPLATE) as dsn:
        yield dsn


@contextlib.contextmanager
def fresh_database(server: Server, template: str = "template1") -> Iterator[str]:
    name = f"t_{uuid.uuid4().hex[:12]}"
    with closing_connection(server.dsn()) as admin:
        admin.cursor().execute(f"create database {name} template {template}")
    yield server.dsn(name)
    with closing_connection(server.dsn()) as admin, admin.cursor() as cursor:
        drop_slots(cursor, name)
        cursor.execute(f"drop database {name} with (force)")


def drop_slots(cursor: psycopg2.extensions.cursor, database: str) -> None:
    """End whoever uses the database, and drop its slots, which a walsender that ends still holds a moment."""
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
    """One Spark session a run: `local[2]` with Delta; `make jars` fetches what it needs."""
    os.environ.setdefault(JARS_VARIABLE, str(Path(__file__).parents[1] / ".jars"))
    session = build_session("pgrepl-tests", master="local[2]")
    yield session
    session.stop()
