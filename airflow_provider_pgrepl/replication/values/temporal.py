"""Parsers of date, timestamp, and timestamp with time zone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions, Infinity

from .parser import Parser, Text, UnsupportedValue, cast, not_output_of_type

Integers = NDArray[np.int64]

SECONDS_PER_DAY = 86_400
_DAYS_PER_ERA = 146_097  # of 400 years, after which the calendar repeats
_EPOCH_DAY = 719_468  # days from 0000-03-01 to 1970-01-01
# Arrow itself parses AD years with 4 digits. Everything else that PostgreSQL writes is called odd here.
_ORDINARY = r"^\d{4}-[^B]*$"
_INFINITIES = ("infinity", "-infinity")
_DATE = r"^(?P<year>\d{4,7})-(?P<month>\d\d)-(?P<day>\d\d)"
_TIME = r" (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:\.(?P<fraction>\d{1,6}))?"
_ERA = r"(?P<era> BC)?$"
_MAX_MICROSECONDS = 2**63 - 1
_OUT_OF_RANGE = (
    "replace the value at the source by one within range, or give the column lake type string in types;"
    f" then {errors.RESNAPSHOT}"
)
_INFINITE = (
    f"set infinity to null or sentinel (not for columns of a key), then {errors.RETRY}; or give the column"
    f" lake type string in types, then {errors.RESNAPSHOT}"
)
_FIRST_DAY, _LAST_DAY = "0001-01-01", "9999-12-31"


def days_since_epoch(year: Integers, month: Integers, day: Integers) -> Integers:
    """Return the days since 1970-01-01; year 0 is 1 BC.

    The algorithm's years begin in March, so that leap days come last:
    https://howardhinnant.github.io/date_algorithms.html#days_from_civil
    """
    year = year - (month <= 2)
    era = year // 400
    year_of_era = year - era * 400
    day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    day_of_era = year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year
    days: Integers = era * _DAYS_PER_ERA + day_of_era - _EPOCH_DAY
    return days


def date_of(days: int) -> tuple[int, int, int]:
    """Return year, month and day of a number of days since 1970-01-01, the inverse of `days_since_epoch`.

    https://howardhinnant.github.io/date_algorithms.html#civil_from_days
    """
    era, day_of_era = divmod(days + _EPOCH_DAY, _DAYS_PER_ERA)
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month_from_march = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month_from_march + 2) // 5 + 1
    month = month_from_march + 3 if month_from_march < 10 else month_from_march - 9
    return era * 400 + year_of_era + (month <= 2), month, day


def is_month_and_day(month: Integers, day: Integers) -> NDArray[np.bool_]:
    """Return True for each pair in the ranges 1 to 12 and 1 to 31."""
    return (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)


@dataclass(frozen=True)
class Temporal:
    """The parser of dates or timestamps, which Arrow counts from 1970 (proleptic Gregorian, as PostgreSQL).

    `pattern`: RE2 for the text that PostgreSQL writes, with named fields. Arrow cannot represent infinity.
    By the setting `infinity` it becomes null, an error, or the text in `sentinels` for each of `_INFINITIES`.
    In the lake, a sentinel cannot be distinguished from the same value at the source.
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
        return self._parse_special(self._finite(texts)) if fast is None else fast

    def _finite(self, texts: pa.Array) -> pa.Array:
        """Return the texts with null or a sentinel in place of infinities. Raises UnsupportedValue."""
        if not pc.any(pc.is_in(texts, value_set=pa.array(_INFINITIES, texts.type))).as_py():
            return texts
        if self.infinity == "error":
            raise UnsupportedValue("the value is infinity or -infinity", _INFINITE)
        for infinite, sentinel in zip(_INFINITIES, self.sentinels, strict=True):
            instead = pa.scalar(sentinel if self.infinity == "sentinel" else None, texts.type)
            texts = pc.if_else(pc.equal(texts, pa.scalar(infinite, texts.type)), instead, texts)
        return texts

    def _parse_special(self, texts: pa.Array) -> pa.Array:
        """Parse with Arrow, and only the rows that Arrow rejects (before 1 AD, or after 9999) by `_count`.

        Raises UnsupportedValue.
        """
        odd = pc.fill_null(pc.invert(pc.match_substring_regex(texts, _ORDINARY)), False)
        ordinary = cast(pc.if_else(odd, pa.scalar(None, texts.type), texts), self.lake_type)
        if ordinary is None:
            raise not_output_of_type()
        return pc.replace_with_mask(ordinary, odd, self._count(texts.filter(odd)).view(self.lake_type))

    def _count(self, texts: pa.Array) -> pa.Array:
        """Return days (of a date) or microseconds since 1970. Raises UnsupportedValue."""
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
    """Return the fraction of the seconds in microseconds."""
    padded = pc.utf8_rpad(pc.struct_field(fields, "fraction"), 6, padding="0")
    numbers: Integers = pc.cast(padded, pa.int64()).to_numpy()
    return numbers


def _microseconds(seconds: Integers, fraction: Integers) -> Integers:
    last_second, last_fraction = divmod(_MAX_MICROSECONDS, 1_000_000)
    beyond = (seconds > last_second) | ((seconds == last_second) & (fraction > last_fraction))
    if beyond.any():
        raise UnsupportedValue("the time is after 294247-01-10 04:00:54.775807", _OUT_OF_RANGE)
    return seconds * 1_000_000 + fraction


def date(_: PgType, choice: ColumnOptions) -> Parser:
    """Return the parser of date, which uses the proleptic Gregorian calendar, as PostgreSQL does."""
    return Temporal(pa.date32(), _DATE + _ERA, choice.infinity, (_LAST_DAY, _FIRST_DAY))


def timestamp(_: PgType, choice: ColumnOptions) -> Parser:
    """Return the parser of timestamp: without time zone, or as text if `timestamp_without_tz` is `string`."""
    if choice.timestamp_without_tz == "string":
        return Text()
    return Temporal(pa.timestamp("us"), _DATE + _TIME + _ERA, choice.infinity, _sentinels())


def timestamptz(_: PgType, choice: ColumnOptions) -> Parser:
    """Return the parser of timestamp with time zone: microseconds in UTC, the session's pinned time zone."""
    lake_type = pa.timestamp("us", "UTC")
    return Temporal(lake_type, _DATE + _TIME + r"\+00" + _ERA, choice.infinity, _sentinels("+00"))


def _sentinels(zone: str = "") -> tuple[str, str]:
    return f"{_LAST_DAY} 23:59:59.999999{zone}", f"{_FIRST_DAY} 00:00:00{zone}"
