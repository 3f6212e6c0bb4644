"""Figure: one measured thing, what it is compared with, and whether it is good enough."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """`measured`, `peer`, `ratio` and `limit` as people read them; `numbers` are all single measurements."""

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
        """Write the result as JSON, with the machine and the scale that it was measured at."""
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {"figure": asdict(self), "machine": machine, "scale": scale}
        path.write_text(json.dumps(result, indent=2) + "\n")


def compare(
    work: str, ours: Sequence[float], peers: Sequence[float], limit: float, unit: str, peer: str
) -> Figure:
    """Rates against the peer's of the same run, by their medians; `limit` is the least ratio."""
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
    """Without decimals, as 250,000."""
    return f"{number:,.0f}"
