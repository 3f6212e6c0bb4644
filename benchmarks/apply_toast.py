"""Apply where updates leave out large values."""

from __future__ import annotations

from pathlib import Path

from benchmarks import apply, kinds
from benchmarks.figure import Figure


def run(folder: Path, scale: float) -> Figure:
    """Apply changes that do not send large values."""
    return apply.run_kind(folder, scale, kinds.TOAST)
