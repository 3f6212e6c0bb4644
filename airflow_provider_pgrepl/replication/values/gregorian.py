"""The proleptic Gregorian calendar for years that Python's and Arrow's parsers do not know."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

SECONDS_PER_DAY = 86_400
_DAYS_PER_ERA = 146_097  # of 400 years, after which the calendar repeats
_EPOCH_DAY = 719_468  # days from 0000-03-01 to 1970-01-01


def days_since_epoch(year: Integers, month: Integers, day: Integers) -> Integers:
    """Days since 1970-01-01; year 0 is 1 BC. Years begin in March, so that leap days come last.

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
    """Year, month and day of a day since 1970-01-01; the inverse, by the same page."""
    era, day_of_era = divmod(days + _EPOCH_DAY, _DAYS_PER_ERA)
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month_from_march = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month_from_march + 2) // 5 + 1
    month = month_from_march + 3 if month_from_march < 10 else month_from_march - 9
    return era * 400 + year_of_era + (month <= 2), month, day


def is_month_and_day(month: Integers, day: Integers) -> NDArray[np.bool_]:
    """Whether these can be a month and a day at all."""
    return (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
