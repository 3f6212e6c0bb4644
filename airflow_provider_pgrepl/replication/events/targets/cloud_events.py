"""CloudEvents: what an event says of itself in the attributes of CloudEvents 1.0, in binary mode."""

from __future__ import annotations

from datetime import UTC
from urllib.parse import quote

from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.settings.publisher_settings import PublisherSettings

KAFKA_PREFIX = "ce_"
"""Of headers (Kafka protocol binding, 3.2.3)."""
RABBITMQ_PREFIX = "ce-"
"""Of headers (Knative's RabbitMQ protocol binding, 3.1.3)."""
NATS_PREFIX = "ce-"
"""Of headers (NATS protocol binding, 3.1.3)."""
NATS_ID = "Pgrepl-Id"
"""Our header of an event's id, which it keeps whenever it is sent."""


def attributes(event: Event, settings: PublisherSettings) -> dict[str, str]:
    """All but `datacontenttype`, which each protocol has a place for.

    `id` with `source` is unique: the application's own of a business event that has one, else the change's.
    """
    said = event.business
    own = "" if said is None else said.headers.get("event_id", "")
    found = {
        "specversion": "1.0",
        "id": own or event.id,
        "source": f"/{quote(settings.source, safe='')}",
        "type": f"{settings.source}.{event.table}.{event.op}"
        if said is None
        else said.type or said.route or "message",
        "subject": event.table,
    }
    if event.commit_ts is not None:
        found["time"] = event.commit_ts.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return found
