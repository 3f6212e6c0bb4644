"""Delay, bytes and CPU time of a thousand updates per second of random rows, by the size of the table.

All tables have the same small load: the cost of a change must depend on the change, not on the table.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.updated_table import measure

_LIMITS = {0.1: 3.0, 1: 3.0, 5: 5.0, 20: 8.0, 50: 15.0}
"""The limit in seconds for the 95th percentile of delays, by the size of the table in million rows."""
_BASE = 1
"""The size in million rows with which the cost of a change in the largest table is compared."""
_LIMIT_GROWTH = 4.0


def run(folder: Path, scale: float) -> Figure:
    """Measure all sizes, each with its own database and pipeline."""
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
