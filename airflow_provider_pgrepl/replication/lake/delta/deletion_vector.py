"""Deletion vectors: bitmaps of the deleted rows of a data file, in Delta's format.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Deletion Vectors" and "Deletion Vector Format": a
vector is a magic number and a bitmap of row numbers (64-bit Roaring, portable). A file of vectors begins with
one byte for the version of the format. Each vector in it is preceded by its size and followed by its CRC-32.
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
    """The location of a deletion vector, as in an `add` or `remove` action of the log.

    `storage`: u, in a file of the table that is named by a UUID; i, inline in `place`; p, in a file at any
    path. `offset`, `size`: bytes. `rows`: the number of deleted rows.
    """

    storage: str
    place: str
    offset: int
    size: int
    rows: int

    @classmethod
    def of_action(cls, descriptor: Mapping[str, Any] | None) -> VectorRecord | None:
        """Return the record for the `deletionVector` field of an `add` or `remove` action; None for None."""
        if descriptor is None:
            return None
        offset = descriptor.get("offset") or 0
        return cls(
            descriptor["storageType"],
            descriptor["pathOrInlineDv"],
            offset,
            descriptor["sizeInBytes"],
            descriptor["cardinality"],
        )

    def to_action(self) -> dict[str, Any]:
        """Return the record as the `deletionVector` field of an action."""
        return {
            "storageType": self.storage,
            "pathOrInlineDv": self.place,
            **({} if self.storage == "i" else {"offset": self.offset}),
            "sizeInBytes": self.size,
            "cardinality": self.rows,
        }

    @property
    def end(self) -> int:
        """The end of the vector with its checksum, in bytes from the start of its file."""
        return self.offset + _SIZE.size + self.size + _CHECKSUM.size

    @property
    def path(self) -> str | None:
        """The path of its file below the table's folder; None if it is inline or elsewhere."""
        if self.storage != "u":
            return None
        prefix, digits = self.place[:-_UUID_DIGITS], self.place[-_UUID_DIGITS:]
        return vector_path(uuid.UUID(bytes=from_z85(digits)), prefix)


def vector_path(name: uuid.UUID, prefix: str = "") -> str:
    """Return the path of a file of vectors, below the table's folder."""
    return f"{prefix}{'/' if prefix else ''}deletion_vector_{name}.bin"


def encode(vectors: Mapping[str, BitMap64], name: uuid.UUID) -> tuple[bytes, dict[str, VectorRecord]]:
    """Return the content of a file of vectors with this name, and the record of each data file's vector."""
    parts, at = [_FORMAT], len(_FORMAT)
    records = {}
    for path, rows in vectors.items():
        bitmap = _MAGIC + rows.serialize()
        records[path] = VectorRecord("u", to_z85(name.bytes), at, len(bitmap), len(rows))
        parts += [_SIZE.pack(len(bitmap)), bitmap, _CHECKSUM.pack(zlib.crc32(bitmap))]
        at += _SIZE.size + len(bitmap) + _CHECKSUM.size
    return b"".join(parts), records


def read_vector(filesystem: fs.FileSystem, root: str, record: VectorRecord) -> BitMap64:
    """Return the row numbers that a vector marks as deleted. `root`: the table's path in its filesystem.

    Raises FileNotFoundError, OSError. Raises LakeTableError if the vector is damaged, does not match its
    record, or is stored outside of the table.
    """
    if record.storage == "i":
        return _decode(root, from_z85(record.place)[: record.size], record)
    path = record.path
    if path is None:
        raise LakeTableError(
            f"{root}: a deletion vector lies outside of the table, as in a shallow clone of another",
            "replicate into a table of its own",
        )
    framed = read_range(filesystem, f"{root}/{path}", record.offset, record.end - record.offset)
    bitmap = framed[_SIZE.size : -_CHECKSUM.size]
    if framed != _SIZE.pack(record.size) + bitmap + _CHECKSUM.pack(zlib.crc32(bitmap)):
        raise _damaged(root, record)
    return _decode(root, bitmap, record)


def _decode(root: str, bitmap: bytes, record: VectorRecord) -> BitMap64:
    if not bitmap.startswith(_MAGIC):
        raise _damaged(root, record)
    try:
        rows = BitMap64.deserialize(bitmap[len(_MAGIC) :])
    except ValueError:
        raise _damaged(root, record) from None
    if len(rows) != record.rows:
        raise _damaged(root, record)
    return rows


def _damaged(root: str, record: VectorRecord) -> LakeTableError:
    return LakeTableError(
        f"{root}: the deletion vector in {record.path or 'the log'} does not match its entry in the table's"
        " log: it was replaced or damaged"
    )


def to_z85(data: bytes) -> str:
    """Encode bytes in ZeroMQ's base 85 (https://rfc.zeromq.org/spec/32/): four bytes give five digits."""
    digits = []
    for (number,) in struct.iter_unpack(">I", data):
        digits += [_Z85[number // 85**power % 85] for power in (4, 3, 2, 1, 0)]
    return "".join(digits)


def from_z85(text: str) -> bytes:
    """Decode text in ZeroMQ's base 85. Raises LakeTableError if the text is not valid."""
    parts = (text[start : start + 5] for start in range(0, len(text), 5))
    try:
        numbers = [sum(_Z85.index(digit) * 85 ** (4 - at) for at, digit in enumerate(part)) for part in parts]
        if len(text) % 5:
            raise ValueError
        return struct.pack(f">{len(numbers)}I", *numbers)
    except (ValueError, struct.error):
        raise LakeTableError("the log names a deletion vector in a way that is not Delta's") from None
