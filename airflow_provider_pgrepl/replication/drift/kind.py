"""Kind: how far a lake table can go on with a relation that is not the one it was built for."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """Whether a lake table goes on as it is, after a change of its own, or not at all."""

    UNCHANGED = "unchanged"
    SAFE = "safe"
    UNSAFE = "unsafe"
