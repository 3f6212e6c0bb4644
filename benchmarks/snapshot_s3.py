"""The rate of a snapshot into a lake in an S3-compatible store, compared with one in a folder."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.snapshot import ROWS, copy, prepared
from benchmarks.store import PLACES, beside_local, lakes_in

_REPEAT = 3
_LIMIT = 0.8


def run(folder: Path, scale: float) -> Figure:
    """Measure the figure *snapshot* at each of `PLACES`, in turns."""
    rows = int(ROWS * scale)
    rates: dict[str, list[float]] = {place: [] for place in PLACES}
    with prepared(folder, rows) as (spark, source, store):
        for number in range(_REPEAT):
            for at, place in enumerate(PLACES):
                with lakes_in(place, folder):
                    seconds = copy(spark, source, store, folder, f"{at}_{number}")
                rates[place].append(rows / seconds)
    return beside_local(
        f"snapshot: {rows / 1e6:g} M rows × 8 mixed columns to S3, local[2]", rates, _LIMIT, "rows/s"
    )
