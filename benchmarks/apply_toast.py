"""The apply rate of updates that leave large values unchanged."""

from __future__ import annotations

from pathlib import Path

from benchmarks import apply, kinds
from benchmarks.figure import Figure


def run(folder: Path, scale: float) -> Figure:
    """Measure updates for which the server does not send the unchanged large values."""
    return apply.run_kind(folder, scale, kinds.TOAST)
