"""Nothing here ends the machine: what is written need not reach the disk."""

from __future__ import annotations

from tests.support.unflushed import unflushed

__all__ = ["unflushed"]
