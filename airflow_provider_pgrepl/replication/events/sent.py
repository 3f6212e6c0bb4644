"""What a target has acknowledged, for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime


@dataclass
class Sent:
    """What was acknowledged since the start: events by operation and table; when the newest committed."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    commit_ts: datetime | None = None

    @property
    def tables(self) -> set[str]:
        return {table for _, table in self.counts.copy()}
