"""Event: what a target is given of one change, in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from airflow_provider_pgrepl.replication.events.changes import Operation
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.postgres.lsn import LSN

RESERVE = 1 << 24
"""More events than are sent before a publisher writes down how far its stamps have got."""


@dataclass(frozen=True, slots=True)
class Business:
    """What is said of an event that stands for no change of a row: see BusinessEvent."""

    route: str
    type: str
    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Event:
    """One change as it is sent; `id` is the change's, equal whenever it is sent.

    `generation`: grows with every connection of whichever publisher. In one generation each table's events
    come in their order, each once; a later one begins with the first event that may not have arrived. So who
    passes over whatever is not above the last `(generation, position)` of its table has all, in order.
    `key`: the row's, for targets that keep the order of each key; None of tables that have none. `left`: key
    and body of a message that comes before, when the change gives a row another key: the old one is gone.
    `business`: of an event that was made by a transform. `commit_ts`: None of a message outside of
    transactions.
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
    business: Business | None = None


@dataclass
class Sent:
    """What was acknowledged since the start: events by operation and table; when the newest committed."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    commit_ts: datetime | None = None

    @property
    def tables(self) -> set[str]:
        return {table for _, table in self.counts.copy()}


class Stamps:
    """Consumers that pass over what is not above the last that they had lose nothing, and get again at most
    what they had: whatever is sent again has higher stamps than what may have been sent before."""

    def __init__(self) -> None:
        self.last = 0

    def next(self, commit_lsn: LSN) -> int:
        """For a change of the transaction that committed there, which comes after all that had a stamp."""
        self.last = max(self.last + 1, commit_lsn)
        return self.last


def above_all(written_down: int, durable: LSN) -> int:
    """At or above each stamp that an earlier run may have given: events that it sent were durable, and had
    no higher commit LSN than what is durable now."""
    return max(written_down, durable) + RESERVE
