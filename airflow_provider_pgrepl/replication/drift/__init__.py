"""Drift: the changes of a source table since its lake table was built, and the lake's response. No side
effects."""

from __future__ import annotations

from enum import StrEnum


class DriftKind(StrEnum):
    """The result of a comparison: the lake table continues unchanged, continues after a change, or stops."""

    UNCHANGED = "unchanged"
    SAFE = "safe"
    UNSAFE = "unsafe"
