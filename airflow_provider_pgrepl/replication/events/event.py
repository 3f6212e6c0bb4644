"""A change as an encoded event, and the numbers that let consumers ignore repeated events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from airflow_provider_pgrepl.replication.postgres.lsn import LSN

from .changes import Operation
from .position import EventPosition

RESERVE = 1 << 24
"""An upper bound of the events that a publisher sends before it records its highest stamp."""


@dataclass(frozen=True, slots=True)
class BusinessRoute:
    """The route, type and headers of an event that a transform made: see BusinessEvent."""

    route: str
    type: str
    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Event:
    """One encoded change. `id` is the change's id, which is the same each time the event is sent.

    `generation`: a number that grows with every connection of any run of the publisher. Within a generation,
    each table's events are sent in order and once. A new generation starts with the first event that may not
    have arrived. A consumer that ignores every event at or below the last `(generation, position)` of its
    table therefore receives all events in order.

    `key`: the key of the row, for targets that keep the order of each key; None for a table without a key.
    `left`: key and body of a message to send first, if the change gives the row another key: it deletes the
    old key. `business`: set if a transform made the event. `commit_ts`: None for a message outside of a
    transaction.
    """

    position: EventPosition
    id: str
    relation_id: int
    table: str
    op: Operation
    commit_ts: datetime | None
    body: bytes
    generation: int = 0
    key: bytes | None = None
    left: tuple[bytes, bytes] | None = None
    business: BusinessRoute | None = None


@dataclass
class PublishedCounts:
    """The events acknowledged since the start, counted by operation and table, and the newest commit time."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    commit_ts: datetime | None = None

    @property
    def tables(self) -> set[str]:
        return {table for _, table in self.counts.copy()}


class EventNumbers:
    """Numbers that grow with every event sent.

    An event that is sent again gets a higher stamp than any event before it. So a consumer that ignores
    stamps at or below its last one loses nothing; it can only receive events that it already has again.
    """

    def __init__(self) -> None:
        self.last = 0

    def next(self, commit_lsn: LSN) -> int:
        """Return a new stamp: above the last one, and at least the commit LSN of the change's transaction."""
        self.last = max(self.last + 1, commit_lsn)
        return self.last


def above_all(written_down: int, durable: LSN) -> int:
    """Return a number at or above every stamp that an earlier run may have used.

    Events of an earlier run were durable when they were sent: their commit LSNs are not above `durable`.
    `written_down`: the last recorded stamp.
    """
    return max(written_down, durable) + RESERVE
