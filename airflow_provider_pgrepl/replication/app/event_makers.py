"""The makers of events, by a publisher's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from airflow_provider_pgrepl.replication.creek.events import CreekEvents
from airflow_provider_pgrepl.replication.events.business import (
    BusinessEvents,
    TransactionEvents,
    TransactionFunction,
    imported,
    transform_of,
)
from airflow_provider_pgrepl.replication.events.changes import ChangeConverter, OptionsOf
from airflow_provider_pgrepl.replication.events.columns import Attnums, PublishedColumns
from airflow_provider_pgrepl.replication.events.formats.avro import AvroEvents
from airflow_provider_pgrepl.replication.events.formats.debezium import DebeziumFormat
from airflow_provider_pgrepl.replication.events.formats.json import JsonEvents, KeyedEvents
from airflow_provider_pgrepl.replication.events.publish.publisher import ConverterFactory
from airflow_provider_pgrepl.replication.events.relations import KnownRelations, TableSelection
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.replication.settings.targets import TARGETS, FormatName


def converter_factory(
    settings: PublisherSettings,
    salt: bytes = b"",
    wrapped: Callable[[Any], Any] | None = None,
    initial_columns: Attnums | None = None,
) -> ConverterFactory:
    """Return a function that creates the converter of changes into a publisher's events.

    Raises ConfigError for a transform that cannot be imported.

    :param salt: the salt of column hashes
    :param wrapped: a decorator for the transforms, for example to trace their calls
    :param begun_with: as in `PublishedColumns`
    """

    def published_of(relations: KnownRelations) -> PublishedColumns:
        return PublishedColumns(relations, settings.column_rules, salt, settings.rows, initial_columns)

    if settings.transform_transaction:
        return _of_transactions(settings, published_of, wrapped)
    kind: Callable[..., ChangeConverter[Any]] = _MAKERS[settings.format](settings)
    transforms = {table: transform_of(rule) for table, rule in settings.rules.items()}
    if wrapped is not None:
        transforms = {table: wrapped(transform) for table, transform in transforms.items()}

    def make(
        relations: KnownRelations, options_of: OptionsOf, wanted: TableSelection
    ) -> ChangeConverter[Any]:
        published = published_of(relations)
        plain = kind(relations, options_of, wanted, published)
        if not transforms and not settings.messages:
            return plain
        typed = _json(settings)
        return BusinessEvents(plain, typed(relations, options_of, wanted, published), transforms)

    return make


def _of_transactions(
    settings: PublisherSettings,
    published_of: Callable[[KnownRelations], PublishedColumns],
    wrapped: Callable[[Any], Any] | None,
) -> ConverterFactory:
    function: TransactionFunction = imported(settings.transform_transaction)
    if wrapped is not None:
        function = wrapped(function)

    def make(
        relations: KnownRelations, options_of: OptionsOf, wanted: TableSelection
    ) -> ChangeConverter[Any]:
        published = published_of(relations)
        return TransactionEvents(function, relations, options_of, wanted, published)

    return make


def _json(settings: PublisherSettings) -> type[JsonEvents]:
    return KeyedEvents if TARGETS[settings.target].is_keyed else JsonEvents


def _debezium(settings: PublisherSettings) -> Callable[..., Any]:
    made = DebeziumFormat(settings.source, settings.database, with_schemas=settings.schemas)
    return partial(_json(settings), enveloped=made)


def _avro(settings: PublisherSettings) -> Callable[..., Any]:
    return partial(AvroEvents, settings.source)


def _creek(settings: PublisherSettings) -> Callable[..., Any]:
    return partial(CreekEvents, settings.database, settings.wire == "v1", settings.unchanged == "require")


_MAKERS: Mapping[FormatName, Callable[[PublisherSettings], Callable[..., Any]]] = {
    "json": _json,
    "debezium": _debezium,
    "avro": _avro,
    "creek": _creek,
}
