"""The receive rate into a changelog in an S3-compatible store, compared with one in a folder."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.receive import numbered, prepare, receive
from benchmarks.source import running_source
from benchmarks.store import PLACES, beside_local, lakes_in

_REPEAT = 3
_LIMIT = 0.9


def run(folder: Path, scale: float) -> Figure:
    """Measure each of `PLACES` in turns, on copies of one slot."""
    rates: dict[str, list[float]] = {place: [] for place in PLACES}
    with running_source() as source:
        first, end, changes = prepare(source, folder, scale, _REPEAT * len(PLACES))
        for number in range(_REPEAT * len(PLACES)):
            place = list(PLACES)[number % len(PLACES)]
            with lakes_in(place, folder):
                seconds = receive(source, numbered(first, "ours", number + 1), end)
            rates[place].append(changes / seconds)
    return beside_local(
        f"receive: slot → changelog on S3, {changes / 1e6:g} M changes", rates, _LIMIT, "changes/s"
    )
