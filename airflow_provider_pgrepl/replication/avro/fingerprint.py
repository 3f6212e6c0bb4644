"""The fingerprint of an Avro schema, as creek has it: CRC-64-AVRO of hamba/avro's canonical form, big-endian.

That form keeps logical types, which Avro's own Parsing Canonical Form drops; so the usual libraries'
fingerprints are others.
"""

from __future__ import annotations

import base64
import json
from typing import Any

_EMPTY = 0xC15D213AA4D7A795
_KEPT = ("name", "type", "fields", "symbols", "items", "logicalType", "precision", "scale")
Schema = dict[str, Any] | list[Any] | str
"""An Avro schema as JSON has it, with full names; each object's keys stand as they are written."""


def to_text(schema: Schema) -> str:
    """As creek stores and sends it, with the properties `pgKey` and `pgType`."""
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False)


def canonical_form(schema: Schema) -> str:
    """What the fingerprint is of: the schema without properties."""
    return to_text(_without_properties(schema))


def fingerprint(schema: Schema) -> bytes:
    """Eight bytes."""
    return crc64(canonical_form(schema).encode()).to_bytes(8, "big")


def fingerprint_text(value: bytes) -> str:
    """As messages name it: base64, of the alphabet that is safe in URLs, with its padding."""
    return base64.urlsafe_b64encode(value).decode()


def crc64(data: bytes) -> int:
    """CRC-64-AVRO (Avro 1.12, "Schema Fingerprints")."""
    value = _EMPTY
    for byte in data:
        value = (value >> 8) ^ _TABLE[(value ^ byte) & 0xFF]
    return value


def _without_properties(schema: Schema) -> Schema:
    if isinstance(schema, dict):
        return {key: _without_properties(value) for key, value in schema.items() if key in _KEPT}
    if isinstance(schema, list):
        return [_without_properties(one) for one in schema]
    return schema


def _table() -> list[int]:
    table = []
    for index in range(256):
        value = index
        for _ in range(8):
            value = (value >> 1) ^ (_EMPTY if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()
