"""The topics, routing keys and subjects of events, and their CloudEvents attributes."""

from __future__ import annotations

import re
from datetime import UTC
from functools import lru_cache
from urllib.parse import quote

from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings

_PATTERN = str.maketrans({sign: f"%{ord(sign):02X}" for sign in "*#%"})
"""The wildcards of a binding, and the percent sign."""
_SPECIAL = {**_PATTERN, ord("."): "%2E"}
"""The characters of `_PATTERN`, and the separator of words."""
_OF_SUBJECTS = re.compile(r"[\s.*>%\x00-\x1f\x7f]")
"""The separators and wildcards of a subject, and the characters that a subject cannot contain."""
_PLACES = re.compile(r"\{(?:route|type|schema|table)\}")
_NOT_OF_TOPICS = re.compile("[^a-zA-Z0-9._-]")
KAFKA_PREFIX = "ce_"
"""The prefix of headers (Kafka protocol binding, 3.2.3)."""
RABBITMQ_PREFIX = "ce-"
"""The prefix of headers (Knative's RabbitMQ protocol binding, 3.1.3)."""
NATS_PREFIX = "ce-"
"""The prefix of headers (NATS protocol binding, 3.1.3)."""
NATS_ID = "Pgrepl-Id"
"""This package's header for the id of an event, which is the same each time the event is sent."""


def routing_key(event: Event, settings: PublisherSettings) -> str:
    """Return the routing key of RabbitMQ: `schema.table.op`, for example `public.orders.insert`.

    It always has three words: `.`, `*`, `#` and `%` in a name are percent-encoded. The key of a business
    event is made by the setting `route`; a `.` in its parts separates words.
    """
    said = event.business
    if said is not None:
        return _filled(settings.route, said.route.translate(_PATTERN), said.type.translate(_PATTERN))
    return _key(event.table, event.op)


def subject(event: Event, settings: PublisherSettings) -> str:
    """Return the subject of NATS: the stream's name, then words as in a routing key.

    Empty words are omitted, because a subject cannot contain them.
    """
    said = event.business
    if said is None:
        return f"{settings.stream}.{words_of(event.table)}.{event.op}"
    words = _filled(settings.route, said.route, said.type).split(".")
    return ".".join([settings.stream, *(word_of(word) for word in words if word)])


def topic(event: Event, settings: PublisherSettings) -> str:
    """Return the topic of Kafka."""
    said = event.business
    if said is not None:
        return _NOT_OF_TOPICS.sub("_", _filled(settings.route, said.route, said.type))
    return topic_of(settings.topic, event.table)


@lru_cache(10_000)
def topic_of(template: str, table: str) -> str:
    """Return the topic of a table by the template.

    Characters that a topic's name cannot contain become `_`, as in Debezium.
    """
    name = TableName.parse(table)
    fields = {"{schema}": name.schema, "{table}": name.name}
    return _PLACES.sub(lambda found: _NOT_OF_TOPICS.sub("_", fields.get(found[0], found[0])), template)


@lru_cache(10_000)
def words_of(table: str) -> str:
    """Return the words of a table in a subject: schema and name."""
    name = TableName.parse(table)
    return f"{word_of(name.schema)}.{word_of(name.name)}"


def word_of(name: str) -> str:
    """Return a name as one word of a subject."""
    return _OF_SUBJECTS.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), name)


@lru_cache(10_000)
def _key(table: str, op: str) -> str:
    name = TableName.parse(table)
    return f"{name.schema.translate(_SPECIAL)}.{name.name.translate(_SPECIAL)}.{op}"


def _filled(template: str, route: str, type_: str) -> str:
    if not type_:
        # A logical message has no type: remove the separator with it, so that the route does not end with
        # one.
        template = template.replace(".{type}", "").replace("{type}.", "").replace("{type}", "")
    values = {"{route}": route, "{type}": type_}
    # Replace all in one pass: a route may contain the text {type}.
    return _PLACES.sub(lambda found: values.get(found[0], found[0]), template)


def attributes(event: Event, settings: PublisherSettings) -> dict[str, str]:
    """Return the CloudEvents attributes, except for `datacontenttype`, which depends on the protocol.

    `id` and `source` together are unique. `id` is the application's own id of a business event if it has one,
    otherwise the id of the event.
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
