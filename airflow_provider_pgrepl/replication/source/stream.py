"""The replication stream, directly over libpq. It reads and sends messages, and does not interpret them.

psycopg2's replication cursor is not used: it advances `flush_lsn` on keepalives automatically, even in the
middle of a transaction, and so confirms changes that are not durable yet.
https://www.postgresql.org/docs/current/protocol-replication.html

`Liveness` distinguishes a quiet stream from a dead one. A live server answers a keepalive request, except
while it decodes a transaction of which nothing is published. That may take minutes, and after a reconnect the
server would only start again. So if there is no answer, the receiver checks, over another connection, what
the walsender is doing.
"""

from __future__ import annotations

import logging
import select
import struct
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType

from psycopg import OperationalError, pq

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import (
    BusyError,
    PgReplError,
    PublicationError,
    SlotError,
    SourceConnectionError,
    UnsendableError,
    WireError,
)
from airflow_provider_pgrepl.replication.pgoutput.columns import HEADER, POSTGRES_EPOCH_US
from airflow_provider_pgrepl.replication.pgoutput.messages import without_content
from airflow_provider_pgrepl.replication.postgres.lsn import LSN

from .connection import (
    ANSWER_LIMIT_S,
    CONNECT_TIMEOUT_S,
    answered_within,
    connect,
    pin_statement,
    rows,
    stream_conninfo,
    stream_role,
)
from .server import Server, check_identity
from .server_errors import source_errors

_UNCONVERTIBLE = "a text in it cannot be converted from the database's encoding into UTF-8"
_TOO_LARGE = (
    "the values of a row in it are more than 1 GB as text, in which a bytea takes two bytes for each of its"
    " own"
)
_UNSENDABLE = {
    "22021": _UNCONVERTIBLE,
    "22P05": _UNCONVERTIBLE,
    "22": "a value in it, or the publication's row filter on it, is an error to the server",
    "54000": _TOO_LARGE,
    "54": "it is beyond a limit of the server",
    "XX": "the server meets an error of its own while it decodes it",
}
"""By SQLSTATE or its class: the errors that a transaction causes each time that the server sends it."""

_ALLOCATION = "invalid memory alloc request size"
"""The start of mcxt.c's message about more than 1 GB. Messages of internal errors are not translated."""

# Messages may be translated, and a missing slot and a missing publication have the same SQLSTATE (42704).
_FINDS_PUBLICATION = "get_publication_oid"
_AWAITS_STANDBYS = "StandbySlotsHaveCaughtup"
"""The function in which a walsender of a server that shuts down ends, if a standby of
synchronized_standby_slots is not connected."""
_KEEPALIVE = struct.Struct(">cqqB")
_STATUS = struct.Struct(">cqqqqB")
_IS_DATA, _IS_KEEPALIVE = ord("w"), ord("k")
# By step of connecting: (waits to read, waits to write).
_CONNECTING: dict[int, tuple[bool, bool]] = {
    pq.PollingStatus.READING: (True, False),
    pq.PollingStatus.WRITING: (False, True),
}
_OF_BLOCKS = b"ScA"
"""The kinds of messages that begin a block of a transaction in progress, commit it and abort it."""
_BLOCK_START, _BLOCK_STOP = b"SE"
_LONGEST_OF_BLOCKS = HEADER + 30
_CHUNK_MESSAGES = 65_536
_READING_S = 0.5
"""The seconds after its timeout when `read` returns, even if keepalives or parts of a message arrive."""
_COPIED_BYTES = 64 << 10
"""Messages up to this size are copied to bytes; longer ones stay memoryviews.

Python's garbage collector tracks memoryviews but not bytes. With one memoryview per message, it repeatedly
scanned all objects of the process, which took longer than receiving.
"""
log = logging.getLogger(__name__)
SILENCE_LIMIT_S = 30.0
"""The seconds without a message after which a stream is dead. A keepalive is requested after half of them."""
# A walsender with a wait event of type Client or Activity waits for its client or for WAL. Otherwise, also
# without a wait event, it is working. https://www.postgresql.org/docs/current/monitoring-stats.html
_AT_WORK = """
SELECT coalesce(wait_event_type, '') NOT IN ('Client', 'Activity')
FROM pg_catalog.pg_stat_activity WHERE pid = %s AND backend_type = 'walsender'
"""


def unsendable(result: pq.abc.PGresult) -> UnsendableError | None:
    """Return the error if a transaction that the server cannot send has ended the stream, otherwise None.

    The server's message may hold values. The function, file and line in its sources hold none, and identify
    the error.
    """
    state = _sqlstate(result)
    why = _UNSENDABLE.get(state) or _UNSENDABLE.get(state[:2])
    if why is None:
        return None
    if _message(result).startswith(_ALLOCATION):
        why = _TOO_LARGE
    function = _field(result, pq.DiagnosticField.SOURCE_FUNCTION)
    file = _field(result, pq.DiagnosticField.SOURCE_FILE)
    line = _field(result, pq.DiagnosticField.SOURCE_LINE)
    place = f", raised by {function} at {file}:{line}" if function else ""
    return UnsendableError(f"{why} (SQLSTATE {state}{place})")


def refusal(result: pq.abc.PGresult) -> PgReplError:
    """Return the error for a command that the server rejects, or for a stream that it ended, by SQLSTATE."""
    state = _sqlstate(result)
    text = _message(result) or "no message"
    if state == "55006":
        return BusyError(
            text,
            "another process reads this slot: see app and slot in pgrepl status FILE.json; if it is a"
            " previous run, wait until it has ended; the server notices a vanished host after a minute."
            " pgrepl status FILE.json prints the statement that ends a sender without an app",
        )
    if state == "42704" and _field(result, pq.DiagnosticField.SOURCE_FUNCTION) == _FINDS_PUBLICATION:
        return PublicationError(text, errors.NEW_EPOCH)
    if _field(result, pq.DiagnosticField.SOURCE_FUNCTION) == _AWAITS_STANDBYS:
        return SourceConnectionError(f"the server shuts down, and a standby is not connected: {text}")
    if state in ("42704", "55000"):
        return SlotError(text, errors.prove_source())
    return SourceConnectionError(f"the replication stream failed: {text} (SQLSTATE {state})")


def _sqlstate(result: pq.abc.PGresult) -> str:
    return _field(result, pq.DiagnosticField.SQLSTATE)


def _message(result: pq.abc.PGresult) -> str:
    return _field(result, pq.DiagnosticField.MESSAGE_PRIMARY)


def _field(result: pq.abc.PGresult, field: pq.DiagnosticField) -> str:
    return (result.error_field(field) or b"").decode(errors="replace")


@dataclass(frozen=True)
class Keepalive:
    """A keepalive message: the server has sent every transaction that committed before `lsn`."""

    lsn: LSN
    wants_reply: bool


@dataclass(frozen=True)
class Chunk:
    """Data messages in the order received, then at most one keepalive that arrived after all of them.

    `has_heard`: True if anything arrived, even only a part of a message. `has_blocks`: True if some messages
    are about transactions in progress.
    """

    messages: list[bytes | memoryview]
    size: int
    keepalive: Keepalive | None = None
    has_heard: bool = False
    has_blocks: bool = False


class ReplicationStream:
    """One `START_REPLICATION` of a slot, from its confirmed LSN. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        dsn: str,
        slot: str,
        publication: str,
        *,
        messages: bool = True,
        message_bytes: int | None = None,
        server: Server | None = None,
        in_progress: bool = False,
    ) -> None:
        """Start streaming. `server`: raise SourceConnectionError if the connection leads to another one.
        `in_progress`: large transactions are sent while they are in progress (protocol version 2).
        """
        self._in_progress, self._is_in_block = in_progress, False
        self._message_bytes = sys.maxsize if message_bytes is None else message_bytes
        self._connection = _connect(stream_conninfo(dsn, stream_role(slot)))
        self.has_ended = False
        """True after the server has ended the stream: it reads no more status. `read` raises the reason."""
        self._lost: SourceConnectionError | None = None
        try:
            self._execute(pin_statement(is_stream=True), pq.ExecStatus.TUPLES_OK)
            if server is not None:
                self._check_identity(server)
            self._execute(_start_command(slot, publication, messages, in_progress), pq.ExecStatus.COPY_BOTH)
            # Do not wait for the network: data that cannot be sent now is sent with the next message.
            self._connection.nonblocking = 1
        except BaseException:
            self.close()
            raise

    @property
    def sender_pid(self) -> int:
        """Return the pid of the walsender."""
        return self._connection.backend_pid

    def read(self, timeout_s: float, max_bytes: int) -> Chunk:
        """Return what has arrived, or arrives within `timeout_s` seconds. The chunk may be empty, and
        its last message may exceed `max_bytes`.

        After the stream has ended and everything received before has been returned, raises BusyError,
        SlotError, PublicationError, UnsendableError or SourceConnectionError.
        """
        if self.has_ended:
            raise self._ended()
        get = self._connection.get_copy_data
        messages: list[bytes | memoryview] = []
        keepalive: Keepalive | None = None
        size, has_heard, has_blocks = 0, False, self._is_in_block
        until = time.monotonic() + timeout_s + _READING_S
        while size < max_bytes and len(messages) < _CHUNK_MESSAGES:
            length, data = get(1)
            if length > 0 and data[0] == _IS_DATA:
                if self._in_progress and HEADER < length <= _LONGEST_OF_BLOCKS:
                    has_blocks |= self._notice(data[HEADER])
                messages.append(self._kept(data))
                size += len(messages[-1])
                keepalive = None
                continue
            has_some = bool(messages or keepalive)
            if length > 0:
                # A keepalive follows nearly each small transaction: only the last one has new information.
                keepalive = _parse_keepalive(bytes(data))
                goes_on = not keepalive.wants_reply
            elif length < 0:
                if not has_some:
                    raise self._ended()
                self.has_ended, goes_on = True, False
            else:
                # Of a large message over a slow network, only a part may arrive each time.
                goes_on = self._more(0 if has_some else timeout_s, has_some=has_some)
                has_heard |= goes_on
            if not goes_on or time.monotonic() >= until:
                break
        return Chunk(messages, size, keepalive, has_heard or bool(messages or keepalive), has_blocks)

    def _notice(self, kind: int) -> bool:
        """Return True if a message of this kind is about a transaction in progress, which may begin or end a
        block of its messages."""
        if not self._is_in_block and kind in _OF_BLOCKS:
            self._is_in_block = kind == _BLOCK_START
            return True
        if kind == _BLOCK_STOP:
            self._is_in_block = False
        return False

    def _more(self, timeout_s: float, *, has_some: bool) -> bool:
        """Return True if more data has arrived, or if the connection is lost meanwhile.

        If it was lost before, raises the error only after everything received before has been read: the
        server's last message may be in it.
        """
        if self._lost is None:
            try:
                return self._wait(timeout_s)
            except SourceConnectionError as error:
                self._lost = error
                return True
        if has_some:
            return False
        raise self._lost

    def _kept(self, data: memoryview) -> bytes | memoryview:
        """Return a message, without the content of a logical message of more than `message_bytes`."""
        # No transaction in progress is kept that has a logical message.
        if len(data) > self._message_bytes and not self._is_in_block:
            data = without_content(data, HEADER, self._message_bytes)
        return bytes(data) if len(data) <= _COPIED_BYTES else data

    def send_status(self, received: LSN, confirmed: LSN, *, wants_reply: bool = False) -> None:
        """Send a standby status update. `confirmed`: the LSN to confirm to the slot."""
        now = time.time_ns() // 1000 - POSTGRES_EPOCH_US
        try:
            self._connection.put_copy_data(
                _STATUS.pack(b"r", received, confirmed, confirmed, now, wants_reply)
            )
            self._connection.flush()
        except OperationalError as error:
            raise SourceConnectionError("the replication connection was lost") from error

    def end(self, timeout_s: float = 5.0) -> None:
        """End the stream in order, so that the server processes the last status and releases the slot.

        Merely closing the connection may discard that status: unread data makes the operating system reset
        the connection. Does not raise if the connection is lost, or the server takes longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._connection.put_copy_end()
            self._connection.flush()
            while not self._is_drained():
                self._wait_until(deadline)
            # The slot is free when the command has completed.
            while self._next_result(deadline) is not None:
                pass
        except (OperationalError, SourceConnectionError):
            return

    def _is_drained(self) -> bool:
        """Discard the received messages. Return True if the server has ended the stream."""
        length = 1
        while length > 0:
            length, _ = self._connection.get_copy_data(1)
        return length < 0

    def _next_result(self, deadline: float) -> pq.abc.PGresult | None:
        # Wait until the result has arrived: get_result would block every other thread as well.
        while self._connection.is_busy():
            self._wait_until(deadline)
        return self._connection.get_result()

    def _wait_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        # Check the time even while data arrives: the server sends a transaction that it began to its end.
        if left <= 0 or not self._wait(left):
            raise SourceConnectionError("the server did not end the replication stream in time")

    def close(self) -> None:
        self._connection.finish()

    def __enter__(self) -> ReplicationStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, timeout_s: float) -> bool:
        try:
            ready, _, _ = select.select([self._connection.socket], [], [], timeout_s)
            if ready:
                self._connection.consume_input()
            return bool(ready)
        except OperationalError as error:
            raise SourceConnectionError("the replication connection was lost") from error

    def _check_identity(self, server: Server) -> None:
        result = self._execute("IDENTIFY_SYSTEM", pq.ExecStatus.TUPLES_OK)
        system_identifier, timeline = (result.get_value(0, column) or b"" for column in range(2))
        check_identity(server, system_identifier.decode(), int(timeline))

    def _execute(self, command: str, expected: pq.ExecStatus) -> pq.abc.PGresult:
        with answered_within(self._connection.socket, ANSWER_LIMIT_S):
            result = self._connection.exec_(command.encode())
        if result.status != expected:
            raise refusal(result)
        return result

    def _ended(self) -> PgReplError:
        result = self._next_result(time.monotonic() + ANSWER_LIMIT_S)
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            return unsendable(result) or refusal(result)
        return SourceConnectionError("the server ended the replication stream")


def _connect(conninfo: str) -> pq.abc.PGconn:
    """Return a connection, opened in steps: the driver's one-step call would block every other thread."""
    connection = pq.PGconn.connect_start(conninfo.encode())
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    step: int = pq.PollingStatus.WRITING
    while step in _CONNECTING and (left := deadline - time.monotonic()) > 0:
        reading, writing = _CONNECTING[step]
        line = [connection.socket]
        select.select(line if reading else [], line if writing else [], [], left)
        step = connection.connect_poll()
    if step == pq.PollingStatus.OK:
        return connection
    reason = (
        connection.get_error_message().strip() if step == pq.PollingStatus.FAILED else "no answer in time"
    )
    connection.finish()
    raise SourceConnectionError(f"cannot open a replication connection: {reason}")


def _start_command(slot: str, publication: str, messages: bool, in_progress: bool) -> str:
    name = '"' + publication.replace('"', '""') + '"'
    version = "proto_version '2', streaming 'on'" if in_progress else "proto_version '1'"
    options = f"{version}, publication_names '{name.replace(chr(39), chr(39) * 2)}'"
    if messages:
        options += ", messages 'true'"
    return f'START_REPLICATION SLOT "{slot}" LOGICAL 0/0 ({options})'


def _parse_keepalive(data: bytes) -> Keepalive:
    if data[0] != _IS_KEEPALIVE:
        raise WireError(f"unknown replication message {chr(data[0])!r}")
    try:
        _, lsn, _, wants_reply = _KEEPALIVE.unpack(data)
    except struct.error:
        raise WireError("a keepalive message is not 18 bytes long") from None
    return Keepalive(LSN(lsn), bool(wants_reply))


class Liveness:
    """The clock of one stream. Call `heard` when something has arrived, `must_ask` while nothing arrives."""

    def __init__(self, is_at_work: Callable[[], bool], limit_s: float = SILENCE_LIMIT_S) -> None:
        self._is_at_work = is_at_work
        self._limit_s = limit_s
        self.heard()

    def heard(self) -> None:
        """Restart the clock. The time before this call, spent on handing messages over, is no silence."""
        self._last = time.monotonic()
        self._asked = False

    def must_ask(self) -> bool:
        """Return True once per silence, after `limit_s` / 2 seconds without a message.

        The caller then requests a keepalive. Raises SourceConnectionError after `limit_s` seconds, unless the
        walsender is working.
        """
        silent_s = time.monotonic() - self._last
        if silent_s >= self._limit_s:
            self._judge(silent_s)
        if self._asked or silent_s < self._limit_s / 2:
            return False
        self._asked = True
        return True

    def _judge(self, silent_s: float) -> None:
        if not self._is_at_work():
            raise SourceConnectionError(
                f"the source sent nothing for {silent_s:.0f} s, and did not answer a keepalive request",
                "check whether a firewall drops packets between this host and the source, and"
                " whether the server responds",
            )
        log.warning(
            "the source has sent nothing for %.0f s; its walsender is decoding the next transaction", silent_s
        )
        self.heard()


def is_at_work(dsn: str, pid: int) -> bool:
    """Return True if the walsender with this pid is working, False if it waits or no longer exists.

    Raises SourceConnectionError if the server cannot be reached.
    """
    with closing(connect(dsn, "liveness")) as connection, source_errors("asking for the stream's sender"):
        return any(at_work for (at_work,) in rows(connection, _AT_WORK, (pid,)))
