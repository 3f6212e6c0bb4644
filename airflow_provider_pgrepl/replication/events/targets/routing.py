"""Routes: to which topic, or with which routing key, an event goes."""

from __future__ import annotations

import re
from datetime import UTC
from functools import lru_cache
from urllib.parse import quote

from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings

_PATTERN = str.maketrans({sign: f"%{ord(sign):02X}" for sign in "*#%"})
"""What stands for words in a binding."""
_SPECIAL = {**_PATTERN, ord("."): "%2E"}
"""What separates words, too."""
_OF_SUBJECTS = re.compile(r"[\s.*>%\x00-\x1f\x7f]")
"""What separates the words of a subject, or stands for words."""
_PLACES = re.compile(r"\{(?:route|type|schema|table)\}")
_NOT_OF_TOPICS = re.compile("[^a-zA-Z0-9._-]")
KAFKA_PREFIX = "ce_"
"""Of headers (Kafka protocol binding, 3.2.3)."""
RABBITMQ_PREFIX = "ce-"
"""Of headers (Knative's RabbitMQ protocol binding, 3.1.3)."""
NATS_PREFIX = "ce-"
"""Of headers (NATS protocol binding, 3.1.3)."""
NATS_ID = "Pgrepl-Id"
"""Our header of an event's id, which it keeps whenever it is sent."""


def routing_key(event: Event, settings: PublisherSettings) -> str:
    """Of RabbitMQ: `schema.table.op`, as `public.orders.insert`, three words however a table is called: in a
    name `.`, `*`, `#` and `%` are percent-encoded. A business event's is made by `route`, in whose parts a
    `.` separates words."""
    said = event.business
    if said is not None:
        return _filled(settings.route, said.route.translate(_PATTERN), said.type.translate(_PATTERN))
    return _key(event.table, event.op)


def subject(event: Event, settings: PublisherSettings) -> str:
    """Of NATS: the stream's name, then as a routing key; empty words, which a subject cannot have, are left
    out."""
    said = event.business
    if said is None:
        return f"{settings.stream}.{words_of(event.table)}.{event.op}"
    words = _filled(settings.route, said.route, said.type).split(".")
    return ".".join([settings.stream, *(word_of(word) for word in words if word)])


def topic(event: Event, settings: PublisherSettings) -> str:
    """Of Kafka."""
    said = event.business
    if said is not None:
        return _NOT_OF_TOPICS.sub("_", _filled(settings.route, said.route, said.type))
    return topic_of(settings.topic, event.table)


@lru_cache(10_000)
def topic_of(template: str, table: str) -> str:
    """As the template says; what a topic's name may not hold becomes `_`, as with Debezium."""
    name = TableName.parse(table)
    fields = {"{schema}": name.schema, "{table}": name.name}
    return _PLACES.sub(lambda found: _NOT_OF_TOPICS.sub("_", fields.get(found[0], found[0])), template)


@lru_cache(10_000)
def words_of(table: str) -> str:
    """How subjects of a table end."""
    name = TableName.parse(table)
    return f"{word_of(name.schema)}.{word_of(name.name)}"


def word_of(name: str) -> str:
    """A name as one word of a subject."""
    return _OF_SUBJECTS.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), name)


@lru_cache(10_000)
def _key(table: str, op: str) -> str:
    name = TableName.parse(table)
    return f"{name.schema.translate(_SPECIAL)}.{name.name.translate(_SPECIAL)}.{op}"


def _filled(template: str, route: str, type_: str) -> str:
    if not type_:
        # A logical message has none: what separates it would end the route.
        template = template.replace(".{type}", "").replace("{type}.", "").replace("{type}", "")
    values = {"{route}": route, "{type}": type_}
    # In one go: a route may be called {type}.
    return _PLACES.sub(lambda found: values.get(found[0], found[0]), template)


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
