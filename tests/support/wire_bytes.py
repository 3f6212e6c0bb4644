"""pgoutput messages as bytes, CopyData header included, and a slow reader of them to compare with."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

Value = str | None | type(...)
"""A column's text, NULL, or `...` for an unchanged TOAST value."""

PG_EPOCH_US = 946_684_800_000_000


def wal_data(payload: bytes, start: int = 0, end: int = 0) -> bytes:
    return struct.pack(">cqqq", b"w", start, end, 0) + payload


def put_begin(commit_lsn: int, xid: int, commit_us: int = 0) -> bytes:
    return wal_data(struct.pack(">cqqI", b"B", commit_lsn, commit_us, xid))


def put_commit(commit_lsn: int, end_lsn: int, commit_us: int = 0) -> bytes:
    return wal_data(struct.pack(">cBqqq", b"C", 0, commit_lsn, end_lsn, commit_us))


def put_relation(
    oid: int, schema: str, name: str, columns: Iterable[tuple[str, int, int, bool]], identity: str = "d"
) -> bytes:
    """Return a Relation message. `columns`: (name, type oid, typmod, part of the identity)."""
    columns = list(columns)
    text = struct.pack(">cI", b"R", oid) + _name(schema) + _name(name) + identity.encode()
    text += struct.pack(">H", len(columns))
    for column, type_oid, typmod, is_identity in columns:
        text += struct.pack(">B", is_identity) + _name(column) + struct.pack(">Ii", type_oid, typmod)
    return wal_data(text)


def put_type(oid: int, schema: str, name: str) -> bytes:
    return wal_data(struct.pack(">cI", b"Y", oid) + _name(schema) + _name(name))


def put_origin(lsn: int, name: str) -> bytes:
    return wal_data(struct.pack(">cq", b"O", lsn) + _name(name))


def put_insert(oid: int, new: Sequence[Any]) -> bytes:
    return wal_data(struct.pack(">cI", b"I", oid) + b"N" + _tuple(new))


def put_update(oid: int, new: Sequence[Any], old: Sequence[Any] | None = None, kind: bytes = b"K") -> bytes:
    before = kind + _tuple(old) if old is not None else b""
    return wal_data(struct.pack(">cI", b"U", oid) + before + b"N" + _tuple(new))


def put_delete(oid: int, old: Sequence[Any], kind: bytes = b"K") -> bytes:
    return wal_data(struct.pack(">cI", b"D", oid) + kind + _tuple(old))


def put_truncate(oids: Sequence[int], options: int = 0) -> bytes:
    return wal_data(struct.pack(f">cIB{len(oids)}I", b"T", len(oids), options, *oids))


def put_message(lsn: int, prefix: str, content: bytes, *, transactional: bool) -> bytes:
    head = struct.pack(">cBq", b"M", transactional, lsn) + _name(prefix)
    return wal_data(head + struct.pack(">I", len(content)) + content)


def _name(text: str) -> bytes:
    return text.encode() + b"\0"


def _tuple(values: Sequence[Any]) -> bytes:
    parts = [struct.pack(">H", len(values))]
    for value in values:
        if value is None:
            parts.append(b"n")
        elif value is ...:
            parts.append(b"u")
        else:
            data = value.encode()
            parts.append(struct.pack(">cI", b"t", len(data)) + data)
    return b"".join(parts)


class Oracle:
    """A slow and plain splitter of messages, one by one. Raises ValueError for anything but pgoutput."""

    def __init__(self) -> None:
        self.open = False
        self.stamp: tuple[int, int | None, int] = (0, None, 0)  # commit LSN, time, xid
        self.ordinal = 0
        self.rows: list[tuple[Any, ...]] = []
        self.controls: list[tuple[Any, ...]] = []
        self.ended: list[tuple[int, int]] = []

    def take(self, message: bytes) -> None:
        if len(message) <= 25 or message[:1] != b"w":
            raise ValueError
        tag, self.body, self.at = message[25:26], message, 26
        handlers = {b"B": self.take_begin, b"C": self.take_commit, b"M": self.take_message}
        handlers |= dict.fromkeys((b"I", b"U", b"D"), self.take_row)
        handlers |= dict.fromkeys((b"R", b"T"), self.take_control)
        handlers |= dict.fromkeys((b"Y", b"O"), self.take_other)
        self.need(tag in handlers)
        handlers[tag](tag.decode())

    def read(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(">" + form)
        piece, self.at = self.body[self.at : self.at + size], self.at + size
        if len(piece) != size:
            raise ValueError
        return struct.unpack(">" + form, piece)

    def need(self, holds: bool) -> None:
        if not holds:
            raise ValueError

    def take_begin(self, _: str) -> None:
        lsn, us, xid = self.read("qqI")
        self.need(self.at == len(self.body) and not self.open)
        self.open, self.stamp, self.ordinal = True, (lsn, us + PG_EPOCH_US, xid), 0

    def take_commit(self, _: str) -> None:
        _, lsn, end, _ = self.read("Bqqq")
        self.need(self.at == len(self.body) and self.open and lsn == self.stamp[0])
        self.open = False
        self.ended.append((lsn, end))

    def take_row(self, tag: str) -> None:
        self.need(self.open)
        (oid,) = self.read("I")
        kind = self.read("c")[0]
        old = new = None
        unchanged: list[int] = []
        if tag != "I" and kind in (b"K", b"O"):
            old, none = self.read_tuple()
            self.need(not none)
            kind = self.read("c")[0] if tag == "U" else b""
        if tag != "D":
            self.need(kind == b"N")
            new, unchanged = self.read_tuple()
            self.need(tag == "U" or not unchanged)
        self.need(self.at == len(self.body) and (tag != "D" or old is not None))
        self.rows.append((*self.stamp, self.ordinal, oid, tag, new, old, unchanged or None))
        self.ordinal += 1

    def read_tuple(self) -> tuple[list[str | None], list[int]]:
        values: list[str | None] = []
        unchanged = []
        for index in range(self.read("H")[0]):
            kind = self.read("c")[0]
            self.need(kind in (b"t", b"n", b"u"))
            if kind == b"t":
                (size,) = self.read("I")
                self.need(size <= len(self.body) - self.at)
            values.append(self.read(f"{size}s")[0].decode() if kind == b"t" else None)
            unchanged += [index] if kind == b"u" else []
        self.need(len(values) <= 0x7FFF)
        return values, unchanged

    def take_control(self, tag: str) -> None:
        self.need(self.open)
        (count,) = self.read("I")
        self.controls.append((*self.stamp, self.ordinal, tag, self.body[25:]))
        self.ordinal += count if tag == "T" else 1

    def take_message(self, tag: str) -> None:
        flags, lsn = self.read("Bq")
        self.need(bool(flags & 1) == self.open)
        if not self.open:
            self.stamp, self.ordinal = (lsn - 1, None, 0), 0
            self.ended.append((lsn - 1, lsn))
        self.controls.append((*self.stamp, self.ordinal, tag, self.body[25:]))
        self.ordinal += 1

    def take_other(self, _: str) -> None:
        """Ignore messages of types and origins."""
