"""Kafka: events as JSON, in topics by table, with the keys of their rows."""

from __future__ import annotations

from airflow_provider_pgrepl.replication.events.targets.base import Linked
from airflow_provider_pgrepl.replication.events.targets.kafka_link import KafkaLink
from airflow_provider_pgrepl.replication.events.targets.kafka_properties import properties_of
from airflow_provider_pgrepl.replication.events.targets.kafka_reasons import KafkaReasons
from airflow_provider_pgrepl.replication.events.targets.schema_registry import SchemaRegistry
from airflow_provider_pgrepl.replication.settings.publisher_settings import PublisherSettings


class Kafka(Linked[KafkaLink]):
    """A producer. `uri`: `kafka://user:password@host:port,host:port?property=value`, or `kafkas://` with TLS;
    properties are librdkafka's; never shown.

    Raises TargetError for a URI that is none.
    """

    def __init__(self, uri: str, settings: PublisherSettings, registry: str = "") -> None:
        """`registry`: the URI of a schema registry, for a format that needs one."""
        self._properties, self._settings = properties_of(uri), settings
        super().__init__(KafkaReasons(self._properties).where)
        self._registry = SchemaRegistry(registry, settings.subject_names) if registry else None
        self.keeps_transactions = settings.transactions
        self._refused: dict[str, str] = {}
        self._one_by_one = False

    def connect(self) -> None:
        """Raises TargetUnavailableError; TargetError when the login or a certificate is refused."""
        if self._link is not None:
            self._one_by_one = self._link.met_large
        self.close()
        link = KafkaLink(
            self._properties, self._settings, self._refused, self._registry, one_by_one=self._one_by_one
        )
        link.start()
        self._link = link

    def commit(self) -> None:
        if self._link is not None:
            self._link.commit()
