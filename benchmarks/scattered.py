"""A thousand updates a second of any rows of one table: how late, how many bytes, how much work, by size.

The same small load on tables of all sizes: what a change costs must follow the change.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.updated_table import measure

_LIMITS = {0.1: 3.0, 1: 3.0, 5: 5.0, 20: 8.0, 50: 15.0}
"""Millions of rows, and within how many seconds 95 of 100 updates are to be seen."""
_BASE = 1
"""Millions of rows; what a change costs in larger tables is compared with it."""
_LIMIT_GROWTH = 4.0


def run(folder: Path, scale: float) -> Figure:
    """All sizes, each in a database and a pipeline of its own."""
    found = {size: measure(folder / f"{size:g}", size, scale) for size in _LIMITS}
    base, largest = found[_BASE], found[max(_LIMITS)]
    growths = (
        largest.bytes_per_change / base.bytes_per_change,
        largest.cpu_us_per_change / base.cpu_us_per_change,
    )
    in_time = all(one.p95_s <= _LIMITS[size] for size, one in found.items())
    numbers = {f"{size:g} M rows": one.numbers() for size, one in found.items()}
    return Figure(
        f"1,000 updates/s of any rows, one table of {', '.join(f'{size:g}' for size in _LIMITS)} M rows",
        f"p95 {', '.join(f'{one.p95_s:.1f}' for one in found.values())} s",
        "",
        f"bytes {growths[0]:.1f}, CPU {growths[1]:.1f} from {_BASE} to {max(_LIMITS)} M rows",
        f"p95 ≤ {', '.join(f'{limit:g}' for limit in _LIMITS.values())} s; growth ≤ {_LIMIT_GROWTH:g}",
        in_time and max(growths) <= _LIMIT_GROWTH,
        {**numbers, "growth of bytes, CPU a change": [round(growth, 2) for growth in growths]},
    )
