"""Deletion vectors: which rows of a data file are gone, as Delta writes it down.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Deletion Vectors" and "Deletion Vector Format":
a bitmap of row numbers (64-bit Roaring, portable) behind a magic number; several to a file, each between its
size and its CRC-32, all after one byte for the version of the format.
"""

from __future__ import annotations

import struct
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyarrow import fs
from pyroaring import BitMap64

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.storage import read_range

_MAGIC = struct.pack("<i", 1681511377)
_FORMAT = b"\x01"
_SIZE, _CHECKSUM = struct.Struct(">i"), struct.Struct(">I")
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_UUID_DIGITS = 20


@dataclass(frozen=True)
class VectorRecord:
    """Where a deletion vector lies, as an `add` or `remove` of the log says it.

    `storage`: u, in a file of the table named after a uuid; i, in `place` itself; p, in a file anywhere.
    """

    storage: str
    place: str
    offset: int
    size: int
    rows: int

    @classmethod
    def of_action(cls, told: Mapping[str, Any] | None) -> VectorRecord | None:
        """The one of an `add` or `remove`; None where it has none."""
        if told is None:
            return None
        offset = told.get("offset") or 0
        return cls(
            told["storageType"], told["pathOrInlineDv"], offset, told["sizeInBytes"], told["cardinality"]
        )

    def to_action(self) -> dict[str, Any]:
        """As the log has it."""
        return {
            "storageType": self.storage,
            "pathOrInlineDv": self.place,
            **({} if self.storage == "i" else {"offset": self.offset}),
            "sizeInBytes": self.size,
            "cardinality": self.rows,
        }

    @property
    def end(self) -> int:
        """Where in its file it ends, from the file's beginning, in bytes."""
        return self.offset + _SIZE.size + self.size + _CHECKSUM.size

    @property
    def path(self) -> str | None:
        """Its file, below the table's folder; None when it has none there."""
        if self.storage != "u":
            return None
        prefix, digits = self.place[:-_UUID_DIGITS], self.place[-_UUID_DIGITS:]
        return vector_path(uuid.UUID(bytes=from_z85(digits)), prefix)


def vector_path(name: uuid.UUID, prefix: str = "") -> str:
    """The path of a file of vectors, below the table's folder."""
    return f"{prefix}{'/' if prefix else ''}deletion_vector_{name}.bin"


def encode(vectors: Mapping[str, BitMap64], name: uuid.UUID) -> tuple[bytes, dict[str, VectorRecord]]:
    """The content of a file of vectors that has this name, and where in it the one of each data file lies."""
    parts, at = [_FORMAT], len(_FORMAT)
    records = {}
    for path, rows in vectors.items():
        bitmap = _MAGIC + rows.serialize()
        records[path] = VectorRecord("u", to_z85(name.bytes), at, len(bitmap), len(rows))
        parts += [_SIZE.pack(len(bitmap)), bitmap, _CHECKSUM.pack(zlib.crc32(bitmap))]
        at += _SIZE.size + len(bitmap) + _CHECKSUM.size
    return b"".join(parts), records


def read_vector(filesystem: fs.FileSystem, root: str, record: VectorRecord) -> BitMap64:
    """The rows that a vector marks. `root`: the table's path in its filesystem.

    Raises FileNotFoundError, OSError; LakeTableError when it is not what the log says of it.
    """
    if record.storage == "i":
        return _decode(from_z85(record.place)[: record.size], record)
    path = record.path
    if path is None:
        raise LakeTableError(
            f"{root}: a deletion vector lies outside of the table, as in a shallow clone of another",
            "replicate into a table of its own",
        )
    framed = read_range(filesystem, f"{root}/{path}", record.offset, record.end - record.offset)
    bitmap = framed[_SIZE.size : -_CHECKSUM.size]
    if framed != _SIZE.pack(record.size) + bitmap + _CHECKSUM.pack(zlib.crc32(bitmap)):
        raise _damaged(record)
    return _decode(bitmap, record)


def _decode(bitmap: bytes, record: VectorRecord) -> BitMap64:
    if not bitmap.startswith(_MAGIC):
        raise _damaged(record)
    try:
        rows = BitMap64.deserialize(bitmap[len(_MAGIC) :])
    except ValueError:
        raise _damaged(record) from None
    if len(rows) != record.rows:
        raise _damaged(record)
    return rows


def _damaged(record: VectorRecord) -> LakeTableError:
    return LakeTableError(
        f"the deletion vector in {record.path or 'the log'} is not the one that was written"
    )


def to_z85(data: bytes) -> str:
    """Base 85 as ZeroMQ has it (https://rfc.zeromq.org/spec/32/): four bytes are five digits."""
    digits = []
    for (number,) in struct.iter_unpack(">I", data):
        digits += [_Z85[number // 85**power % 85] for power in (4, 3, 2, 1, 0)]
    return "".join(digits)


def from_z85(text: str) -> bytes:
    """The reverse. Raises LakeTableError for what is no such text."""
    parts = (text[start : start + 5] for start in range(0, len(text), 5))
    try:
        numbers = [sum(_Z85.index(digit) * 85 ** (4 - at) for at, digit in enumerate(part)) for part in parts]
        if len(text) % 5:
            raise ValueError
        return struct.pack(f">{len(numbers)}I", *numbers)
    except (ValueError, struct.error):
        raise LakeTableError("the log names a deletion vector in a way that is not Delta's") from None
