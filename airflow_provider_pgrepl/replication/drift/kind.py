"""The kinds of drift, by what the lake table can do about it."""

from __future__ import annotations

from enum import StrEnum


class DriftKind(StrEnum):
    """The result of a comparison: the lake table continues unchanged, continues after a change, or stops."""

    UNCHANGED = "unchanged"
    SAFE = "safe"
    UNSAFE = "unsafe"
