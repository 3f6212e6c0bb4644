"""Event: what a target is given of one change, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from airflow_provider_pgrepl.replication.events.change import Change, Operation
from airflow_provider_pgrepl.replication.events.json_format import to_json
from airflow_provider_pgrepl.replication.events.position import EventPosition


@dataclass(slots=True)
class Event:
    """One change as it is sent; `id` is the change's, equal whenever it is sent.

    `generation`: grows with every connection of whichever publisher. In one generation each table's events
    come in their order, each once; a later one begins with the first event that may not have arrived. So who
    passes over whatever is not above the last `(generation, position)` of its table has all, in order.
    `key`: the row's, for targets that keep the order of each key; None of tables that have none. `left`: key
    and body of a message that comes before, when the change gives a row another key: the old one is gone.
    """

    position: EventPosition
    id: str
    relation_id: int
    table: str
    op: Operation
    commit_ts: datetime
    body: bytes
    generation: int = 0
    key: bytes | None = None
    left: tuple[bytes, bytes] | None = None


def event_of(change: Change) -> Event:
    """Encode a change."""
    return Event(
        change.position,
        change.id,
        change.relation_id,
        change.table,
        change.op,
        change.commit_ts,
        to_json(change).encode(),
    )
