"""The precedence of the errors of a receiver's two threads, and streams that end in time."""

from __future__ import annotations

import socket
import time

import pytest
from psycopg import OperationalError

from airflow_provider_pgrepl.errors import (
    FencedError,
    LakeUnavailableError,
    SourceConnectionError,
    UnsendableError,
)
from airflow_provider_pgrepl.replication.receiver.receiver import _outranks
from airflow_provider_pgrepl.replication.source.stream import ReplicationStream

LOST, UNSENDABLE = SourceConnectionError("lost"), UnsendableError("no", "hint")
UNWRITTEN, FENCED = LakeUnavailableError("not on the disk", "hint"), FencedError("another", "hint")


@pytest.mark.parametrize(
    ("first", "later", "counts"),
    [
        (LOST, UNWRITTEN, UNWRITTEN),
        (UNSENDABLE, UNWRITTEN, UNWRITTEN),
        (LOST, ValueError(), ValueError),
        (LOST, UNSENDABLE, LOST),
        (UNWRITTEN, LOST, UNWRITTEN),
        (UNWRITTEN, FENCED, FENCED),
        (LOST, FENCED, FENCED),
        (FENCED, UNWRITTEN, FENCED),
    ],
)
def test_errors_not_fixed_by_reconnecting_outrank_lost_connection(first, later, counts) -> None:
    found = later if _outranks(later, first) else first
    assert found is counts or type(found) is counts


class Sending:
    """A connection whose server does not stop sending."""

    def __init__(self, line: socket.socket) -> None:
        self.socket = line.fileno()
        self.ends_at = time.monotonic() + 300

    def put_copy_end(self) -> None:
        """Do nothing: the server ignores it."""

    flush = consume_input = put_copy_end

    def get_copy_data(self, _: int) -> tuple[int, None]:
        time.sleep(0.01)
        return (-1 if time.monotonic() > self.ends_at else 0), None


def test_a_stream_is_ended_in_time_though_the_server_goes_on_sending() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"x")
        stream = ReplicationStream.__new__(ReplicationStream)
        stream._connection = Sending(ours)
        began = time.monotonic()
        stream.end(0.3)
        assert time.monotonic() - began < 120


class Arriving:
    """A connection on which come, one after the other: parts of a message (None), messages, and the line's
    loss (an error)."""

    def __init__(self, *coming: bytes | OperationalError | None) -> None:
        self._line, theirs = socket.socketpair()
        theirs.send(b"x")
        self._theirs = theirs
        self.socket = self._line.fileno()
        self._coming = list(coming)
        self._here: list[bytes] = []

    def consume_input(self) -> None:
        came = self._coming.pop(0) if self._coming else None
        if isinstance(came, OperationalError):
            raise came
        if came is not None:
            self._here.append(came)
        time.sleep(0.01)

    def get_copy_data(self, _: int) -> tuple[int, memoryview]:
        if not self._here:
            return 0, memoryview(b"")
        came = self._here.pop(0)
        return len(came), memoryview(came)

    def stream(self) -> ReplicationStream:
        stream = ReplicationStream.__new__(ReplicationStream)
        stream._connection, stream._message_bytes = self, 1 << 30
        stream.has_ended, stream._lost = False, None
        stream._in_progress = stream._is_in_block = False
        return stream


def test_a_reading_says_that_a_part_of_a_message_came_and_ends() -> None:
    """Otherwise a large row over a slow connection would count as silence, and be sent again and again."""
    chunk = Arriving().stream().read(0.05, 1 << 20)
    assert not chunk.messages
    assert chunk.has_heard


def test_stream_returns_received_messages_before_raising_lost_connection() -> None:
    stream = Arriving(b"w1", OperationalError("gone")).stream()
    assert stream.read(0.05, 1 << 20).messages == [b"w1"]
    with pytest.raises(SourceConnectionError):
        stream.read(0.05, 1 << 20)
