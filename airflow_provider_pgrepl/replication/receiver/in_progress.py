"""Transactions that the server sends before they have ended, kept in temporary files until they commit.

With protocol version 2 the server sends a large transaction in blocks while it is in progress. Its commit LSN
is not known then, and it may still be rolled back. When it commits, its messages follow as with version 1: a
Begin, its changes, a Commit. All later code receives the same in both versions, in the same order. A file
is gone with its process: after a restart the server sends everything again that was not confirmed.

A transaction with a subtransaction or a logical message is not kept. PostgreSQL may not report that a
subtransaction was rolled back whose rows it has sent, and sends logical messages of a subtransaction as those
of the whole transaction.
https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

import logging
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import IO

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.errors import WireError
from airflow_provider_pgrepl.replication.pgoutput.columns import HEADER
from airflow_provider_pgrepl.replication.runtime.quantities import show_bytes
from airflow_provider_pgrepl.replication.source.stream import Chunk

log = logging.getLogger(__name__)

LEFT_FREE_BYTES = 1 << 30
"""The bytes of the temporary folder's file system that are left free."""
_START, _STOP, _COMMIT, _ABORT, _ORIGIN, _LOGICAL_MESSAGE = b"SEcAOM"
_CODEC = pa.Codec("lz4")
_XID_AT, _XID_END = HEADER + 1, HEADER + 5
_XID = struct.Struct(">I")
_STREAM_START = struct.Struct(">cIB")
_STREAM_ABORT = struct.Struct(">cII")
_STREAM_COMMIT = struct.Struct(">cIBqqq")
_BEGIN = struct.Struct(">cqqI")
_END = struct.Struct(">cBqqq")
_NO_HEADER = b"w" + bytes(HEADER - 1)

Message = bytes | memoryview


class NotKeptError(Exception):
    """A transaction in progress cannot be kept: it has to be received after its commit."""


@dataclass(frozen=True)
class _Block:
    """A part of a transaction's file: the lengths of `count` messages and the messages, compressed together.

    `raw_size`: the size of what was compressed.
    """

    start: int
    size: int
    raw_size: int
    count: int


class _Transaction:
    """A transaction in progress, and the file with its messages, in order."""

    def __init__(self, xid: int) -> None:
        """Raises OSError."""
        self.size = 0
        self._xid = _XID.pack(xid)
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="pgrepl-in-progress-")  # noqa: SIM115
        self._blocks: list[_Block] = []
        self._end = 0

    def add(self, messages: list[Message]) -> None:
        """Add messages, which have the xid of their subtransaction after their kind. Raises NotKeptError."""
        kept = [self._without_xid(message) for message in messages]
        lengths = np.fromiter(map(len, kept), np.int64, len(kept))
        content = lengths.tobytes() + b"".join(kept)
        packed = _CODEC.compress(content, asbytes=True)
        try:
            _check_room(self._file.fileno(), len(packed))
            self._file.write(packed)
        except OSError as error:
            raise NotKeptError(_cannot_write(error)) from None
        self._blocks.append(_Block(self._end, len(packed), len(content), len(kept)))
        self._end += len(packed)
        self.size += len(content)

    def _without_xid(self, message: Message) -> bytes:
        if message[HEADER] == _LOGICAL_MESSAGE:
            raise NotKeptError("the transaction has logical messages")
        if message[_XID_AT:_XID_END] != self._xid:
            raise NotKeptError("the transaction has subtransactions")
        return bytes(message[:_XID_AT]) + bytes(message[_XID_END:])

    def messages(self) -> Iterator[list[Message]]:
        """Yield the messages of each block."""
        for block in self._blocks:
            self._file.seek(block.start)
            content = _CODEC.decompress(self._file.read(block.size), block.raw_size, asbytes=True)
            lengths = np.frombuffer(content, np.int64, block.count)
            ends = (lengths.nbytes + np.cumsum(lengths)).tolist()
            yield [content[start:end] for start, end in zip([lengths.nbytes, *ends], ends, strict=False)]

    def close(self) -> None:
        self._file.close()


def _check_room(file: int, size: int) -> None:
    room = os.fstatvfs(file)
    if room.f_bavail * room.f_frsize < size + LEFT_FREE_BYTES:
        raise NotKeptError(f"the temporary folder would have less than {show_bytes(LEFT_FREE_BYTES)} left")


def _cannot_write(error: OSError) -> str:
    return f"the temporary folder cannot be written ({error.strerror or type(error).__name__})"


class InProgressTransactions:
    """Turns what a stream of protocol version 2 sends into what one of version 1 would send."""

    def __init__(self) -> None:
        self._transactions: dict[int, _Transaction] = {}
        self._current: _Transaction | None = None
        self._block: list[Message] = []

    def close(self) -> None:
        """Delete the files."""
        for transaction in self._transactions.values():
            transaction.close()
        self._transactions = {}

    def take(self, chunk: Chunk) -> Iterator[Chunk]:
        """Yield the messages of a chunk that are of no transaction in progress, with those of transactions
        that commit in it. The last one has the chunk's keepalive. Clears the chunk's messages.

        Raises NotKeptError, WireError.
        """
        if not chunk.has_blocks:
            yield chunk
            return
        passed: list[Message] = []
        for message in chunk.messages:
            if len(message) <= HEADER:
                raise WireError("a received message ends too early")
            if self._current is not None:
                self._take_in_block(message)
            elif message[HEADER] == _COMMIT:
                if passed:
                    yield _chunk(passed)
                    passed = []
                yield from self._committed(message)
            elif message[HEADER] == _START:
                self._current = self._begun(message)
            elif message[HEADER] == _ABORT:
                self._abort(message)
            else:
                passed.append(message)
        self._keep()
        chunk.messages.clear()
        if passed or chunk.keepalive is not None:
            yield replace(_chunk(passed), keepalive=chunk.keepalive)

    def _take_in_block(self, message: Message) -> None:
        kind = message[HEADER]
        if kind == _STOP:
            self._keep()
            self._current = None
        elif kind != _ORIGIN:
            self._block.append(message)

    def _keep(self) -> None:
        if self._block:
            assert self._current is not None
            self._current.add(self._block)
            self._block = []

    def _begun(self, message: Message) -> _Transaction:
        _, xid, is_first = _unpack(_STREAM_START, message)
        found = self._transactions.get(xid)
        if (found is None) != bool(is_first):
            raise NotKeptError("a transaction was received in part only")
        if found is None:
            try:
                found = self._transactions[xid] = _Transaction(xid)
            except OSError as error:
                raise NotKeptError(_cannot_write(error)) from None
        return found

    def _abort(self, message: Message) -> None:
        _, xid, subxid = _unpack(_STREAM_ABORT, message)
        # No message of a subtransaction is kept, and of some transactions the server has sent nothing before.
        if xid == subxid and xid in self._transactions:
            self._transactions.pop(xid).close()

    def _committed(self, message: Message) -> Iterator[Chunk]:
        _, xid, flags, commit_lsn, end_lsn, commit_us = _unpack(_STREAM_COMMIT, message)
        if xid not in self._transactions:
            raise NotKeptError("a transaction commits of which nothing was received")
        with closing(self._transactions.pop(xid)) as transaction:
            log.info(
                "transaction %d has committed; %s of it had been received before",
                *(xid, show_bytes(transaction.size)),
            )
            begin: list[Message] = [_NO_HEADER + _BEGIN.pack(b"B", commit_lsn, commit_us, xid)]
            for messages in transaction.messages():
                yield _chunk([*begin, *messages])
                begin = []
            end = _NO_HEADER + _END.pack(b"C", flags, commit_lsn, end_lsn, commit_us)
            yield _chunk([*begin, end])


def _chunk(messages: list[Message]) -> Chunk:
    return Chunk(messages, sum(map(len, messages)))


def _unpack(form: struct.Struct, message: Message) -> tuple[int, ...]:
    try:
        return form.unpack(message[HEADER:])
    except struct.error:
        raise NotKeptError("a message about a transaction has another length") from None
