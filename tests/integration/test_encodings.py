"""Databases in other encodings: their text arrives as UTF-8, or nothing is taken for what it is not."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import Retry, SourceError
from airflow_provider_pgrepl.replication.source.stream import ReplicationStream
from airflow_provider_pgrepl.replication.wire.columns import Splitter
from demo.postgres import Server
from tests.conftest import closing_connection, drop_slots
from tests.support.replicated import execute


@pytest.fixture
def encoded(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database of the encoding, with a slot and a published table."""
    name = f"t_{uuid.uuid4().hex[:12]}"
    execute(
        server.dsn(),
        f"create database {name} template template0 encoding '{request.param}' lc_collate 'C' lc_ctype 'C'",
    )
    dsn = server.dsn(name)
    execute(dsn, "create table t(a int primary key, b text)", "create publication p for table t")
    execute(dsn, "select pg_create_logical_replication_slot('s', 'pgoutput')")
    yield dsn
    with closing_connection(server.dsn()) as connection, connection.cursor() as cursor:
        drop_slots(cursor, name)
    execute(server.dsn(), f"drop database {name} with (force)")


def received(dsn: str, count: int) -> list[list[str | None]]:
    rows: list[list[str | None]] = []
    splitter = Splitter()
    with ReplicationStream(dsn, "s", "p") as stream:
        while len(rows) < count:
            rows += splitter.split(stream.read(5, 1 << 20).messages).rows["new"].to_pylist()
    return rows


def insert_bytes(dsn: str, value: bytes) -> None:
    with closing_connection(dsn) as connection:
        connection.set_client_encoding(connection.info.parameter_status("server_encoding"))
        connection.cursor().execute(b"insert into t values (1, '" + value + b"')")


@pytest.mark.parametrize("encoded", ["LATIN1"], indirect=True)
def test_another_encoding_arrives_as_utf8(encoded: str) -> None:
    insert_bytes(encoded, "Köln".encode("latin-1"))
    assert received(encoded, 1) == [["1", "Köln"]]


@pytest.mark.parametrize("encoded", ["SQL_ASCII"], indirect=True)
def test_utf8_in_a_database_without_an_encoding_arrives(encoded: str) -> None:
    insert_bytes(encoded, "Köln".encode())
    assert received(encoded, 1) == [["1", "Köln"]]


@pytest.mark.parametrize("encoded", ["SQL_ASCII"], indirect=True)
def test_other_bytes_in_a_database_without_an_encoding_are_an_error_that_tells_no_value(encoded: str) -> None:
    insert_bytes(encoded, "Köln".encode("latin-1"))
    with pytest.raises(SourceError, match="SQLSTATE 22021") as caught:
        received(encoded, 1)
    assert caught.value.retry is Retry.NEVER
    assert "0x" not in str(caught.value)
    with closing_connection(encoded) as connection, pytest.raises(psycopg2.DataError):
        connection.set_client_encoding("UTF8")
        connection.cursor().execute("select * from t")
