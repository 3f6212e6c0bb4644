"""Parsers of scalar types: boolean, integers and floats, money, numeric, xid8, bytea, geometry."""

from __future__ import annotations

import decimal
from binascii import Error as NotHex
from binascii import unhexlify
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions

from .parser import Family, Parser, Text, UnsupportedValue, cast, not_output_of_type

_MAX_PRECISION = 38
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_NUMBER = r"^-?\d+(?:\.\d+)?$"
# The format of lc_monetary C. Its currency sign has no meaning: the source stores no currency.
_AMOUNT = r"^-?\$\d{1,3}(?:,\d{3})*\.\d\d$"
_PRECISION, _SCALE = 19, 2
_PREFIX = "\\x"
_INT32_MAX = 2**31 - 1


class Boolean:
    """boolean, which PostgreSQL writes as `t` or `f`. The CSV reader must be configured with these values."""

    lake_type: pa.DataType = pa.bool_()
    csv_type: pa.DataType | None = pa.bool_()

    def parse(self, texts: pa.Array) -> pa.Array:
        true = pc.equal(texts, pa.scalar("t", texts.type))
        false = pc.equal(texts, pa.scalar("f", texts.type))
        if pc.all(pc.or_(true, false)).as_py() is False:
            raise not_output_of_type()
        return true


def boolean(_: PgType, __: ColumnOptions) -> Boolean:
    """Return the parser of boolean."""
    return Boolean()


@dataclass(frozen=True)
class Number:
    """A number of fixed width, with an Arrow type that represents all of its values.

    Floats keep NaN, infinities and -0. The pinned `extra_float_digits` makes their texts exact.
    """

    lake_type: pa.DataType

    @property
    def csv_type(self) -> pa.DataType | None:
        return self.lake_type

    def parse(self, texts: pa.Array) -> pa.Array:
        numbers = cast(texts, self.lake_type)
        if numbers is None:
            raise not_output_of_type()
        return numbers


def _of_width(lake_type: pa.DataType) -> Family:
    parser = Number(lake_type)

    def number(_: PgType, __: ColumnOptions) -> Number:
        return parser

    return number


smallint, integer, bigint = _of_width(pa.int16()), _of_width(pa.int32()), _of_width(pa.int64())
# Unsigned 32-bit integers, which Delta does not support.
oid = _of_width(pa.int64())
real, double = _of_width(pa.float32()), _of_width(pa.float64())


@dataclass(frozen=True)
class Decimal:
    """numeric as a decimal, never rounded. NaN and infinities are null if `special_is_null`, else an error.

    `is_declared`: True if precision and scale are the column's own, so that every value fits; False if the
    pipeline sets them.
    """

    precision: int
    scale: int
    special_is_null: bool
    is_declared: bool = True

    @property
    def lake_type(self) -> pa.DataType:
        return pa.decimal128(self.precision, self.scale)

    @property
    def csv_type(self) -> pa.DataType | None:
        """The decimal type if the CSV reader can parse every value, else None.

        It cannot if a text may have too many digits for Arrow (see `_long`), or if NaN and infinities become
        null.
        """
        return self.lake_type if self.is_declared and not self.special_is_null else None

    def parse(self, texts: pa.Array) -> pa.Array:
        if not pc.any(self._long(texts)).as_py():
            numbers = cast(texts, self.lake_type)
            if numbers is not None:
                return numbers
        return self._parse_special(texts)

    def _long(self, texts: pa.Array) -> pa.Array:
        """Return True for each text that may have more than 38 digits after it is extended to the scale.

        Arrow computes in 128 bits without an overflow check: it silently converts such a text into a wrong
        number.
        """
        return pc.greater(pc.binary_length(texts), _MAX_PRECISION - self.scale)

    def _parse_special(self, texts: pa.Array) -> pa.Array:
        odd = pc.is_in(texts, value_set=pa.array(_NOT_FINITE, texts.type))
        if pc.any(odd).as_py():
            if not self.special_is_null:
                raise UnsupportedValue(
                    "the value is NaN or infinity",
                    f"set numeric_nan to null (not for key columns), then {errors.RETRY}; or set the column's"
                    f" lake type to string in types, then {errors.RESNAPSHOT}",
                )
            texts = pc.if_else(odd, pa.scalar(None, texts.type), texts)
        long = pc.fill_null(self._long(texts), False)
        numbers = cast(pc.if_else(long, pa.scalar(None, texts.type), texts), self.lake_type)
        if numbers is None:
            raise self._does_not_fit(texts)
        return pc.replace_with_mask(numbers, long, self._parse_long(texts.filter(long)))

    def _parse_long(self, texts: pa.Array) -> pa.Array:
        """Convert long texts: remove zeros after the last digit of the scale. Raises UnsupportedValue."""
        whole = rf"\d{{1,{self.precision - self.scale}}}" if self.precision > self.scale else "0"
        fits = pc.match_substring_regex(texts, rf"^-?{whole}(?:\.\d{{0,{self.scale}}}0*)?$")
        if pc.all(fits).as_py() is False:
            raise self._does_not_fit(texts)
        shortened = pc.replace_substring_regex(texts, rf"(\.\d{{{self.scale}}})0+$", r"\1")
        return pc.cast(shortened, self.lake_type)

    def _does_not_fit(self, texts: pa.Array) -> UnsupportedValue:
        if self.is_declared or pc.all(pc.match_substring_regex(texts, _NUMBER)).as_py() is False:
            return not_output_of_type(
                f"the column's precision or scale may have changed: {errors.RESNAPSHOT}"
            )
        return UnsupportedValue(
            f"a number with more than {self.precision - self.scale} digits before the point"
            f" or {self.scale} after it",
            f"choose a decimal that holds it, or string, for the column in types; then {errors.RESNAPSHOT}",
        )


def numeric(pg_type: PgType, choice: ColumnOptions) -> Parser:
    """Return the parser of numeric: decimal(p,s) if its precision is at most 38, else the exact text.

    A lake type in the settings takes precedence.
    """
    special_is_null = choice.numeric_nan == "null"
    chosen = choice.lake_type
    if chosen is None and pg_type.typmod < 0:
        chosen = choice.unconstrained_numeric
    if chosen is not None:
        if chosen.name != "decimal":
            return Text()
        return Decimal(chosen.precision, chosen.scale, special_is_null, is_declared=False)
    precision, scale = precision_and_scale(pg_type.typmod)
    if precision <= _MAX_PRECISION and 0 <= scale <= precision:
        return Decimal(precision, scale, special_is_null)
    return Text()


def xid8(_: PgType, __: ColumnOptions) -> Parser:
    """Return the parser of xid8, an unsigned 64-bit integer, which Delta does not support: a decimal."""
    return Decimal(20, 0, special_is_null=False)


def precision_and_scale(typmod: int) -> tuple[int, int]:
    """Return p and s of numeric(p,s). Since PostgreSQL 15, s is from -1000 to 1000, and may exceed p."""
    packed = typmod - 4
    return (packed >> 16) & 0xFFFF, ((packed & 0x7FF) ^ 0x400) - 0x400


@dataclass(frozen=True)
class Money:
    """money as a decimal of hundredths, which is how lc_monetary C interprets its 64 bits.

    The value is wrong by a power of 10 if the source uses a locale with another number of digits, such as
    ja_JP with none.
    """

    amount: Decimal

    @property
    def lake_type(self) -> pa.DataType:
        return self.amount.lake_type

    @property
    def csv_type(self) -> pa.DataType | None:
        return None

    def parse(self, texts: pa.Array) -> pa.Array:
        if pc.all(pc.match_substring_regex(texts, _AMOUNT)).as_py() is False:
            raise not_output_of_type()
        digits = pc.replace_substring(pc.replace_substring(texts, "$", ""), ",", "")
        return self.amount.parse(digits)


def money(_: PgType, choice: ColumnOptions) -> Parser:
    """Return the parser of money: decimal(19,2), which fits all values, or the decimal in the settings."""
    chosen = choice.lake_type
    if chosen is not None and chosen.name == "decimal":
        return Money(Decimal(chosen.precision, chosen.scale, special_is_null=False, is_declared=False))
    return Money(Decimal(_PRECISION, _SCALE, special_is_null=False))


def money_text(number: decimal.Decimal) -> str:
    """Return the text of money, as lc_monetary C has it."""
    return f"{'-' if number < 0 else ''}${abs(number):,.2f}"


class Binary:
    """bytea, which PostgreSQL writes as `\\x…` in hexadecimal digits, as bytes."""

    lake_type: pa.DataType = pa.binary()
    csv_type: pa.DataType | None = None

    def parse(self, texts: pa.Array) -> pa.Array:
        """Convert all rows: without prefixes, their digits are contiguous. Raises UnsupportedValue."""
        if pc.all(pc.starts_with(texts, _PREFIX)).as_py() is False:
            raise not_output_of_type()
        lengths = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        digits_per_row = np.maximum(lengths - len(_PREFIX), 0)
        digits = _text_bytes(texts).translate(None, _PREFIX.encode())
        if len(digits) != digits_per_row.sum() or (digits_per_row & 1).any():
            raise not_output_of_type()
        try:
            data = unhexlify(digits)
        except NotHex:
            raise not_output_of_type() from None
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(digits_per_row >> 1, out=offsets[1:])
        return _binary_array(offsets, data, texts)


def _text_bytes(texts: pa.Array) -> bytes:
    """Return the bytes of all rows, without bytes outside of a slice or behind a null."""
    if texts.null_count:
        texts = texts.drop_null()
    if len(texts) == 0:
        return b""
    _, offsets, data = texts.buffers()
    width = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    bounds = np.frombuffer(offsets, width)
    first, last = int(bounds[texts.offset]), int(bounds[texts.offset + len(texts)])
    return b"" if data is None else data.slice(first, last - first).to_pybytes()


def _binary_array(offsets: NDArray[np.int64], data: bytes, texts: pa.Array) -> pa.Array:
    validity = None
    if texts.null_count:
        validity = pa.array(texts.is_valid().to_numpy(zero_copy_only=False)).buffers()[1]
    if len(data) <= _INT32_MAX:
        arrow_type, bounds = pa.binary(), pa.py_buffer(offsets.astype(np.int32))
    else:
        arrow_type, bounds = pa.large_binary(), pa.py_buffer(offsets)
    buffers = [validity, bounds, pa.py_buffer(data)]
    return pa.Array.from_buffers(arrow_type, len(texts), buffers, null_count=texts.null_count)


def binary(_: PgType, __: ColumnOptions) -> Binary:
    """Return the parser of bytea."""
    return Binary()


class Spatial:
    """Spatial values as EWKB: well-known binary with the SRID, which PostGIS writes in hexadecimal digits."""

    lake_type: pa.DataType = pa.binary()
    csv_type: pa.DataType | None = None

    def parse(self, texts: pa.Array) -> pa.Array:
        prefix, none = (pa.scalar(text, texts.type) for text in ("\\x", ""))
        return Binary().parse(pc.binary_join_element_wise(prefix, texts, none))


def spatial(_: PgType, __: ColumnOptions) -> Spatial:
    """Return the parser of PostGIS's geometry and geography."""
    return Spatial()


def spatial_text(data: bytes) -> str:
    """Return the text of EWKB as PostGIS writes it."""
    return data.hex().upper()
