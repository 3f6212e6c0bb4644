"""The apply rate of a table without a key."""

from __future__ import annotations

from pathlib import Path

from benchmarks import apply, kinds
from benchmarks.figure import Figure


def run(folder: Path, scale: float) -> Figure:
    """Measure changes of a table without a key."""
    return apply.run_kind(folder, scale, kinds.KEYLESS)
