"""Updates of only the newest rows, which are the most common: the table's size must not matter."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.updated_table import measure

_RECENT = 10_000
_SMALL, _LARGE = 1, 50
"""Sizes of the table in million rows."""
_LIMIT, _LIMIT_S = 1.3, 0.3


def run(folder: Path, scale: float) -> Figure:
    """Measure both sizes, each with its own database and pipeline."""
    small, large = (measure(folder / str(size), size, scale, recent=_RECENT) for size in (_SMALL, _LARGE))
    return Figure(
        f"1,000 updates/s of the last {_RECENT:,} rows, one table of {_LARGE} M rows",
        f"p95 {large.p95_s:.1f} s",
        f"{_SMALL} M rows: p95 {small.p95_s:.1f} s",
        f"{large.p95_s / small.p95_s:.2f}",
        f"≤ {_LIMIT:g} × + {_LIMIT_S:g} s",
        large.p95_s <= _LIMIT * small.p95_s + _LIMIT_S,
        {f"{one.millions:g} M rows": one.numbers() for one in (small, large)},
    )
