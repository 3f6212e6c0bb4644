"""LSN and Epoch: a position in the source's history."""

from __future__ import annotations

import re
from typing import NewType

_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")

Epoch = NewType("Epoch", int)
"""The number of an unbroken history of a slot, from 1. LSNs of different epochs cannot be compared."""


class LSN(int):
    """A position in PostgreSQL's write-ahead log: a byte offset, shown as `X/X`.

    https://www.postgresql.org/docs/current/datatype-pg-lsn.html
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> LSN:
        """Parse an LSN such as `16/B374D848`. Raises ValueError."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an LSN (expected like 16/B374D848)")
        return cls((int(match[1], 16) << 32) | int(match[2], 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"LSN({self})"
