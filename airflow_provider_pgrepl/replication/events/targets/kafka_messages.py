"""The messages of an event at Kafka: their keys, bodies and headers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.formats.json_format import to_json_object
from airflow_provider_pgrepl.replication.events.targets.cloud_events import KAFKA_PREFIX, attributes
from airflow_provider_pgrepl.replication.settings.publisher_settings import PublisherSettings

Headers = list[tuple[str, str | bytes | None]]
_NEW_KEY, _OLD_KEY = "__debezium.newkey", "__debezium.oldkey"
"""By which consumers of Debezium know that a deletion and an insertion are a change of one row's key.

https://debezium.io/documentation/reference/stable/connectors/postgresql.html#postgresql-primary-key-updates
"""
_BY_ITS_KEY = -1
"""librdkafka's RD_KAFKA_PARTITION_UA."""


class Message(NamedTuple):
    """One message, to the partition of its key unless another is said."""

    key: bytes | None
    body: bytes | None
    headers: Headers
    partition: int = _BY_ITS_KEY


def messages_of(
    event: Event,
    settings: PublisherSettings,
    partitions: Callable[[], Sequence[int]],
    prefix: bytes = b"",
) -> list[Message]:
    """All of an event's: the one, but for a key that changes, a TRUNCATE, and tombstones. `partitions`: gives
    those of its topic; `prefix`: of each body."""
    one = Message(event.key or table_key(event.table), prefix + event.body, _headers(event, settings))
    if event.business is not None:
        return [one]
    if event.key is None and settings.format == "debezium":
        # Whose sinks take no key that has no schema; one partition keeps the order.
        one = one._replace(key=None, partition=0)
    if event.op == "truncate":
        return [one._replace(partition=number) for number in partitions()]
    found, gone = [one], event.key if event.op == "delete" else None
    if event.left is not None:
        gone, body = event.left
        left = _headers(replace(event, id=f"{event.id}:old", op="delete"), settings)
        if settings.format == "debezium":
            left.append((_NEW_KEY, event.key))
            one.headers.append((_OLD_KEY, gone))
        found.insert(0, Message(gone, prefix + body, left))
    if gone and settings.tombstones:
        found.insert(1, Message(gone, None, one.headers[1:2]))
    return found


@lru_cache(10_000)
def table_key(table: str) -> bytes:
    """The key of all messages of a table whose rows have none."""
    return to_json_object({"table": table}).encode()


def _headers(event: Event, settings: PublisherSettings) -> Headers:
    """Those of the event's own message."""
    found: Headers = [("id", event.id), ("generation", str(event.generation))]
    said = event.business
    if said is None:
        found.append(("op", event.op))
    else:
        found += [("type", said.type), ("content-type", said.content_type)]
        found += said.headers.items()
    if settings.cloudevents:
        found += [(f"{KAFKA_PREFIX}{name}", value) for name, value in attributes(event, settings).items()]
        found += [("content-type", "application/json")] if said is None else []
    return found
