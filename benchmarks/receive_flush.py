"""The cost of the flush of the changelog before the LSN is confirmed: receiving with and without fsync."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import receive
from benchmarks.figure import Figure, compare
from benchmarks.source import running_source

_REPEAT = 3
_LIMIT = 0.9


def run(folder: Path, scale: float) -> Figure:
    """Measure both in turns, on copies of one slot."""
    flush, flushes = os.fsync, list[float]()

    def timed(descriptor: int) -> None:
        started = time.perf_counter()
        flush(descriptor)
        flushes.append(time.perf_counter() - started)

    with running_source() as source:
        first, end, changes = receive.prepare(source, folder, scale, _REPEAT)
        flushed, cached = [], []
        for number in range(1, _REPEAT + 1):
            with _flushing(timed):
                flushed.append(
                    changes / receive.receive(source, receive.numbered(first, "ours", number), end)
                )
            with _flushing(lambda _: None):
                cached.append(changes / receive.receive(source, receive.numbered(first, "peer", number), end))
    work = f"receive: what fsync takes, {changes / 1e6:g} M changes"
    figure = compare(work, flushed, cached, _LIMIT, "changes/s", "without fsync")
    share = sum(flushes) / sum(changes / rate for rate in flushed)
    figure.numbers["share of the time in fsync"] = round(share, 4)
    figure.numbers["fsync, times and mean ms"] = [len(flushes), round(1e3 * sum(flushes) / len(flushes), 2)]
    return figure


@contextmanager
def _flushing(flush: Callable[[int], None]) -> Iterator[None]:
    before = os.fsync
    os.fsync = flush  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = before
