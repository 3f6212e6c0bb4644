"""The figure `written` over an hour, in which maintenance deletes old versions and files."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.written import run_for

_MINUTES = 60


def run(folder: Path, scale: float) -> Figure:
    """Measure an hour, after which the stored bytes neither grow nor shrink."""
    return run_for(folder, scale, _MINUTES)
