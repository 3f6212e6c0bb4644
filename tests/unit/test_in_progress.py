"""Transactions in progress: the messages of their blocks, and what is kept of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest

from airflow_provider_pgrepl.replication.pgoutput.columns import HEADER
from airflow_provider_pgrepl.replication.receiver.in_progress import InProgressTransactions, NotKeptError
from airflow_provider_pgrepl.replication.source.stream import Chunk

XID = 7


def wal(content: bytes) -> bytes:
    return b"w" + bytes(HEADER - 1) + content


def start(*, is_first: bool) -> bytes:
    return wal(struct.pack(">cIB", b"S", XID, is_first))


def row(text: bytes, xid: int = XID) -> bytes:
    return wal(b"I" + struct.pack(">I", xid) + text)


STOP = wal(b"E")
ORIGIN = wal(b"O" + bytes(8))
COMMIT = wal(struct.pack(">cIBqqq", b"c", XID, 0, 80, 90, 5))
ABORT = wal(struct.pack(">cII", b"A", XID, XID))


def taken(transactions: InProgressTransactions, messages: Sequence[bytes]) -> list[bytes]:
    chunk = Chunk(list(messages), 0, has_blocks=True)
    return [bytes(message)[HEADER:] for part in transactions.take(chunk) for message in part.messages]


def test_messages_of_all_blocks_follow_a_begin_at_the_commit() -> None:
    transactions = InProgressTransactions()
    first = [start(is_first=True), ORIGIN, row(b"a"), row(b"bc"), STOP]
    assert taken(transactions, first) == []
    assert taken(transactions, [start(is_first=False), row(b""), row(b"d"), STOP]) == []
    begin = struct.pack(">cqqI", b"B", 80, 5, XID)
    end = struct.pack(">cBqqq", b"C", 0, 80, 90, 5)
    assert taken(transactions, [COMMIT]) == [begin, b"Ia", b"Ibc", b"I", b"Id", end]


def test_block_may_be_cut_anywhere() -> None:
    messages = [start(is_first=True), row(b"a"), row(b"b"), STOP, wal(b"other"), COMMIT]
    whole = taken(InProgressTransactions(), messages)
    assert [message[:1] for message in whole] == [b"o", b"B", b"I", b"I", b"C"]
    for cut in range(1, len(messages)):
        transactions = InProgressTransactions()
        assert taken(transactions, messages[:cut]) + taken(transactions, messages[cut:]) == whole


def test_nothing_is_kept_of_a_transaction_that_was_rolled_back() -> None:
    transactions = InProgressTransactions()
    assert taken(transactions, [start(is_first=True), row(b"a"), STOP, ABORT, ABORT]) == []
    # The first block of a new transaction, not a further one.
    assert taken(transactions, [start(is_first=True), row(b"b"), STOP, COMMIT])[1:2] == [b"Ib"]


@pytest.mark.parametrize(
    "messages",
    [
        [start(is_first=False)],
        [start(is_first=True), STOP, start(is_first=True)],
        [COMMIT],
        [COMMIT[:-1]],
        [start(is_first=True), row(b"a", xid=8), STOP],
        [start(is_first=True), wal(b"M" + struct.pack(">I", XID)), STOP],
    ],
    ids=["no beginning", "two beginnings", "nothing", "short", "subtransaction", "logical message"],
)
def test_uncertain_transaction_is_not_kept(messages: list[bytes]) -> None:
    with pytest.raises(NotKeptError):
        taken(InProgressTransactions(), messages)
