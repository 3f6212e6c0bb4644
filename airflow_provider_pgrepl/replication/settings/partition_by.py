"""PartitionBy: by which column, and what of its values, the files of a lake table are kept apart."""

from __future__ import annotations

import re
from dataclasses import dataclass

from airflow_provider_pgrepl.replication.postgres.names import show_identifier

PARTITION = "_pgrepl_partition"
"""The lake table's column. No column of a source's table may have the name."""

UNITS = ("year", "month", "day")

_OF_UNIT = re.compile(r"(?P<unit>[^\W\d]\w*)\s*\((?P<column>.*)\)", re.DOTALL)
_QUOTED = re.compile(r'"((?:[^"]|"")+)"', re.DOTALL)


@dataclass(frozen=True)
class PartitionBy:
    """`unit`: of dates and times, up to what they are looked at; empty: the whole value."""

    column: str
    unit: str = ""

    @classmethod
    def parse(cls, text: str) -> PartitionBy:
        """Read `region`, `month(placed_at)` or, of an odd name, `day("Placed at")`. Raises ValueError."""
        text = text.strip()
        match = _OF_UNIT.fullmatch(text)
        if match is None:
            return cls(_column(text))
        if match["unit"] not in UNITS:
            raise ValueError(f"{text!r} asks for {match['unit']!r}, which is none of {', '.join(UNITS)}")
        return cls(_column(match["column"].strip()), match["unit"])

    def __str__(self) -> str:
        """As a pipeline file has it."""
        shown = show_identifier(self.column)
        return f"{self.unit}({shown})" if self.unit else shown


def _column(text: str) -> str:
    quoted = _QUOTED.fullmatch(text)
    if quoted is not None:
        return quoted[1].replace('""', '"')
    if not text or any(letter in text for letter in '"()'):
        raise ValueError(f"{text!r} is not a column's name")
    return text
