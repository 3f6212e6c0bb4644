"""The apply rate of updates that change the key."""

from __future__ import annotations

from pathlib import Path

from benchmarks import apply, kinds
from benchmarks.figure import Figure


def run(folder: Path, scale: float) -> Figure:
    """Measure updates that change the key."""
    return apply.run_kind(folder, scale, kinds.KEYS)
