"""The pgoutput messages that are rare enough to be parsed in plain Python: Relation, Truncate, Message."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from airflow_provider_pgrepl.errors import WireError

_UINT16 = struct.Struct(">H")
_UINT32 = struct.Struct(">I")
_INT32 = struct.Struct(">i")
_UINT64 = struct.Struct(">Q")

DDL_PREFIX = "pgrepl.ddl"
"""The prefix of the logical messages that this package's event trigger writes."""

_LEFT_OUT = 0x80
"""The flag that `without_content` sets in a Message. PostgreSQL uses only the lowest bit of the flags."""
_MESSAGE, _MESSAGE_HEAD = ord("M"), 10
_LONGEST_PREFIX = 1_000

TRUNCATE_CASCADE = 1
TRUNCATE_RESTART_IDENTITY = 2


@dataclass(frozen=True)
class WireColumn:
    """A column of a Relation message. `is_identity`: the column is part of the replica identity."""

    name: str
    type_oid: int
    typmod: int
    is_identity: bool


@dataclass(frozen=True)
class RelationMessage:
    """An `R` message: the name, replica identity and columns of the relation of the rows that follow."""

    oid: int
    schema: str
    name: str
    replica_identity: str
    columns: tuple[WireColumn, ...]


@dataclass(frozen=True)
class TruncateMessage:
    """A `T` message: all tables of one TRUNCATE statement."""

    oids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True)
class LogicalMessage:
    """An `M` message, written by pg_logical_emit_message. `lsn`: the end of its WAL record.

    `left_out`: the size in bytes of a content that `without_content` removed; `content` is empty then.
    """

    transactional: bool
    lsn: int
    prefix: str
    content: bytes
    left_out: int = 0


class _Reader:
    """A reader of one message, from front to back. Raises WireError where the message is too short."""

    def __init__(self, data: bytes, kind: str) -> None:
        self._data = data
        self._at = 1
        self._kind = kind

    def take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) != count:
            raise WireError(f"a {self._kind} message ends too early")
        self._at += count
        return piece

    def number(self, form: struct.Struct) -> int:
        value: int = form.unpack(self.take(form.size))[0]
        return value

    def text(self) -> str:
        end = self._data.find(b"\0", self._at)
        if end < 0:
            raise WireError(f"a {self._kind} message ends inside a name")
        try:
            value = self._data[self._at : end].decode()
        except UnicodeDecodeError:
            raise WireError(f"a name in a {self._kind} message is not UTF-8") from None
        self._at = end + 1
        return value

    def end(self) -> None:
        if self._at != len(self._data):
            raise WireError(
                f"a {self._kind} message has {len(self._data) - self._at} bytes after its last field"
            )


def parse_relation(data: bytes) -> RelationMessage:
    """Parse an `R` message. Raises WireError."""
    reader = _Reader(data, "Relation")
    oid = reader.number(_UINT32)
    schema = reader.text() or "pg_catalog"
    name = reader.text()
    identity = reader.take(1).decode("latin-1")
    columns = tuple(_column(reader) for _ in range(reader.number(_UINT16)))
    reader.end()
    return RelationMessage(oid, schema, name, identity, columns)


def _column(reader: _Reader) -> WireColumn:
    flags = reader.take(1)[0]
    name = reader.text()
    return WireColumn(name, reader.number(_UINT32), reader.number(_INT32), bool(flags & 1))


def parse_truncate(data: bytes) -> TruncateMessage:
    """Parse a `T` message. Raises WireError."""
    reader = _Reader(data, "Truncate")
    count = reader.number(_UINT32)
    options = reader.take(1)[0]
    raw = reader.take(4 * count)
    reader.end()
    return TruncateMessage(
        struct.unpack(f">{count}I", raw),
        bool(options & TRUNCATE_CASCADE),
        bool(options & TRUNCATE_RESTART_IDENTITY),
    )


def parse_message(data: bytes) -> LogicalMessage:
    """Parse an `M` message, complete or as `without_content` returns it. Raises WireError."""
    reader = _Reader(data, "Message")
    flags = reader.take(1)[0]
    lsn = reader.number(_UINT64)
    prefix = reader.text()
    size = reader.number(_UINT32)
    left_out = size if flags & _LEFT_OUT else 0
    content = reader.take(size - left_out)
    reader.end()
    return LogicalMessage(bool(flags & 1), lsn, prefix, content, left_out)


def without_content(message: memoryview, at: int, most: int) -> memoryview:
    """Return the message that begins at offset `at`; remove the content of an `M` if it exceeds `most` bytes.

    The size of the removed content stays in the message. The content of an `M` is also removed if its prefix
    is longer than `most` and 1,000 bytes; the prefix is cut to 1,000 bytes then. Any other message is
    returned unchanged. Raises WireError.
    """
    if len(message) <= at or message[at] != _MESSAGE:
        return message
    start = at + _MESSAGE_HEAD
    end = next((found for found in _ends_of_text(message, start)), None)
    if end is None or len(message) < end + 1 + _UINT32.size:
        raise WireError("a Message message ends inside its prefix")
    size = message[end + 1 : end + 1 + _UINT32.size]
    if _UINT32.unpack(size)[0] <= most and end - start <= max(most, _LONGEST_PREFIX):
        return message
    flags = message[at + 1] | _LEFT_OUT
    prefix = bytes(message[start : min(end, start + _LONGEST_PREFIX)])
    if end > start + _LONGEST_PREFIX:
        prefix = prefix.decode(errors="ignore").encode() + "…".encode()
    head = (message[: at + 1], bytes([flags]), message[at + 2 : start], prefix, b"\0", size)
    return memoryview(b"".join(head))


def _ends_of_text(message: memoryview, start: int) -> Iterator[int]:
    """Yield positions of NUL bytes from `start` on. The first is the end of the text that begins there."""
    for piece in range(start, len(message), _LONGEST_PREFIX):
        found = bytes(message[piece : piece + _LONGEST_PREFIX]).find(b"\0")
        if found >= 0:
            yield piece + found
