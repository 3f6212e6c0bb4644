"""Encoders from PostgreSQL's text values to Avro's binary encoding, one column at a time.

Source: Avro 1.12, "Binary Encoding". Each encoder returns a list as long as its column, with None for NULL,
and raises UnsupportedValue for a value that its type cannot hold.

Also the fingerprint of an Avro schema, as creek computes it: CRC-64-AVRO of hamba/avro's canonical form,
big-endian. That form keeps logical types, which Avro's own Parsing Canonical Form drops, so the usual
libraries return other fingerprints.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions
from airflow_provider_pgrepl.replication.values.nested import split_array
from airflow_provider_pgrepl.replication.values.parser import UnsupportedValue
from airflow_provider_pgrepl.replication.values.registry import parser_of

Encoded = list[bytes | None]
Encoder = Callable[[pa.Array], Encoded]

_MINUS_INFINITY = "-infinity"
_TEXTS = "let the column be a text (text_columns), or skip the event (on_error: skip_and_record)"
_EMPTY = 0xC15D213AA4D7A795
_KEPT = ("name", "type", "fields", "symbols", "items", "logicalType", "precision", "scale")
Schema = dict[str, Any] | list[Any] | str
"""An Avro schema in its JSON form, with full names; the order of each object's keys is kept."""


def unique_long(number: int) -> bytes:
    """Encode a long without caching the result: for values that are not likely to repeat."""
    rest = (number << 1) ^ (number >> 63)
    found = bytearray()
    while rest > 0x7F:
        found.append(rest & 0x7F | 0x80)
        rest >>= 7
    found.append(rest)
    return bytes(found)


long = lru_cache(1 << 16)(unique_long)
"""Encode a long, with a cache. Also for an int, the index of a union's branch, and a length."""


def string(text: bytes) -> bytes:
    """Encode a string; also for bytes."""
    return long(len(text)) + text


def in_branch(encode: Encoder, branch: int) -> Encoder:
    """Return an encoder that writes the index `branch` of a union before each value that is not NULL."""
    place = long(branch)
    return lambda texts: [None if one is None else place + one for one in encode(texts)]


def booleans(texts: pa.Array) -> Encoded:
    """Encode booleans, which PostgreSQL writes as `t` and `f`."""
    return [None if text is None else b"\x01" if text == "t" else b"\x00" for text in texts.to_pylist()]


def integers(texts: pa.Array) -> Encoded:
    """Encode ints and longs of any size."""
    return [None if text is None else long(int(text)) for text in texts.to_pylist()]


def floats(texts: pa.Array) -> Encoded:
    """Encode single-precision floats, including `NaN` and `Infinity`."""
    return _packed("<f", texts)


def doubles(texts: pa.Array) -> Encoded:
    """Encode double-precision floats, including `NaN` and `Infinity`."""
    return _packed("<d", texts)


def strings(texts: pa.Array) -> Encoded:
    """Encode the text values unchanged, in UTF-8."""
    return [None if text is None else string(text) for text in texts.cast(pa.large_binary()).to_pylist()]


def decimals(scale: int) -> Encoder:
    """Return an encoder of decimals: the unscaled number in two's complement, big-endian, in as few bytes as
    possible."""

    def encode(texts: pa.Array) -> Encoded:
        return [None if text is None else string(_unscaled(text, scale)) for text in texts.to_pylist()]

    return encode


def moments(oid: int, branch: int) -> Encoder:
    """Return an encoder of dates in days, or of timestamps in microseconds, since 1970-01-01. An infinite
    value becomes the enum of infinities, which is the union's next branch."""
    parser = parser_of(PgType(oid), ColumnOptions())
    counted = pa.int32() if parser.lake_type == pa.date32() else pa.int64()

    def counts(finite: pa.Array) -> list[int | None]:
        found: list[int | None] = parser.parse(finite).cast(counted).to_pylist()
        return found

    return _or_infinite(counts, branch)


def times(texts: pa.Array) -> Encoded:
    """Encode times of day, in microseconds."""
    return [None if text is None else long(_time(text)) for text in texts.to_pylist()]


def arrays(encode: Encoder, delimiter: str) -> Encoder:
    """Return an encoder that writes the elements of each array in one block. It raises UnsupportedValue
    for an element that is NULL, and for an array with lower bounds or more than one dimension."""

    def encode_arrays(texts: pa.Array) -> Encoded:
        parts = split_array(texts, delimiter)
        elements = encode(parts.texts)
        starts, found = parts.starts.to_pylist(), []
        for index, is_null in enumerate(texts.is_null().to_pylist()):
            own = elements[starts[index] : starts[index + 1]]
            if None in own:
                raise UnsupportedValue("an array with an element that is NULL", _TEXTS)
            found.append(None if is_null else _block(own))
        return found

    return encode_arrays


def _block(elements: Sequence[bytes | None]) -> bytes:
    if not elements:
        return b"\x00"
    return b"".join([long(len(elements)), *(one for one in elements if one is not None), b"\x00"])


def _packed(form: str, texts: pa.Array) -> Encoded:
    pack = struct.Struct(form).pack
    return [None if text is None else pack(float(text)) for text in texts.to_pylist()]


def _unscaled(text: str, scale: int) -> bytes:
    whole, _, fraction = text.partition(".")
    if len(fraction) == scale and (whole + fraction).lstrip("-").isdecimal():
        number = int(whole + fraction)
    else:
        number = _rescaled(text, scale)
    return number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)


def _rescaled(text: str, scale: int) -> int:
    """Return the unscaled number of a value that was written before the column had this scale. Raises
    UnsupportedValue if no decimal of this scale equals the value."""
    sign, digits, exponent = Decimal(text).as_tuple()
    if isinstance(exponent, int):
        shift, number = exponent + scale, int("".join(map(str, digits)))
        factor: int = 10 ** abs(shift)
        whole, rest = divmod(number, factor) if shift < 0 else (number * factor, 0)
        if not rest:
            return -whole if sign else whole
    raise UnsupportedValue("one that no decimal of this scale is", _TEXTS)


def _or_infinite(counts: Callable[[pa.Array], list[int | None]], branch: int) -> Encoder:
    place, infinity = long(branch), long(branch + 1)

    def encode(texts: pa.Array) -> Encoded:
        infinite = pc.is_in(texts, pa.array(["infinity", _MINUS_INFINITY], texts.type))
        finite = pc.if_else(infinite, pa.scalar(None, texts.type), texts)
        found: Encoded = [None if count is None else place + long(count) for count in counts(finite)]
        if pc.any(infinite).as_py():
            for index in pc.indices_nonzero(infinite).to_pylist():
                found[index] = infinity + long(int(texts[index].as_py() == _MINUS_INFINITY))
        return found

    return encode


def _time(text: str) -> int:
    hours, minutes, seconds = text.split(":")
    second, _, fraction = seconds.partition(".")
    whole = (int(hours) * 60 + int(minutes)) * 60 + int(second)
    return whole * 1_000_000 + int(fraction.ljust(6, "0"))


def to_text(schema: Schema) -> str:
    """Return the schema as creek stores and sends it, with the properties `pgKey` and `pgType`."""
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False)


def canonical_form(schema: Schema) -> str:
    """Return the canonical form, from which the fingerprint is computed: the schema without custom
    properties."""
    return to_text(_without_properties(schema))


def fingerprint(schema: Schema) -> bytes:
    """Return the fingerprint of a schema, 8 bytes long."""
    return crc64(canonical_form(schema).encode()).to_bytes(8, "big")


def fingerprint_text(value: bytes) -> str:
    """Return a fingerprint as messages carry it: URL-safe base64, with padding."""
    return base64.urlsafe_b64encode(value).decode()


def crc64(data: bytes) -> int:
    """Return the CRC-64-AVRO of `data` (Avro 1.12, "Schema Fingerprints")."""
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
