"""A measured figure, with its peer and its limit."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A measured figure.

    `measured`, `peer`, `ratio` and `limit` are texts for readers. `ok`: True if the figure meets its limit.
    `numbers`: all single measurements.
    """

    work: str
    measured: str
    peer: str
    ratio: str
    limit: str
    ok: bool
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return "OK" if self.ok else "MISSED"

    def write(self, path: Path, machine: dict[str, str], scale: float) -> None:
        """Write the result as JSON, with the machine and the scale of the measurement."""
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {"figure": asdict(self), "machine": machine, "scale": scale}
        path.write_text(json.dumps(result, indent=2) + "\n")


def compare(
    work: str, ours: Sequence[float], peers: Sequence[float], limit: float, unit: str, peer: str
) -> Figure:
    """Return the figure of rates compared with a peer's rates of the same run.

    The medians are compared. `limit`: the least ratio.
    """
    own, other = statistics.median(ours), statistics.median(peers)
    return Figure(
        work,
        f"{thousands(own)} {unit}",
        f"{peer}: {thousands(other)} {unit}",
        f"{own / other:.2f}",
        f"≥ {limit} × peer",
        own / other >= limit,
        {"ours": [round(value) for value in ours], "peer": [round(value) for value in peers]},
    )


def thousands(number: float) -> str:
    """Return a number without decimals, such as 250,000."""
    return f"{number:,.0f}"
