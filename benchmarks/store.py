"""Lakes in an S3-compatible store on this host, with a direct connection or behind a slow line."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from airflow_provider_pgrepl.replication.settings.lake import store_location
from benchmarks.figure import Figure, thousands
from demo.versitygw import Gateway, environment_of

SLOW_MS = 20.0
PLACES = {"local": None, "S3": 0.0, "S3, 20 ms later": SLOW_MS}
"""The locations where the same work is measured in turns. For a store: the added ms of each exchange."""
_BUCKET = "bench"
_data: list[Path] = []
"""The data folder of the running store, if there is one."""


def lake_uri(folder: Path, name: str) -> str:
    """Return the URI of the lake `name`: in the folder, or in the running store below the folder's name."""
    return f"s3://{_BUCKET}/{folder.name}/{name}" if _data else str(folder / name)


def local_folder(uri: str) -> Path:
    """Return the folder with a lake's files. The store keeps objects as files with the times of their PUT."""
    place = store_location(uri)
    return Path(uri) if place is None else _data[-1] / place.bucket / place.key


@contextmanager
def running_store(folder: Path, delay_ms: float = 0) -> Iterator[None]:
    """Run a store for the lakes of this block. `delay_ms`: the added time of each exchange, both ways."""
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
    """Yield a port that leads to `port` with the delay.

    The proxy has its own process: clients in this one may block all threads while they wait.
    """
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
    """Use one of `PLACES` for the lakes of this block."""
    delay_ms = PLACES[place]
    with nullcontext() if delay_ms is None else running_store(folder, delay_ms):
        yield


def beside_local(work: str, rates: Mapping[str, Sequence[float]], limit: float, unit: str) -> Figure:
    """Return the figure of rates at each of `PLACES`.

    `limit`: the least ratio of the store without delay to the local lake.
    """
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
