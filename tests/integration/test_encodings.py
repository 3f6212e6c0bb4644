"""Databases in other encodings: their text arrives as UTF-8, or nothing is taken for what it is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from airflow_provider_pgrepl.replication.pgoutput.columns import Splitter
from airflow_provider_pgrepl.replication.source.stream import ReplicationStream
from demo.postgres import Server
from tests.support.encoded_database import encoded_database, insert_bytes
from tests.support.replicated import execute


@pytest.fixture
def encoded(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database of the encoding, with a slot and a published table."""
    with encoded_database(server, request.param) as dsn:
        execute(dsn, "create publication p for table t")
        execute(dsn, "select pg_create_logical_replication_slot('s', 'pgoutput')")
        yield dsn


def received(dsn: str, count: int) -> list[list[str | None]]:
    rows: list[list[str | None]] = []
    splitter = Splitter()
    with ReplicationStream(dsn, "s", "p") as stream:
        while len(rows) < count:
            rows += splitter.split(stream.read(5, 1 << 20).messages).rows["new"].to_pylist()
    return rows


@pytest.mark.parametrize("encoded", ["LATIN1"], indirect=True)
def test_another_encoding_arrives_as_utf8(encoded: str) -> None:
    insert_bytes(encoded, "Köln".encode("latin-1"))
    assert received(encoded, 1) == [["1", "Köln"]]


@pytest.mark.parametrize("encoded", ["SQL_ASCII"], indirect=True)
def test_utf8_in_a_database_without_an_encoding_arrives(encoded: str) -> None:
    insert_bytes(encoded, "Köln".encode())
    assert received(encoded, 1) == [["1", "Köln"]]
