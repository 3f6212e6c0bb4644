"""Conversion of PostgreSQL's text values to JSON, as Debezium's JSON converter writes the same values.

Each encoder takes texts and returns the same number of `large_string` values, null for null. It raises
UnsupportedValue for a value that has no such form. The types are documented at
https://debezium.io/documentation/reference/stable/connectors/postgresql.html#postgresql-data-types
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import ValueRangeError, one_line
from airflow_provider_pgrepl.replication.events.columns import PublishedColumn
from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions, TableOptions
from airflow_provider_pgrepl.replication.values import TypedColumn
from airflow_provider_pgrepl.replication.values.nested import split_array
from airflow_provider_pgrepl.replication.values.parser import UnsupportedValue
from airflow_provider_pgrepl.replication.values.registry import parser_of
from airflow_provider_pgrepl.replication.values.scalars import precision_and_scale

from .json_text import TEXT, json_texts

Encode = Callable[[pa.Array], pa.Array]

_DAY_US, _MILLI = 86_400_000_000, 1_000
_MONTH_US = 2_629_800_000_000
"""A month of an interval in microseconds, as Debezium counts it: a twelfth of 365.25 days (MicroDuration)."""
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
_INFINITIES = ("infinity", "-infinity")
_INFINITE_MOMENTS = {"infinity": 9_223_372_036_825_200_000, "-infinity": -9_223_372_036_832_400_000}
"""Their values in microseconds: PGStatement.DATE_POSITIVE_INFINITY of pgjdbc."""
_INTERVAL = re.compile(
    r"(?:(?P<years>[+-]?\d+) years? ?)?(?:(?P<months>[+-]?\d+) mons? ?)?(?:(?P<days>[+-]?\d+) days? ?)?"
    r"(?:(?P<sign>[+-])?(?P<hours>\d+):(?P<minutes>\d\d):(?P<seconds>\d\d)(?:\.(?P<fraction>\d{1,6}))?)?"
)
_ZONED_TIME = re.compile(r"(\d\d):(\d\d):(\d\d)(\.\d{1,6})?([+-])(\d\d)(?::(\d\d))?(?::(\d\d))?")
_POINT = re.compile(r"\(([^,]+),([^,]+)\)")
_DIGITS = 640
"""The number of digits that `int` reads whatever limit Python is given (PYTHONINTMAXSTRDIGITS)."""
_NAN = "a number that is none, which Debezium sends as NULL"
_UNREADABLE = "a value that cannot be read"
_HINT = "let the column be a text (text_columns), or skip the event (on_error: skip_and_record)"
_DATE_CHARACTERS, _SECOND_CHARACTERS = 10, 19
"""The lengths of `2024-05-01` and of `2024-05-01 12:00:00`."""
_FIRST, _LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999 in microseconds since 1970."""
Schema = dict[str, Any]
UNAVAILABLE = "__debezium_unavailable_value"
_INTEGERS = ("int16", "int32", "int64")
_ZEROS = {
    "org.apache.kafka.connect.data.Decimal": '"AA=="',
    "io.debezium.data.VariableScaleDecimal": '{"scale":0,"value":"AA=="}',
    "io.debezium.time.ZonedTime": '"00:00:00Z"',
    "io.debezium.time.ZonedTimestamp": '"1970-01-01T00:00:00Z"',
    "io.debezium.data.geometry.Point": '{"x":0.0,"y":0.0,"wkb":"AQEAAAAAAAAAAAAAAAAAAAAAAAAA","srid":null}',
    "boolean": "false",
    "float": "0.0",
    "double": "0.0",
    "string": '""',
    "bytes": '""',
    "array": "[]",
}
"""Zero values by the name of a schema, or by its type. All other types are integers."""
_SHORT = 3
"""Up to this number of fractional digits, milliseconds are exact."""
_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_POINT_FIELDS = [
    {"type": "double", "optional": False, "field": "x"},
    {"type": "double", "optional": False, "field": "y"},
    {"type": "bytes", "optional": True, "field": "wkb"},
    {"type": "int32", "optional": True, "field": "srid"},
]


def booleans(texts: pa.Array) -> pa.Array:
    """Encode `t` and `f` as booleans."""
    return pc.if_else(pc.equal(texts, "t"), pa.scalar("true", TEXT), pa.scalar("false", TEXT))


def integers(texts: pa.Array) -> pa.Array:
    """Encode integers unchanged. Raises UnsupportedValue for other text, which would not be JSON."""
    return _checked(texts, pa.int64())


def floats(texts: pa.Array) -> pa.Array:
    """Encode floats unchanged, and NaN and infinities as strings."""
    odd = pc.is_in(texts, pa.array(_NO_NUMBERS, texts.type))
    numbers = pc.if_else(odd, pa.scalar("0", texts.type), texts) if pc.any(odd).as_py() else texts
    return pc.if_else(odd, strings(texts), _checked(numbers, pa.float64()))


def _checked(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        texts.cast(kind)
    except pa.ArrowInvalid:
        raise UnsupportedValue("a text that is no number", _HINT) from None
    return texts.cast(TEXT)


def strings(texts: pa.Array) -> pa.Array:
    """Encode texts as strings."""
    return json_texts(texts, is_json=False)


def binaries(texts: pa.Array) -> pa.Array:
    """Encode bytea in base64."""
    return json_texts(_parsed(oids.BYTEA, texts), is_json=False)


def dates(texts: pa.Array) -> pa.Array:
    """Encode dates as days since 1970."""
    return _parsed(oids.DATE, texts).cast(pa.int32()).cast(TEXT)


def moments(precision: int) -> Encode:
    """Encode timestamps as microseconds since 1970.

    For a precision of at most 3 digits, they are milliseconds.
    """

    def encode(texts: pa.Array) -> pa.Array:
        infinite = pc.is_in(texts, pa.array(_INFINITIES, texts.type))
        finite = pc.if_else(infinite, pa.scalar(None, texts.type), texts)
        counts = _in_unit(_parsed(oids.TIMESTAMP, finite).cast(pa.int64()), precision).cast(TEXT)
        if not pc.any(infinite).as_py():
            return counts
        found = [_INFINITE_MOMENTS[one] for one in texts.filter(infinite).to_pylist()]
        others = _in_unit(pa.array(found, pa.int64()), precision).cast(TEXT)
        return pc.replace_with_mask(counts, infinite, others)

    return encode


def zoned_moments(precision: int) -> Encode:
    """Encode timestamps in ISO 8601 in UTC, with the type's number of fractional digits."""

    def encode(texts: pa.Array) -> pa.Array:
        infinite = pc.is_in(texts, pa.array(_INFINITIES, texts.type))
        finite = pc.if_else(infinite, pa.scalar(None, texts.type), texts)
        moments = _parsed(oids.TIMESTAMPTZ, finite).cast(pa.int64())
        is_far = pc.or_(pc.less(moments, _FIRST), pc.greater(moments, _LAST))
        if not pc.any(infinite).as_py() and not pc.any(is_far).as_py():
            return _near_moments(moments, precision)
        counts = moments.to_pylist()
        return pa.array(
            [
                (None if text is None else f'"{text}"') if count is None else f'"{_zoned(count, precision)}"'
                for count, text in zip(counts, texts.to_pylist(), strict=True)
            ],
            TEXT,
        )

    return encode


def _near_moments(counts: pa.Array, precision: int) -> pa.Array:
    """Encode timestamps of the years 1 to 9999, which Arrow writes as `2024-02-03 10:34:56.123456`."""
    digits = 6 if precision < 0 else precision
    texts = counts.view(pa.timestamp("us")).cast(TEXT)
    texts = pc.binary_replace_slice(texts, _DATE_CHARACTERS, _DATE_CHARACTERS + 1, "T")
    if digits < 6:
        texts = pc.utf8_slice_codeunits(texts, 0, _SECOND_CHARACTERS + (digits + 1 if digits else 0))
    quote, end, nothing = (pa.scalar(text, TEXT) for text in ('"', 'Z"', ""))
    return pc.binary_join_element_wise(quote, texts, end, nothing)


def times(precision: int) -> Encode:
    """Encode times as the time since midnight, in the unit of `moments`."""
    return _each(lambda text: str(_time_us(text) // (_MILLI if _is_short(precision) else 1)))


def _zoned_time(text: str) -> str:
    match = _ZONED_TIME.fullmatch(text)
    if match is None:
        raise UnsupportedValue("a time of day that cannot be read", _HINT)
    hours, minutes, seconds, fraction, sign, *offset = match.groups()
    east = sum(int(part or 0) * unit for part, unit in zip(offset, (3600, 60, 1), strict=True))
    whole = int(hours) * 3600 + int(minutes) * 60 + int(seconds)
    utc = (whole + (east if sign == "-" else -east)) % 86_400
    digits = (fraction or "")[1:].rstrip("0")
    return f'"{utc // 3600:02}:{utc // 60 % 60:02}:{utc % 60:02}{f".{digits}" if digits else ""}Z"'


def _interval(text: str) -> str:
    match = _INTERVAL.fullmatch(text)
    if match is None or not text:
        raise UnsupportedValue("an interval that cannot be read", _HINT)
    part = {
        name: int(found or 0) for name, found in match.groupdict().items() if name not in ("sign", "fraction")
    }
    clock = (part["hours"] * 60 + part["minutes"]) * 60 + part["seconds"]
    clock = clock * 1_000_000 + int((match["fraction"] or "").ljust(6, "0"))
    months = part["years"] * 12 + part["months"]
    days = months * _MONTH_US + part["days"] * _DAY_US
    return str(days + (-clock if match["sign"] == "-" else clock))


def decimals(scale: int) -> Encode:
    """Encode decimals as their unscaled integers in base64."""
    return _each(lambda text: f'"{_unscaled(text, scale)}"')


def _free_decimal(text: str) -> str:
    """Encode a decimal with its own scale, without trailing zeros of the fraction."""
    short = text.rstrip("0").removesuffix(".") if "." in text else text
    scale = len(short.partition(".")[2])
    return f'{{"scale":{scale},"value":"{_unscaled(short, scale)}"}}'


def _unscaled(text: str, scale: int) -> str:
    whole, _, fraction = text.partition(".")
    digits = whole + fraction.ljust(scale, "0")
    if len(fraction) > scale or not digits.lstrip("-").isdecimal():
        raise UnsupportedValue(_NAN, _HINT)
    number = _integer(digits)
    size = (number + (number < 0)).bit_length() // 8 + 1
    return base64.b64encode(number.to_bytes(size, "big", signed=True)).decode()


def _integer(digits: str) -> int:
    """Parse an integer of any length: `int` refuses more than 4,300 digits."""
    number, unsigned = 0, digits.removeprefix("-")
    for start in range(0, len(unsigned), _DIGITS):
        part = unsigned[start : start + _DIGITS]
        number = number * 10 ** len(part) + int(part)
    return -number if digits.startswith("-") else number


def _money(text: str) -> str:
    return f'"{_unscaled(text.replace("$", "").replace(",", ""), 2)}"'


def _bits(text: str) -> str:
    """Encode bits in base64, lowest byte first, without leading zero bytes of the number."""
    number = int(text or "0", 2)
    return f'"{base64.b64encode(number.to_bytes((number.bit_length() + 7) // 8, "little")).decode()}"'


def _point(text: str) -> str:
    match = _POINT.fullmatch(text)
    if match is None:
        raise UnsupportedValue("a point that cannot be read", _HINT)
    x, y = float(match[1]), float(match[2])
    wkb = base64.b64encode(struct.pack("<BIdd", 1, 1, x, y)).decode()
    both = ",".join(f'"{name}":{_double(value)}' for name, value in (("x", x), ("y", y)))
    return f'{{{both},"wkb":"{wkb}","srid":null}}'


def _double(value: float) -> str:
    written = json.dumps(value)
    return written if math.isfinite(value) else f'"{written}"'


def _hstore(texts: pa.Array, pg_type: PgType) -> pa.Array:
    pairs = parser_of(pg_type, ColumnOptions()).parse(texts).to_pylist(maps_as_pydicts="strict")
    written = (
        None if one is None else json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in pairs
    )
    return strings(pa.array(written, TEXT))


def arrays(encode: Encode, delimiter: str) -> Encode:
    """Encode arrays of one dimension."""

    def encode_arrays(texts: pa.Array) -> pa.Array:
        parts = split_array(texts, delimiter)
        elements = ["null" if one is None else one for one in encode(parts.texts).to_pylist()]
        starts, nulls = parts.starts.to_pylist(), texts.is_null().to_pylist()
        return pa.array(
            [
                None if is_null else f"[{','.join(elements[starts[n] : starts[n + 1]])}]"
                for n, is_null in enumerate(nulls)
            ],
            TEXT,
        )

    return encode_arrays


def _each(write: Callable[[str], str]) -> Encode:
    return lambda texts: pa.array([None if one is None else write(one) for one in texts.to_pylist()], TEXT)


zoned_times, intervals, free_decimals, money, bits, points = map(
    _each, (_zoned_time, _interval, _free_decimal, _money, _bits, _point)
)


def hstores(pg_type: PgType) -> Encode:
    """Encode hstores as strings that contain JSON objects."""
    return lambda texts: _hstore(texts, pg_type)


def _parsed(oid: int, texts: pa.Array) -> pa.Array:
    return parser_of(PgType(oid), ColumnOptions()).parse(texts)


def _is_short(precision: int) -> bool:
    return 0 <= precision <= 3


def _in_unit(microseconds: pa.Array, precision: int) -> pa.Array:
    return pc.divide(microseconds, _MILLI) if _is_short(precision) else microseconds


def _time_us(text: str) -> int:
    hours, minutes, seconds = text.split(":")
    second, _, fraction = seconds.partition(".")
    return ((int(hours) * 60 + int(minutes)) * 60 + int(second)) * 1_000_000 + int(fraction.ljust(6, "0"))


def _zoned(count: int, precision: int) -> str:
    digits = 6 if precision < 0 else precision
    if _FIRST <= count <= _LAST:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=count)
        start = f"{moment.year:04}-{moment:%m-%dT%H:%M:%S}"
    else:
        start = _far_moment(count)
    fraction = f"{count % 1_000_000:06}"[:digits]
    return f"{start}{f'.{fraction}' if fraction else ''}Z"


def _far_moment(count: int) -> str:
    """Return date and time of a year outside of 1 to 9999. The calendar repeats every 400 years."""
    cycle_us = 146_097 * _DAY_US
    cycles, rest = divmod(count - _FIRST, cycle_us)
    moment = datetime(1, 1, 1, tzinfo=UTC) + timedelta(microseconds=rest)
    year = moment.year + 400 * cycles
    shown = f"+{year}" if year > 9999 else f"-{-year:04}" if year < 0 else f"{year:04}"
    return f"{shown}-{moment:%m-%dT%H:%M:%S}"


@dataclass(frozen=True)
class _Type:
    schema: Schema
    encode: Encode


@dataclass(frozen=True)
class DebeziumColumn(TypedColumn):
    """A column whose values are typed as their JSON."""

    def parse(self, texts: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Return the values as JSON.

        Raises ValueRangeError, which names the column and the table, but never the value.
        """
        try:
            return self.parser.parse(texts)
        except UnsupportedValue as unholdable:
            reason, hint = unholdable.reason, unholdable.hint
        except (ValueError, OverflowError):
            reason, hint = _UNREADABLE, _HINT  # the exception's message may hold the value
        raise ValueRangeError(
            f'column "{one_line(self.name)}" of {self.table} holds a value that Debezium\'s format cannot:'
            f" {reason}",
            hint,
        )


@dataclass(frozen=True)
class DebeziumParser:
    """The parser of a column whose values are typed as their JSON.

    `unavailable`: sent instead of a large value that an update did not change; None if Debezium has no
    placeholder for the type. `unsent`: sent in `before` for a column outside of the replica identity; None
    means null.
    """

    schema: Schema
    encode: Encode
    unavailable: str | None
    unsent: str | None = None
    lake_type: pa.DataType = TEXT
    csv_type: pa.DataType | None = None

    def parse(self, texts: pa.Array) -> pa.Array:
        return self.encode(texts)


def debezium_column(
    published: PublishedColumn, table: TableName, options: TableOptions, index: int
) -> DebeziumColumn:
    """Return the column of the target. Its `parser` is a DebeziumParser."""
    column, hide, choice = published.column, published.hide, published.choice(options)
    is_text = choice.lake_type is not None and choice.lake_type.name == "string"
    found = _STRING if is_text else _type_of(column.pg_type, column.typmod)
    encode = found.encode if hide is None else lambda texts: found.encode(hide(texts))
    is_optional = not (column.is_key or column.not_null)
    schema = {"type": found.schema["type"], "optional": is_optional, **found.schema, "field": column.name}
    unsent = None if is_optional else _zero_of(found.schema)
    parser = DebeziumParser(schema, encode, _unavailable(found.schema), unsent)
    return DebeziumColumn(column, table, index, parser)


def _zero_of(schema: Schema) -> str:
    """Return the value that Debezium sends for a missing value if the schema does not allow null."""
    return _ZEROS.get(schema.get("name", ""), _ZEROS.get(schema["type"], "0"))


def _type_of(kind: PgType, typmod: int) -> _Type:
    if kind.kind == "d":
        # The modifier of a domain's base type is stored with the domain.
        kind = kind.without_domain
        typmod = kind.typmod
    if kind.kind == "e":
        allowed = ",".join(label for _, label in kind.labels)
        return _named("string", "io.debezium.data.Enum", strings, allowed=allowed)
    if kind.kind == "a" and not kind.extension and kind.oid not in oids.VECTORS:
        return _array_of(kind, typmod)
    if kind.extension:
        return _of_extension(kind)
    return _built_in(kind.oid, typmod)


def _array_of(kind: PgType, typmod: int) -> _Type:
    element = _type_of(kind.only_part, typmod)
    # Only the elements of arrays of enums are declared as not optional.
    items = {"type": element.schema["type"], "optional": kind.only_part.kind != "e", **element.schema}
    return _Type({"type": "array", "items": items}, arrays(element.encode, kind.only_part.delimiter))


def _of_extension(kind: PgType) -> _Type:
    if kind.name == "hstore":
        return _named("string", "io.debezium.data.Json", hstores(kind))
    if kind.name == "ltree":
        return _named("string", "io.debezium.data.Ltree", strings)
    return _STRING


def _built_in(oid: int, typmod: int) -> _Type:
    if oid in _OF_TYPMOD:
        return _OF_TYPMOD[oid](typmod)
    return _PLAIN.get(oid, _STRING)


def _named(kind: str, name: str, encode: Encode, **parameters: str) -> _Type:
    schema: Schema = {"type": kind, "name": name, "version": 1}
    return _Type({**schema, "parameters": parameters} if parameters else schema, encode)


def _time(typmod: int) -> _Type:
    encode = times(typmod)
    if 0 <= typmod <= _SHORT:
        return _named("int32", "io.debezium.time.Time", encode)
    return _named("int64", "io.debezium.time.MicroTime", encode)


def _timestamp(typmod: int) -> _Type:
    name = "Timestamp" if 0 <= typmod <= _SHORT else "MicroTimestamp"
    return _named("int64", f"io.debezium.time.{name}", moments(typmod))


def _timestamptz(typmod: int) -> _Type:
    return _named("string", "io.debezium.time.ZonedTimestamp", zoned_moments(typmod))


def _numeric(typmod: int) -> _Type:
    if typmod >= 0:
        precision, scale = precision_and_scale(typmod)
        if scale >= 0:
            parameters = {"scale": str(scale), "connect.decimal.precision": str(precision)}
            return _named("bytes", _DECIMAL, decimals(scale), **parameters)
    fields = [
        {"type": "int32", "optional": False, "field": "scale"},
        {"type": "bytes", "optional": False, "field": "value"},
    ]
    return _struct(
        "io.debezium.data.VariableScaleDecimal",
        "Variable scaled decimal",
        fields,
        free_decimals,
    )


def _struct(name: str, doc: str, fields: list[Schema], encode: Encode) -> _Type:
    return _Type({"type": "struct", "fields": fields, "name": name, "version": 1, "doc": doc}, encode)


def _bit(typmod: int) -> _Type:
    if typmod == 1:
        return _Type({"type": "boolean"}, lambda texts: booleans(_as_letters(texts)))
    return _varbit(typmod)


def _varbit(typmod: int) -> _Type:
    length = typmod if typmod >= 0 else (1 << 31) - 1
    return _named("bytes", "io.debezium.data.Bits", bits, length=str(length))


def _as_letters(texts: pa.Array) -> pa.Array:
    return pa.array([None if one is None else "t" if one == "1" else "f" for one in texts.to_pylist()])


_STRING = _Type({"type": "string"}, strings)
_PLAIN = {
    oids.BOOL: _Type({"type": "boolean"}, booleans),
    oids.BYTEA: _Type({"type": "bytes"}, binaries),
    oids.INT8: _Type({"type": "int64"}, integers),
    oids.INT2: _Type({"type": "int16"}, integers),
    oids.INT4: _Type({"type": "int32"}, integers),
    oids.OID: _Type({"type": "int64"}, integers),
    oids.JSON: _named("string", "io.debezium.data.Json", strings),
    oids.XML: _named("string", "io.debezium.data.Xml", strings),
    oids.POINT: _struct("io.debezium.data.geometry.Point", "Geometry (POINT)", _POINT_FIELDS, points),
    oids.FLOAT4: _Type({"type": "float"}, floats),
    oids.FLOAT8: _Type({"type": "double"}, floats),
    oids.MONEY: _Type({"type": "bytes", "name": _DECIMAL, "version": 1, "parameters": {"scale": "2"}}, money),
    oids.DATE: _named("int32", "io.debezium.time.Date", dates),
    oids.INTERVAL: _named("int64", "io.debezium.time.MicroDuration", intervals),
    oids.TIMETZ: _named("string", "io.debezium.time.ZonedTime", zoned_times),
    oids.UUID: _named("string", "io.debezium.data.Uuid", strings),
    oids.TSVECTOR: _named("string", "io.debezium.data.Tsvector", strings),
    oids.JSONB: _named("string", "io.debezium.data.Json", strings),
}
"""The types by pg_type.oid. A type that is in none of these tables is a string."""
_OF_TYPMOD: dict[int, Callable[[int], _Type]] = {
    oids.TIME: _time,
    oids.TIMESTAMP: _timestamp,
    oids.TIMESTAMPTZ: _timestamptz,
    oids.BIT: _bit,
    oids.VARBIT: _varbit,
    oids.NUMERIC: _numeric,
}


def _unavailable(schema: Schema) -> str | None:
    """Return Debezium's placeholder for a large value, or None if the schema cannot hold it."""
    if schema["type"] == "string":
        return json.dumps(UNAVAILABLE)
    if schema["type"] == "bytes" and "name" not in schema:
        return json.dumps(base64.b64encode(UNAVAILABLE.encode()).decode())
    if schema["type"] == "array":
        items = schema["items"]
        if items["type"] in _INTEGERS:
            return json.dumps(list(UNAVAILABLE.encode()))
        one = _unavailable(items)
        return None if one is None else f"[{one}]"
    return None
