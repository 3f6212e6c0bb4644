"""Transactions that the server sends while they are in progress."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from psycopg2.extensions import cursor as Cursor  # noqa: N812 - it is a class

from airflow_provider_pgrepl.replication.pgoutput.columns import HEADER
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver import in_progress
from airflow_provider_pgrepl.replication.receiver.in_progress import (
    InProgressTransactions,
    Message,
    NotKeptError,
)
from airflow_provider_pgrepl.replication.receiver.receiver import ReconnectingReceiver
from airflow_provider_pgrepl.replication.source.stream import ReplicationStream
from tests.conftest import closing_connection
from tests.support.received import Received, wait_until_seen
from tests.support.replicated import execute, let_senders_wait, set_in_database, wait_until

SESSIONS = 3
STEPS = 150
END = b"this is the end"
RANDOM_TEXT = "(select string_agg(md5(random()::text), '') from generate_series(1, 512) where g is not null)"
"""16 kB that cannot be compressed, another text for each row `g`."""


@contextlib.contextmanager
def transaction(dsn: str) -> Iterator[Cursor]:
    """A session with an open transaction, which the block ends."""
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("begin")
        yield cursor


class Session:
    """A session that changes its own table, and inserts into one that all share."""

    def __init__(self, cursor: Cursor, number: int, chance: random.Random) -> None:
        self._cursor, self._own, self._chance = cursor, f"own_{number}", chance
        self._columns = 0

    def step(self) -> None:
        chance, own = self._chance, self._own
        text = "repeat(md5(random()::text), 10)"
        some_rows = f"select {text} from generate_series(1, {chance.randint(1, 99)})"
        weights = {
            f"insert into {own} (v) {some_rows}": 6,
            f"insert into shared (v) {some_rows}": 6,
            f"insert into {own} (v) select {RANDOM_TEXT} from generate_series(1, 5) g": 3,
            f"insert into {own} (id, v) values (0, 'new') on conflict (id) do update set v = 'old'": 2,
            f"update {own} set v = {text} where id % 3 = {chance.randint(0, 2)}": 3,
            f"delete from {own} where id % 5 = {chance.randint(0, 4)}": 2,
            f"truncate {own}": 1,
            f"alter table {own} add column c{self._columns} text default 'c'": 1,
            "select pg_logical_emit_message(false, 'p', 'outside')": 1,
            "commit; begin": 2,
            "rollback; begin": 1,
        }
        (statement,) = chance.choices(list(weights), list(weights.values()))
        self._columns += statement.startswith("alter")
        self._cursor.execute(statement)

    def end(self) -> None:
        self._cursor.execute(self._chance.choice(["commit", "rollback"]))


def run_traffic(dsn: str, chance: random.Random) -> None:
    with contextlib.ExitStack() as stack:
        sessions = [
            Session(stack.enter_context(transaction(dsn)), number, chance) for number in range(SESSIONS)
        ]
        for _ in range(STEPS):
            chance.choice(sessions).step()
        for session in sessions:
            session.end()
    execute(dsn, f"select pg_logical_emit_message(false, 'p', '{END.decode()}')")


def make_slots(dsn: str) -> list[str]:
    make = (
        "select slot_name from pg_create_logical_replication_slot('in_progress_' || (select oid from"
        " pg_database where datname = current_database()) || %s, 'pgoutput')"
    )
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        slots = []
        for name in ("_early", "_after"):
            cursor.execute(make, (name,))
            slots.append(cursor.fetchone()[0])
        return slots


def read(dsn: str, slot: str, chance: random.Random, *, early: bool) -> tuple[list[Message], int]:
    """Return the messages to the end, as of version 1, and the number of blocks that they came in."""
    messages: list[Message] = []
    blocks = 0
    transactions = InProgressTransactions()
    stream = ReplicationStream(dsn, slot, "p", message_bytes=1000, in_progress=early)
    with contextlib.closing(stream), contextlib.closing(transactions):
        while not messages or END not in bytes(messages[-1]):
            chunk = stream.read(5, chance.choice([1, 1000, 1 << 20]))
            blocks += sum(message[HEADER] == ord("S") for message in chunk.messages if chunk.has_blocks)
            for part in transactions.take(chunk):
                messages += part.messages
            stream.send_status(LSN(0), LSN(0))
    return messages, blocks


def transactions_of(messages: Sequence[Message]) -> list[Any]:
    """Return what the messages say: transactions that are not empty, each change with its relation."""
    relations: dict[bytes, bytes] = {}
    found: list[Any] = []
    changes: list[Any] | None = None
    begin = b""
    for message in messages:
        kind, body = bytes(message[HEADER : HEADER + 1]), bytes(message[HEADER + 1 :])
        if kind == b"B":
            assert changes is None
            begin, changes = body, []
        elif kind == b"M":
            found.append(body)
        elif kind == b"C":
            assert changes is not None
            found += [(begin, changes, body)] if changes else []
            changes = None
        elif kind == b"R":
            assert changes is not None
            relations[body[:4]] = body
        elif kind not in b"YOA":
            assert changes is not None
            changes.append((kind, body, relations[body[:4]] if kind in b"IUD" else None))
    return found


@pytest.mark.differs_by_major("which transactions the server sends while they are in progress")
@pytest.mark.parametrize("seed", range(1, 5))
def test_transactions_are_those_that_are_sent_after_their_commits(dsn, major, seed):
    chance = random.Random(seed)
    let_senders_wait(dsn)
    execute(
        dsn,
        "create table shared (id serial primary key, v text)",
        *(f"create table own_{number} (id serial primary key, v text)" for number in range(SESSIONS)),
        "create publication p for all tables",
    )
    set_in_database(dsn, "logical_decoding_work_mem", "64kB")
    if major >= 16 and seed % 2:
        set_in_database(dsn, "debug_logical_replication_streaming", "immediate")
    early, after = make_slots(dsn)
    run_traffic(dsn, chance)
    wanted, no_blocks = read(dsn, after, chance, early=False)
    found, blocks = read(dsn, early, chance, early=True)
    assert not no_blocks
    assert blocks > 3
    assert transactions_of(found) == transactions_of(wanted)
    assert len(transactions_of(found)) > 3


@pytest.mark.parametrize(
    "statement",
    [
        "savepoint a; insert into t values (0)",
        "savepoint a; truncate t",
        "select pg_logical_emit_message(true, 'p', repeat('m', 3000))",
    ],
)
def test_transaction_with_a_subtransaction_or_message_is_not_kept(dsn, statement):
    execute(dsn, "create table t (id int)", "create publication p for table t")
    set_in_database(dsn, "logical_decoding_work_mem", "64kB")
    slot, _ = make_slots(dsn)
    with transaction(dsn) as cursor:
        cursor.execute("insert into t select generate_series(1, 9999)")
        cursor.execute(statement)
        cursor.execute("insert into t select generate_series(1, 9999)")
        cursor.execute("commit")
    execute(dsn, f"select pg_logical_emit_message(false, 'p', '{END.decode()}')")
    with pytest.raises(NotKeptError, match=r"subtransactions|logical messages"):
        read(dsn, slot, random.Random(1), early=True)


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Received:
    """A pipeline with the table `t`; the server sends transactions of more than 1 MB while they are in
    progress."""
    execute(dsn, "create table t (id int primary key, v text)")
    set_in_database(dsn, "logical_decoding_work_mem", "1MB")
    pipeline = Received(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, stream_in_progress=True)
    pipeline.begin()
    return pipeline


@contextlib.contextmanager
def receiving(received: Received) -> Iterator[ReconnectingReceiver]:
    """The receiver of the app; at the end of the block it has received everything that was committed."""
    receiver = ReconnectingReceiver(received.dsn, received.pipeline)
    receiver.start()
    try:
        yield receiver
        wait_until_seen(receiver, received.source_lsn())
    finally:
        receiver.stop()


def ids_of(received: Received) -> list[int]:
    return [int(row["new"][0]) for row in received.changelog_rows("I")]


def insert(cursor: Cursor, first: int, last: int, text: str = "repeat('x', 300)") -> None:
    cursor.execute(f"insert into t select g, {text} from generate_series({first}, {last}) g")


def test_transaction_is_received_before_its_commit_and_durable_after_it(received, dsn, caplog):
    caplog.set_level("INFO")
    with receiving(received), transaction(dsn) as cursor:
        insert(cursor, 1, 9000)
        execute(dsn, "insert into t values (0, 'meanwhile')")
        insert(cursor, 9001, 9999)
        cursor.execute("commit")
    assert ids_of(received) == list(range(10_000))
    assert "had been received before" in caplog.text


def test_transaction_is_received_again_after_a_restart_amid_it(received, dsn, caplog):
    caplog.set_level("INFO")
    with transaction(dsn) as cursor:
        with receiving(received):
            insert(cursor, 1, 9000)
            execute(dsn, "insert into t values (0, 'meanwhile')")
        assert ids_of(received) == [0]
        with receiving(received):
            insert(cursor, 9001, 9999)
            cursor.execute("commit")
    assert ids_of(received) == list(range(10_000))
    assert "had been received before" in caplog.text


def test_transaction_that_was_rolled_back_leaves_nothing(received, dsn):
    with receiving(received), transaction(dsn) as cursor:
        insert(cursor, 1, 9000)
        cursor.execute("rollback")
        execute(dsn, "insert into t values (0, 'later')")
    assert ids_of(received) == [0]


@pytest.mark.differs_by_major("which parts of a transaction in progress the server sends")
def test_rows_of_a_subtransaction_that_was_rolled_back_are_not_received(received, dsn):
    """PostgreSQL 14 to 18 sends some of these rows, and says nothing of their end: most of them are stored
    out of line, so that the server can send them only at few places."""
    set_in_database(dsn, "logical_decoding_work_mem", "16MB")
    with receiving(received) as receiver, transaction(dsn) as cursor:
        for first in range(1, 3361, 20):
            if first == 1121:
                cursor.execute("savepoint a")
            if first == 2241:
                cursor.execute("rollback to savepoint a")
            insert(cursor, first, first + 19, RANDOM_TEXT)
        cursor.execute("commit")
    assert ids_of(received) == [*range(1, 1121), *range(2241, 3361)]
    assert receiver.progress.reconnects == 1


@pytest.mark.parametrize("reconnect_s", [0.0, 300.0])
def test_without_room_transactions_are_received_after_their_commits(
    received, dsn, tmp_path, monkeypatch, caplog, reconnect_s
):
    monkeypatch.setattr(in_progress, "LEFT_FREE_BYTES", 1 << 60)
    settings = {"flush_interval_s": 0.05, "stream_in_progress": True, "reconnect_s": reconnect_s}
    received = Received(dsn, tmp_path, ("public.t",), **settings)
    with receiving(received) as receiver, transaction(dsn) as cursor:
        insert(cursor, 1, 9000)
        wait_until(lambda: receiver.progress.reconnects == 1, what="the receiver to connect again")
        insert(cursor, 9001, 9999)
        cursor.execute("commit")
    assert ids_of(received) == list(range(1, 10_000))
    assert receiver.progress.reconnects == 1
    assert "a transaction in progress cannot be kept: the temporary folder would have" in caplog.text


def test_without_the_setting_transactions_are_received_after_their_commits(dsn, tmp_path, received, caplog):
    caplog.set_level("INFO")
    other = Received(dsn, tmp_path, ("public.t",), flush_interval_s=0.05)
    with receiving(other), transaction(dsn) as cursor:
        insert(cursor, 1, 9999)
        cursor.execute("commit")
    assert ids_of(received) == list(range(1, 10_000))
    assert "had been received before" not in caplog.text
