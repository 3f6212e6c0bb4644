"""Lakes in a store that speaks S3, on this host: at once, or behind a line that takes its time."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from airflow_provider_pgrepl.replication.settings.lake import place_in_store
from benchmarks.figure import Figure, thousands
from demo.versitygw import Gateway, environment_of

SLOW_MS = 20.0
PLACES = {"local": None, "S3": 0.0, "S3, 20 ms later": SLOW_MS}
"""Where the same work is measured in turns; of a store, what each exchange takes longer."""
_BUCKET = "bench"
_data: list[Path] = []
"""Of the store that runs."""


def lake_uri(folder: Path, name: str) -> str:
    """Where a lake of that name lies: in the folder, or below its name in the store that runs."""
    return f"s3://{_BUCKET}/{folder.name}/{name}" if _data else str(folder / name)


def local_folder(uri: str) -> Path:
    """The folder that has a lake's files; the store keeps objects as files, with the times of their puts."""
    place = place_in_store(uri)
    return Path(uri) if place is None else _data[-1] / place.bucket / place.key


@contextmanager
def running_store(folder: Path, delay_ms: float = 0) -> Iterator[None]:
    """Lakes that are made in this block lie in it. `delay_ms`: what each exchange takes longer, in all."""
    gateway = Gateway(folder / f"store_{delay_ms:g}")
    gateway.start()
    gateway.make_bucket(_BUCKET)
    before = dict(os.environ)
    try:
        with _line(gateway.port, delay_ms) as port:
            os.environ.update(environment_of(port))
            _data.append(gateway.data)
            yield
    finally:
        _data.clear()
        os.environ.clear()
        os.environ.update(before)
        gateway.stop()


@contextmanager
def _line(port: int, delay_ms: float) -> Iterator[int]:
    """In a process of its own: clients in this one may wait without letting another thread run."""
    if not delay_ms:
        yield port
        return
    command = [sys.executable, "-m", "benchmarks.slow_line", str(port), str(delay_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as line:
        assert line.stdout is not None
        try:
            yield int(line.stdout.readline())
        finally:
            line.terminate()


@contextmanager
def lakes_in(place: str, folder: Path) -> Iterator[None]:
    """One of `PLACES`, for the lakes that are made in this block."""
    delay_ms = PLACES[place]
    with nullcontext() if delay_ms is None else running_store(folder, delay_ms):
        yield


def beside_local(work: str, rates: Mapping[str, Sequence[float]], limit: float, unit: str) -> Figure:
    """Rates at each of `PLACES`: that of the store without delay has to be this share of the local one's."""
    local, store, slow = (statistics.median(rates[place]) for place in PLACES)
    return Figure(
        work,
        f"{thousands(store)} {unit}; each exchange {SLOW_MS:g} ms later: {thousands(slow)}",
        f"a local lake: {thousands(local)} {unit}",
        f"{store / local:.2f}; {slow / local:.2f}",
        f"≥ {limit} × local",
        store >= limit * local,
        {place: [round(rate) for rate in rates[place]] for place in PLACES},
    )
