"""The apply rate with changelog and table in an S3-compatible store, compared with both in a folder."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks import kinds
from benchmarks.apply import Trial, warm_spark
from benchmarks.figure import Figure
from benchmarks.store import PLACES, beside_local, lakes_in

_INSERTS, _UPDATES = 1_000_000, 500_000
_REPEAT = 3
_LIMIT = 0.7


def run(folder: Path, scale: float) -> Figure:
    """Measure the figure *apply* at each of `PLACES`, in turns."""
    inserts, updates = int(_INSERTS * scale), int(_UPDATES * scale)
    rates: dict[str, list[float]] = {place: [] for place in PLACES}
    for number in range(_REPEAT):
        for place in PLACES:
            # Use a new process: Spark's processes keep the environment of the JVM's start, with its store.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
                trial = own.submit(_rate, place, folder, number, inserts, updates)
                rates[place].append(trial.result())
    work = f"apply: changelog → merged table on S3, {(inserts + updates) / 1e6:g} M changes"
    return beside_local(work, rates, _LIMIT, "changes/s")


def _rate(place: str, folder: Path, number: int, inserts: int, updates: int) -> float:
    with lakes_in(place, folder), warm_spark() as spark:
        name = f"apply_{list(PLACES).index(place)}_{number}"
        return Trial(spark, folder, kinds.PLAIN, inserts, updates).run(name)
