"""Values in Avro's binary encoding, a column at a time: texts as PostgreSQL writes them → bytes.

(Avro 1.12, "Binary Encoding".) Each encoder gives a list as long as its column, None for NULL, and raises
Unholdable for a value that its type cannot hold.

The fingerprint of an Avro schema, as creek has it: CRC-64-AVRO of hamba/avro's canonical form, big-endian.
That form keeps logical types, which Avro's own Parsing Canonical Form drops; so the usual libraries'
fingerprints are others.
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
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice
from airflow_provider_pgrepl.replication.values.nested import split_array
from airflow_provider_pgrepl.replication.values.parser import Unholdable
from airflow_provider_pgrepl.replication.values.registry import parser_of

Encoded = list[bytes | None]
Encoder = Callable[[pa.Array], Encoded]

_MINUS_INFINITY = "-infinity"
_TEXTS = "let the column be a text (text_columns), or skip the event (on_error: skip_and_record)"
_EMPTY = 0xC15D213AA4D7A795
_KEPT = ("name", "type", "fields", "symbols", "items", "logicalType", "precision", "scale")
Schema = dict[str, Any] | list[Any] | str
"""An Avro schema as JSON has it, with full names; each object's keys stand as they are written."""


def unique_long(number: int) -> bytes:
    """A long that is not likely to come again."""
    rest = (number << 1) ^ (number >> 63)
    found = bytearray()
    while rest > 0x7F:
        found.append(rest & 0x7F | 0x80)
        rest >>= 7
    found.append(rest)
    return bytes(found)


long = lru_cache(1 << 16)(unique_long)
"""A long, and also an int, the place of a union's branch, and a length."""


def string(text: bytes) -> bytes:
    """A string, and also bytes."""
    return long(len(text)) + text


def in_branch(encode: Encoder, branch: int) -> Encoder:
    """What is not NULL is of a union's branch with that place."""
    place = long(branch)
    return lambda texts: [None if one is None else place + one for one in encode(texts)]


def booleans(texts: pa.Array) -> Encoded:
    """`t` and `f`."""
    return [None if text is None else b"\x01" if text == "t" else b"\x00" for text in texts.to_pylist()]


def integers(texts: pa.Array) -> Encoded:
    """Ints and longs, of any size."""
    return [None if text is None else long(int(text)) for text in texts.to_pylist()]


def floats(texts: pa.Array) -> Encoded:
    """Single precision, `NaN` and `Infinity` too."""
    return _packed("<f", texts)


def doubles(texts: pa.Array) -> Encoded:
    """Double precision, as floats."""
    return _packed("<d", texts)


def strings(texts: pa.Array) -> Encoded:
    """The texts themselves."""
    return [None if text is None else string(text) for text in texts.cast(pa.large_binary()).to_pylist()]


def decimals(scale: int) -> Encoder:
    """The unscaled number in two's complement, big-endian, as short as it can be."""

    def encode(texts: pa.Array) -> Encoded:
        return [None if text is None else string(_unscaled(text, scale)) for text in texts.to_pylist()]

    return encode


def moments(oid: int, branch: int) -> Encoder:
    """A date in days, a timestamp in microseconds, since 1970; or the enum of infinities, which is the next
    branch of the union."""
    parser = parser_of(PgType(oid), ColumnChoice())
    counted = pa.int32() if parser.lake_type == pa.date32() else pa.int64()

    def counts(finite: pa.Array) -> list[int | None]:
        found: list[int | None] = parser.parse(finite).cast(counted).to_pylist()
        return found

    return _or_infinite(counts, branch)


def times(texts: pa.Array) -> Encoded:
    """A time of day in microseconds."""
    return [None if text is None else long(_time(text)) for text in texts.to_pylist()]


def arrays(encode: Encoder, delimiter: str) -> Encoder:
    """Elements in one block. An element that is NULL, or a second dimension, no such array holds."""

    def encode_arrays(texts: pa.Array) -> Encoded:
        parts = split_array(texts, delimiter)
        elements = encode(parts.texts)
        starts, found = parts.starts.to_pylist(), []
        for index, is_null in enumerate(texts.is_null().to_pylist()):
            own = elements[starts[index] : starts[index + 1]]
            if None in own:
                raise Unholdable("an array with an element that is NULL", _TEXTS)
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
    """Of a value from before the column had this scale."""
    sign, digits, exponent = Decimal(text).as_tuple()
    if isinstance(exponent, int):
        shift, number = exponent + scale, int("".join(map(str, digits)))
        factor: int = 10 ** abs(shift)
        whole, rest = divmod(number, factor) if shift < 0 else (number * factor, 0)
        if not rest:
            return -whole if sign else whole
    raise Unholdable("one that no decimal of this scale is", _TEXTS)


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
