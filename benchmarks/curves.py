"""The curves in docs/benchmarks.md: delay and cost of an update, by the number of rows of the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.chart import Chart
from benchmarks.report import PAGE, replace_between

BEGIN, END = "<!-- curves: begin -->", "<!-- curves: end -->"
_PICTURES = "images"
"""The folder of the pictures, next to the page."""
_X_TITLE = "million rows in the table"
_LINES = {
    "scattered-seconds": ("Updates of any rows, until they are seen", "seconds", ("p50 s", "p95 s")),
    "scattered-bytes": ("Written into the lake for an update", "bytes", ("bytes a change",)),
    "scattered-cpu": ("CPU time of the app for an update", "microseconds", ("CPU µs a change",)),
}
"""Title, unit and shown numbers of `scattered`, by the name of the picture."""


def update_page(result: Path) -> None:
    """Draw the results of a full run of `scattered`, and link the pictures in the page.

    Does nothing without a result at full scale.
    """
    if not result.exists():
        return
    found = json.loads(result.read_text())
    if found["scale"] == 1:
        draw(found["figure"]["numbers"], PAGE.parent / _PICTURES)
        links = [f"![{title}]({_PICTURES}/{name}.svg)" for name, (title, _, _) in _LINES.items()]
        replace_between(BEGIN, END, "\n\n".join(links) + "\n")


def draw(numbers: dict[str, Any], folder: Path) -> None:
    """Write the pictures to `folder`."""
    sizes = [size for size in numbers.values() if isinstance(size, dict)]
    folder.mkdir(exist_ok=True)
    for name, (title, unit, shown) in _LINES.items():
        lines = {_name(key): [(size["M rows"], size[key]) for size in sizes] for key in shown}
        (folder / f"{name}.svg").write_text(Chart(title, unit, _X_TITLE, lines).svg())


def _name(key: str) -> str:
    """Return the name of a line: that of its number, without the unit `s`."""
    return key.removesuffix(" s")
