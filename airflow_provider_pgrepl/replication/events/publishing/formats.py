"""What a publisher's settings make of changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.by_relation import ByRelation, ChoicesOf, Shape
from airflow_provider_pgrepl.replication.events.change import Change
from airflow_provider_pgrepl.replication.events.creek.events import CreekEvents
from airflow_provider_pgrepl.replication.events.known_relations import KnownRelations
from airflow_provider_pgrepl.replication.events.publishing.event import Event, event_of
from airflow_provider_pgrepl.replication.events.publishing.keyed_events import KeyedEvents
from airflow_provider_pgrepl.replication.events.table_selection import TableSelection
from airflow_provider_pgrepl.replication.events.typed_changes import TypedChanges
from airflow_provider_pgrepl.replication.publisher_settings import PublisherSettings

Maker = Callable[[KnownRelations, ChoicesOf, TableSelection], ByRelation[Any]]


class JsonEvents(ByRelation[Event]):
    """Events whose bodies are JSON."""

    def __init__(self, relations: KnownRelations, choices_of: ChoicesOf, wanted: TableSelection) -> None:
        super().__init__(relations, choices_of, wanted)
        self._changes = TypedChanges(relations, choices_of, wanted)

    def shape_of(self, record: RelationRecord) -> Shape[Event]:
        return _Encoded(self._changes.shape_of(record))


class _Encoded:
    def __init__(self, shape: Shape[Change]) -> None:
        self._shape = shape

    def make(self, rows: pa.Table) -> Iterator[Event]:
        return map(event_of, self._shape.make(rows))


def maker_of(settings: PublisherSettings) -> Maker:
    """What makes the events of a publisher, given what is read."""
    if settings.target == "nats":
        return partial(CreekEvents, settings.database, settings.wire == "v1")
    return KeyedEvents if settings.target == "kafka" else JsonEvents
