"""As `written`, over an hour: maintenance runs meanwhile, and old versions and files go."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.written import run_for

_MINUTES = 60


def run(folder: Path, scale: float) -> Figure:
    """Long enough that what is stored neither grows nor shrinks any more."""
    return run_for(folder, scale, _MINUTES)
