"""What a publisher's settings make of changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from airflow_provider_pgrepl.replication.events.by_relation import ByRelation, ChoicesOf
from airflow_provider_pgrepl.replication.events.creek.events import CreekEvents
from airflow_provider_pgrepl.replication.events.known_relations import KnownRelations
from airflow_provider_pgrepl.replication.events.publishing.json_events import JsonEvents
from airflow_provider_pgrepl.replication.events.publishing.keyed_events import KeyedEvents
from airflow_provider_pgrepl.replication.events.table_selection import TableSelection
from airflow_provider_pgrepl.replication.publisher_settings import PublisherSettings

Maker = Callable[[KnownRelations, ChoicesOf, TableSelection], ByRelation[Any]]


def maker_of(settings: PublisherSettings) -> Maker:
    """What makes the events of a publisher, given what is read."""
    if settings.target == "nats":
        return partial(CreekEvents, settings.database, settings.wire == "v1")
    return KeyedEvents if settings.target == "kafka" else JsonEvents
