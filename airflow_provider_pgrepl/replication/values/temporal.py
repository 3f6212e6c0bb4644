"""date, timestamp, timestamp with time zone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice, Infinity
from airflow_provider_pgrepl.replication.values.gregorian import (
    SECONDS_PER_DAY,
    Integers,
    days_since_epoch,
    is_month_and_day,
)
from airflow_provider_pgrepl.replication.values.parser import Parser, Unholdable, cast, not_output_of_type
from airflow_provider_pgrepl.replication.values.text import Text

# Years of four digits A.D. are what Arrow parses itself; all else that PostgreSQL writes is odd.
_ORDINARY = r"^\d{4}-[^B]*$"
_INFINITIES = ("infinity", "-infinity")
_DATE = r"^(?P<year>\d{4,7})-(?P<month>\d\d)-(?P<day>\d\d)"
_TIME = r" (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:\.(?P<fraction>\d{1,6}))?"
_ERA = r"(?P<era> BC)?$"
_MAX_MICROSECONDS = 2**63 - 1
_OUT_OF_RANGE = (
    "replace the value at the source by one within range, or give the column lake type string in types;"
    f" then {hints.RESNAPSHOT}"
)
_INFINITE = (
    "set infinity to null or sentinel (not for columns of a key), and retry the table; or give the column"
    f" lake type string in types, then {hints.RESNAPSHOT}"
)
_FIRST_DAY, _LAST_DAY = "0001-01-01", "9999-12-31"


@dataclass(frozen=True)
class Temporal:
    """A date or point in time that Arrow counts from 1970 (proleptic Gregorian, as PostgreSQL does).

    `pattern` is RE2 for what PostgreSQL writes, with the fields named. Infinities, which it cannot hold, are
    by choice null, an error, or the text in `sentinels` that stands in for each of `_INFINITIES`; the lake
    cannot tell these from the same values at the source.
    """

    lake_type: pa.DataType
    pattern: str
    infinity: Infinity
    sentinels: tuple[str, str]

    @property
    def csv_type(self) -> pa.DataType | None:
        return self.lake_type if self.infinity == "error" else None

    def parse(self, texts: pa.Array) -> pa.Array:
        fast = cast(texts, self.lake_type)
        return self._parse_odd(self._finite(texts)) if fast is None else fast

    def _finite(self, texts: pa.Array) -> pa.Array:
        """The texts with null or a sentinel in place of infinities. Raises Unholdable."""
        if not pc.any(pc.is_in(texts, value_set=pa.array(_INFINITIES, texts.type))).as_py():
            return texts
        if self.infinity == "error":
            raise Unholdable("infinity or -infinity", _INFINITE)
        for infinite, sentinel in zip(_INFINITIES, self.sentinels, strict=True):
            instead = pa.scalar(sentinel if self.infinity == "sentinel" else None, texts.type)
            texts = pc.if_else(pc.equal(texts, pa.scalar(infinite, texts.type)), instead, texts)
        return texts

    def _parse_odd(self, texts: pa.Array) -> pa.Array:
        """Only the rows that Arrow cannot parse go the long way: before Christ, or after 9999."""
        odd = pc.fill_null(pc.invert(pc.match_substring_regex(texts, _ORDINARY)), False)
        ordinary = cast(pc.if_else(odd, pa.scalar(None, texts.type), texts), self.lake_type)
        if ordinary is None:
            raise not_output_of_type()
        return pc.replace_with_mask(ordinary, odd, self._count(texts.filter(odd)).view(self.lake_type))

    def _count(self, texts: pa.Array) -> pa.Array:
        """Days or microseconds since 1970. Raises Unholdable."""
        fields = pc.extract_regex(texts, self.pattern)
        if fields.null_count:
            raise not_output_of_type()
        year, month, day = (_integers(fields, name) for name in ("year", "month", "day"))
        before_christ = pc.equal(pc.struct_field(fields, "era"), pa.scalar(" BC", texts.type))
        year = np.where(before_christ.to_numpy(zero_copy_only=False), 1 - year, year)
        if not is_month_and_day(month, day).all():
            raise not_output_of_type()
        days = days_since_epoch(year, month, day)
        if pa.types.is_date32(self.lake_type):
            return pa.array(days.astype(np.int32))
        hour, minute, second = (_integers(fields, name) for name in ("hour", "minute", "second"))
        seconds = days * SECONDS_PER_DAY + hour * 3600 + minute * 60 + second
        return pa.array(_microseconds(seconds, _fraction(fields)))


def _integers(fields: pa.StructArray, name: str) -> Integers:
    numbers: Integers = pc.cast(pc.struct_field(fields, name), pa.int64()).to_numpy()
    return numbers


def _fraction(fields: pa.StructArray) -> Integers:
    """The digits after the second's point, as microseconds."""
    padded = pc.utf8_rpad(pc.struct_field(fields, "fraction"), 6, padding="0")
    numbers: Integers = pc.cast(padded, pa.int64()).to_numpy()
    return numbers


def _microseconds(seconds: Integers, fraction: Integers) -> Integers:
    last_second, last_fraction = divmod(_MAX_MICROSECONDS, 1_000_000)
    beyond = (seconds > last_second) | ((seconds == last_second) & (fraction > last_fraction))
    if beyond.any():
        raise Unholdable("a time after 294247-01-10 04:00:54.775807", _OUT_OF_RANGE)
    return seconds * 1_000_000 + fraction


def date(_: PgType, choice: ColumnChoice) -> Parser:
    """date, by the proleptic Gregorian calendar as in PostgreSQL."""
    return Temporal(pa.date32(), _DATE + _ERA, choice.infinity, (_LAST_DAY, _FIRST_DAY))


def timestamp(_: PgType, choice: ColumnChoice) -> Parser:
    """Without zone in the lake too, or by the pipeline's choice its text."""
    if choice.timestamp_without_tz == "string":
        return Text()
    return Temporal(pa.timestamp("us"), _DATE + _TIME + _ERA, choice.infinity, _sentinels())


def timestamptz(_: PgType, choice: ColumnChoice) -> Parser:
    """timestamp with time zone: microseconds of UTC, in which the server is asked to write it."""
    lake_type = pa.timestamp("us", "UTC")
    return Temporal(lake_type, _DATE + _TIME + r"\+00" + _ERA, choice.infinity, _sentinels("+00"))


def _sentinels(zone: str = "") -> tuple[str, str]:
    return f"{_LAST_DAY} 23:59:59.999999{zone}", f"{_FIRST_DAY} 00:00:00{zone}"
