"""Logical messages: kept in the changelog in commit order, each once, and read as for an outbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg2
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.changelog.layout import PARTITION, floor_app
from airflow_provider_pgrepl.replication.changelog.messages import MESSAGE_SCHEMA, read_messages
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver
from tests.conftest import closing_connection
from tests.support.received import Received
from tests.support.replicated import execute, wait_until


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Received:
    """A table `t`, published, its changelog begun."""
    execute(dsn, "create table t(id int primary key)")
    pipeline = Received(dsn, tmp_path, ("public.t",), flush_interval_s=0.05)
    pipeline.begin()
    return pipeline


def contents(received: Received, **options: Any) -> list[bytes]:
    return read_messages(received.pipeline, **options)["content"].to_pylist()


def test_messages_are_read_in_the_order_of_what_they_belong_to(received, dsn):
    with closing_connection(dsn) as other, psycopg2.connect(dsn) as open_one:
        with open_one.cursor() as cursor, other.cursor() as meanwhile:
            cursor.execute("select pg_logical_emit_message(true, 'order', 'tied')")
            cursor.execute("select pg_logical_emit_message(false, 'log', 'loose, amid a transaction')")
            cursor.execute("insert into t values (1)")
            meanwhile.execute("select pg_logical_emit_message(true, 'order', 'another, committed before')")
            cursor.execute("select pg_logical_emit_message(true, 'order', '\\x00ff10'::bytea)")
        open_one.commit()
    open_one.close()
    received.receive()
    found = read_messages(received.pipeline.lake_root)
    assert found.schema == MESSAGE_SCHEMA
    rows = found.to_pylist()
    assert [(row["prefix"], row["content"], row["transactional"]) for row in rows] == [
        ("log", b"loose, amid a transaction", False),
        ("order", b"another, committed before", True),
        ("order", b"tied", True),
        ("order", b"\x00\xff\x10", True),
    ]
    places = [(row["epoch"], row["lsn"], row["ordinal"]) for row in rows]
    assert places == sorted(set(places))
    (insert,) = received.changelog_rows("I")
    tied, last = rows[2:]
    assert (tied["lsn"], tied["xid"], tied["commit_ts"]) == (
        insert["commit_lsn"],
        insert["xid"],
        insert["commit_ts"],
    )
    assert tied["ordinal"] < insert["ordinal"] < last["ordinal"]
    assert contents(received, prefix="log") == [b"loose, amid a transaction"]
    assert contents(received, above_lsn=rows[1]["lsn"], prefix="order") == [b"tied", b"\x00\xff\x10"]
    assert contents(received, above_lsn=rows[-1]["lsn"]) == []


def test_a_rollback_takes_back_only_the_transactional_ones(received, dsn):
    connection = psycopg2.connect(dsn)
    with connection.cursor() as cursor:
        cursor.execute("select pg_logical_emit_message(true, 'p', 'never')")
        cursor.execute("select pg_logical_emit_message(false, 'p', 'kept')")
        connection.rollback()
        cursor.execute("select pg_logical_emit_message(true, 'p', 'before')")
        cursor.execute("savepoint s")
        cursor.execute("select pg_logical_emit_message(true, 'p', 'never')")
        cursor.execute("select pg_logical_emit_message(false, 'p', 'kept as well')")
        cursor.execute("rollback to savepoint s")
        cursor.execute("select pg_logical_emit_message(true, 'p', 'after')")
        connection.commit()
    connection.close()
    received.receive()
    assert contents(received) == [b"kept", b"kept as well", b"before", b"after"]


@pytest.mark.parametrize("transactional", ["true", "false"])
@pytest.mark.thorough("the same test, without transactions", "true")
def test_alone_they_are_durable_and_told_and_sent_again_they_are_not_doubled(
    received, dsn, monkeypatch, transactional
):
    execute(
        dsn, *(f"select pg_logical_emit_message({transactional}, 'p', '{number}')" for number in range(20))
    )
    with monkeypatch.context() as patched:
        patched.setattr(Receiver, "_send_status", lambda self: None)
        with received.receiving() as receiver:
            wait_until(lambda: len(contents(received)) == 20)
            assert receiver.error is None
    assert received.slot().confirmed_flush_lsn < read_messages(received.pipeline)["lsn"][-1].as_py()
    execute(dsn, f"select pg_logical_emit_message({transactional}, 'p', 'last')")
    for _ in range(2):
        received.receive()
    assert contents(received) == [*(str(number).encode() for number in range(20)), b"last"]
    assert received.slot().confirmed_flush_lsn == received.durable_lsn


def test_large_and_empty_ones_and_those_among_many_rows_are_whole(received, dsn):
    execute(
        dsn,
        "begin; insert into t select generate_series(1, 5000);"
        " select pg_logical_emit_message(true, '', ''); select pg_logical_emit_message(true, 'ü \"', 'ü');"
        " insert into t select generate_series(5001, 10000);"
        " select pg_logical_emit_message(true, 'big', repeat('x', 4000000)); commit",
    )
    received.receive()
    rows = read_messages(received.pipeline).to_pylist()
    assert [(row["prefix"], len(row["content"])) for row in rows] == [
        ("", 0),
        ('ü "', 2),
        ("big", 4_000_000),
    ]
    assert rows[1]["content"] == "ü".encode()
    assert len(received.changelog_rows("I")) == 10_000


def test_no_messages_are_an_empty_table_of_the_same_columns(received, dsn):
    execute(dsn, "insert into t values (1)")
    received.receive()
    found = read_messages(received.pipeline)
    assert (found.num_rows, found.schema) == (0, MESSAGE_SCHEMA)


def test_reading_messages_dropped_by_retention_raises_changelog_error(received, dsn):
    execute(dsn, "select pg_logical_emit_message(true, 'p', 'old')")
    received.receive()
    (lsn,) = read_messages(received.pipeline)["lsn"].to_pylist()
    changelog = DeltaTable(received.changelog)
    dropped = CommitProperties(app_transactions=[Transaction(floor_app(1), lsn)])
    changelog.create_write_transaction(
        [], "append", changelog.schema(), partition_by=[PARTITION], commit_properties=dropped
    )
    assert contents(received, above_lsn=lsn) == []
    with pytest.raises(ChangelogError, match="has dropped"):
        read_messages(received.pipeline, above_lsn=lsn - 1)


def test_before_the_first_snapshot_there_is_no_changelog_to_read(tmp_path):
    with pytest.raises(ChangelogError, match="no changelog in"):
        read_messages(str(tmp_path))
