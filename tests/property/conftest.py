"""A database for all tests of a module: they make many tables, and none looks at another's."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing

import pytest

from airflow_provider_pgrepl.replication.source.connection import Connection, connect
from demo.postgres import Server
from tests.conftest import closing_connection


@pytest.fixture(scope="module")
def module_database(server: Server) -> Iterator[str]:
    """The DSN of a database that goes when the module is done."""
    name = f"m_{uuid.uuid4().hex[:12]}"
    with closing_connection(server.dsn()) as admin:
        admin.cursor().execute(f"create database {name}")
    yield server.dsn(name)
    with closing_connection(server.dsn()) as admin:
        admin.cursor().execute(f"drop database {name} with (force)")


@pytest.fixture(scope="module")
def source(module_database: str) -> Iterator[Connection]:
    """A connection to it as the product makes them."""
    with closing(connect(module_database, "test")) as connection:
        yield connection
