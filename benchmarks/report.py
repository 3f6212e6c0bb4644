"""The table in docs/benchmarks.md, which is rewritten from the results of full runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.figure import Figure

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def read_results(files: Iterable[Path], machine: dict[str, str]) -> list[Figure]:
    """Return the results that were measured at full scale on this machine with its versions."""
    results = [json.loads(file.read_text()) for file in files if file.exists()]
    return [
        Figure(**result["figure"])
        for result in results
        if result["scale"] == 1 and result["machine"] == machine
    ]


def update_page(figures: list[Figure], machine: dict[str, str]) -> None:
    """Write the table between the marks of the page."""
    replace_between(BEGIN, END, _render(figures, machine))


def replace_between(begin: str, end: str, lines: str) -> None:
    """Replace the lines between two marks of the page."""
    before, rest = PAGE.read_text().split(begin)
    after = rest.split(end)[1]
    PAGE.write_text(f"{before}{begin}\n{lines}{end}{after}")


def _render(figures: list[Figure], machine: dict[str, str]) -> str:
    lines = ["| work | measured | compared with | ratio | wanted | |", "|---|---|---|---|---|---|"]
    for figure in figures:
        cells = (figure.work, figure.measured, figure.peer, figure.ratio, figure.limit, figure.verdict)
        lines.append("| " + " | ".join(cell or "–" for cell in cells) + " |")
    return "\n".join([*lines, "", ", ".join(f"{name} {what}" for name, what in machine.items()), ""])
