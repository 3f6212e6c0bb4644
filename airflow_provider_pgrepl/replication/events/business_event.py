"""BusinessEvent: what a transform makes of a change, zero or more of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_pgrepl.replication.events.change import Change


@dataclass(frozen=True)
class BusinessEvent:
    """An event to be sent.

    `body`: bytes and texts are sent as they are; anything else as JSON, with values as a Change has them.
    `key`: events of one key keep their order at Kafka; the key of the row unless given, by the same rule.
    `route` and `type` become topic or routing key by the publisher's `route`: unless given, the table's name
    and the change's operation. `id`: the application's own, sent as header `event_id`; consumers that pass
    over what they have go by the change's id, which each event has.
    """

    body: Any
    key: Any = None
    route: str = ""
    type: str = ""
    id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = ""


Transform = Callable[[Change], Iterable[BusinessEvent] | None]
"""Given a change, what is sent instead of it. Pure: it may be called more than once with the same change."""
