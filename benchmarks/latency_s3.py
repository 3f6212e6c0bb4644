"""The delay from COMMIT until a lake in a store shows the change, also with 20 ms more for each exchange."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.latency import LOAD, Seen, measure
from benchmarks.store import PLACES, SLOW_MS, lakes_in

_MORE_S = 2.0


def run(folder: Path, scale: float) -> Figure:
    """Measure the figure *latency* in a folder, in the store, and in the store behind a slow line."""
    seen: dict[str, Seen] = {}
    for at, place in enumerate(PLACES):
        with lakes_in(place, folder):
            seen[place] = measure(folder / f"latency_{at}", scale)
    local, store, slow = (seen[place] for place in PLACES)
    return Figure(
        f"commit → visible in a lake on S3, {LOAD}",
        f"{store}; each exchange {SLOW_MS:g} ms later: {slow}",
        f"a local lake: {local}",
        f"p95 {store.p95_s - local.p95_s:+.2f} s; {slow.p95_s - local.p95_s:+.2f} s",
        f"p95 ≤ {_MORE_S:g} s more at {SLOW_MS:g} ms",
        slow.p95_s <= local.p95_s + _MORE_S,
        {place: found.numbers() for place, found in seen.items()},
    )
