"""numeric; xid8."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice
from airflow_provider_pgrepl.replication.values.parser import Parser, Unholdable, cast, not_output_of_type
from airflow_provider_pgrepl.replication.values.text import Text

_MAX_PRECISION = 38
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_NUMBER = r"^-?\d+(?:\.\d+)?$"


@dataclass(frozen=True)
class Decimal:
    """numeric as a decimal, never rounded. NaN and the infinities are null by choice, or an error.

    `is_declared`: precision and scale are the column's own, so that every value fits; else the pipeline's.
    """

    precision: int
    scale: int
    odd_is_null: bool
    is_declared: bool = True

    @property
    def lake_type(self) -> pa.DataType:
        return pa.decimal128(self.precision, self.scale)

    @property
    def csv_type(self) -> pa.DataType | None:
        """None where a text may be longer than what Arrow reads right (see `_long`)."""
        return self.lake_type if self.is_declared and not self.odd_is_null else None

    def parse(self, texts: pa.Array) -> pa.Array:
        if not pc.any(self._long(texts)).as_py():
            numbers = cast(texts, self.lake_type)
            if numbers is not None:
                return numbers
        return self._parse_odd(texts)

    def _long(self, texts: pa.Array) -> pa.Array:
        """Which texts may have more than 38 digits, once there are as many after the point as the scale says.

        Arrow computes in 128 bits without a look at what is carried out of them: of such a text it makes
        another number, and says nothing.
        """
        return pc.greater(pc.binary_length(texts), _MAX_PRECISION - self.scale)

    def _parse_odd(self, texts: pa.Array) -> pa.Array:
        odd = pc.is_in(texts, value_set=pa.array(_NOT_FINITE, texts.type))
        if pc.any(odd).as_py():
            if not self.odd_is_null:
                raise Unholdable(
                    "NaN or infinity",
                    "set numeric_nan to null (not for columns of a key), and retry the table; or give the"
                    f" column lake type string in types, then {hints.RESNAPSHOT}",
                )
            texts = pc.if_else(odd, pa.scalar(None, texts.type), texts)
        long = pc.fill_null(self._long(texts), False)
        numbers = cast(pc.if_else(long, pa.scalar(None, texts.type), texts), self.lake_type)
        if numbers is None:
            raise self._does_not_fit(texts)
        return pc.replace_with_mask(numbers, long, self._parse_long(texts.filter(long)))

    def _parse_long(self, texts: pa.Array) -> pa.Array:
        """Texts that say the same number without zeros at their end are numbers of the scale too."""
        whole = rf"\d{{1,{self.precision - self.scale}}}" if self.precision > self.scale else "0"
        fits = pc.match_substring_regex(texts, rf"^-?{whole}(?:\.\d{{0,{self.scale}}}0*)?$")
        if pc.all(fits).as_py() is False:
            raise self._does_not_fit(texts)
        shortened = pc.replace_substring_regex(texts, rf"(\.\d{{{self.scale}}})0+$", r"\1")
        return pc.cast(shortened, self.lake_type)

    def _does_not_fit(self, texts: pa.Array) -> Unholdable:
        if self.is_declared or pc.all(pc.match_substring_regex(texts, _NUMBER)).as_py() is False:
            return not_output_of_type(f"the column's precision or scale may have changed: {hints.RESNAPSHOT}")
        return Unholdable(
            f"a number with more than {self.precision - self.scale} digits before the point"
            f" or {self.scale} after it",
            f"choose a decimal that holds it, or string, for the column in types; then {hints.RESNAPSHOT}",
        )


def numeric(pg_type: PgType, choice: ColumnChoice) -> Parser:
    """A numeric as decimal(p,s) where one can be that wide; any other as its exact text."""
    odd_is_null = choice.numeric_nan == "null"
    chosen = choice.lake_type
    if chosen is None and pg_type.typmod < 0:
        chosen = choice.unconstrained_numeric
    if chosen is not None:
        if chosen.name != "decimal":
            return Text()
        return Decimal(chosen.precision, chosen.scale, odd_is_null, is_declared=False)
    precision, scale = precision_and_scale(pg_type.typmod)
    if precision <= _MAX_PRECISION and 0 <= scale <= precision:
        return Decimal(precision, scale, odd_is_null)
    return Text()


def xid8(_: PgType, __: ColumnChoice) -> Parser:
    """64 bits without sign, which Delta does not know."""
    return Decimal(20, 0, odd_is_null=False)


def precision_and_scale(typmod: int) -> tuple[int, int]:
    """The p and s of numeric(p,s); since PostgreSQL 15 s is from -1000 to 1000 and may be above p."""
    packed = typmod - 4
    return (packed >> 16) & 0xFFFF, ((packed & 0x7FF) ^ 0x400) - 0x400
