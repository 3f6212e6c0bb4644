"""A transaction that the server itself cannot send: said with its place, and nothing before it is lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import Retry, UnsendableError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver, ReconnectingReceiver
from airflow_provider_pgrepl.replication.source.preflight.check import ALWAYS_SENDABLE, check_source
from demo.postgres import Server
from tests.conftest import closing_connection
from tests.support.encoded_database import NOT_UTF8, encoded_database, insert_bytes
from tests.support.received import Received
from tests.support.replicated import execute


@pytest.fixture
def encoded(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    with encoded_database(server, request.param) as dsn:
        yield dsn


def ended(received: Received) -> Receiver:
    """A receiver that has ended by itself."""
    receiver = Receiver(received.dsn, received.pipeline)
    receiver.start()
    assert receiver.failed.wait(300)
    receiver.stop()
    return receiver


def keys(received: Received) -> list[str]:
    return [row["new"][0] for row in received.changelog_rows("I")]


def insert_with_place(dsn: str, value: bytes) -> tuple[LSN, LSN]:
    """LSNs before and after the commit of one row."""
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select pg_current_wal_insert_lsn()")
        before = LSN.parse(cursor.fetchone()[0])
        insert_bytes(dsn, value, 2)
        cursor.execute("select pg_current_wal_insert_lsn()")
        return before, LSN.parse(cursor.fetchone()[0])


@pytest.mark.parametrize("encoded", NOT_UTF8, indirect=True)
def test_unsendable_transaction_error_names_lsn_and_earlier_changes_are_durable(
    encoded: str, tmp_path: Path
) -> None:
    received = Received(encoded, tmp_path, ("public.t",))
    received.begin()
    execute(encoded, "insert into t values (1, 'sent in the same breath')")
    with closing_connection(encoded) as connection:
        encoding = connection.info.parameter_status("server_encoding")
    before, after = insert_with_place(encoded, NOT_UTF8[encoding])
    execute(encoded, "insert into t values (3, 'after')")
    receiver = ended(received)
    assert isinstance(receiver.error, UnsendableError)
    assert receiver.error.retry is Retry.NEVER
    assert keys(received) == ["1"]
    assert received.durable_lsn <= before
    unfinished = receiver.unfinished
    assert unfinished is not None
    assert before <= unfinished.commit_lsn < after
    assert f"the transaction at {LSN(unfinished.commit_lsn)}" in receiver.error.message
    assert "0x" not in str(receiver.error)
    assert received.slot().confirmed_flush_lsn <= received.durable_lsn


@pytest.mark.parametrize("encoded", ["SQL_ASCII"], indirect=True)
def test_a_reception_believes_it_when_it_comes_a_second_time(
    encoded: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    received = Received(encoded, tmp_path, ("public.t",))
    received.begin()
    insert_bytes(encoded, NOT_UTF8["SQL_ASCII"])
    reception = ReconnectingReceiver(encoded, received.pipeline)
    with caplog.at_level(logging.WARNING):
        reception.start()
        assert reception.failed.wait(300)
        reception.stop()
    assert isinstance(reception.error, UnsendableError)
    assert sum("trying once more" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.thorough("the other unsendable values of this file")
def test_values_of_more_than_1_gb_as_text_are_no_lost_connection(dsn: str, tmp_path: Path) -> None:
    """A bytea of 512 MiB and one byte, which the server writes as 1 GiB and four."""
    execute(
        dsn,
        "create table t(a int primary key, b bytea)",
        "alter table t alter b set storage external",
    )
    received = Received(dsn, tmp_path, ("public.t",))
    received.begin()
    execute(
        dsn,
        "insert into t values (1, null)",
        "insert into t select 2, string_agg(piece, '') from (select decode(repeat('00', 1 << 25), 'hex')"
        " from generate_series(1, 16) union all select '\\x00') pieces (piece)",
        "insert into t values (3, null)",
    )
    receiver = ended(received)
    assert isinstance(receiver.error, UnsendableError)
    assert receiver.error.retry is Retry.NEVER
    assert "1 GB" in str(receiver.error)
    assert receiver.unfinished is not None
    assert keys(received) == ["1"]


@pytest.mark.parametrize("encoded", [*NOT_UTF8, "LATIN1"], indirect=True)
def test_preflight_warns_of_an_encoding_whose_texts_may_be_unsendable(
    encoded: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    received = Received(encoded, tmp_path, ("public.t",))
    with caplog.at_level(logging.WARNING):
        check_source(encoded, received.pipeline)
    with closing_connection(encoded) as connection:
        encoding = connection.info.parameter_status("server_encoding")
    said = [record.getMessage() for record in caplog.records if encoding in record.getMessage()]
    assert len(said) == (0 if encoding == "LATIN1" else 1)


@pytest.mark.differs_by_major("each major brings its own tables of how encodings are converted")
def test_encodings_of_which_nothing_is_said_convert_every_byte(pg: psycopg2.extensions.connection) -> None:
    every = bytes(range(1, 256))
    with pg.cursor() as cursor:
        for encoding in ALWAYS_SENDABLE - {"UTF8"}:
            cursor.execute("select pg_catalog.convert(%s, %s, 'UTF8')", (every, encoding))
            assert cursor.fetchone() is not None
