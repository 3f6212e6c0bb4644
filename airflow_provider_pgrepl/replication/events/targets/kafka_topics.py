"""The topics of a publisher's tables: how they are called, and that they are there."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.targets.kafka_reasons import KafkaReasons, reason_of_topic
from airflow_provider_pgrepl.replication.events.targets.routing import topic, topic_of
from airflow_provider_pgrepl.replication.settings.publisher_settings import PublisherSettings

_LONGEST = 249
_MOST_ROUTES = 10_000
"""Of business events; what they are called is data."""
_BY_TABLE = "{table}"
_ANSWER_S = 30.0
_CLUSTERS_DEFAULT = -1


class UnusableTopicError(Exception):
    """Why events cannot go there, for a person to mend."""


class Topics:
    """Those of one connection. Topics that are missing are made with the cluster's defaults."""

    def __init__(
        self, settings: PublisherSettings, producer: Producer, admin: AdminClient, reasons: KafkaReasons
    ) -> None:
        self._settings, self._template = settings, settings.topic
        self._producer, self._admin, self._reasons = producer, admin, reasons
        self._of_table: dict[str, tuple[str, str]] = {}
        self._of_route: dict[str, str] = {}
        self._table_of: dict[str, str] = {}

    def find(self, event: Event) -> str:
        """An event's topic, seen to be there. Raises UnusableTopicError, and what KafkaReasons makes of other
        errors."""
        if event.business is None:
            return self._find(event.table)
        name = topic(event, self._settings)
        if name not in self._of_route:
            if len(self._of_route) >= _MOST_ROUTES:
                self._of_route.clear()
            self._of_route[name] = self._reason_to_refuse(name)
        if reason := self._of_route[name]:
            raise UnusableTopicError(reason)
        return name

    def _find(self, table: str) -> str:
        if table not in self._of_table:
            name = topic_of(self._template, table)
            self._of_table[table] = name, self._reason_against(name, table)
        name, reason = self._of_table[table]
        if reason:
            raise UnusableTopicError(reason)
        return name

    def partitions(self, topic: str) -> list[int]:
        """All that it has now."""
        try:
            found = self._producer.list_topics(topic, timeout=_ANSWER_S).topics[topic]
        except KafkaException as error:
            raise self._reasons.error_of(error.args[0]) from None
        if not found.partitions:
            raise self._reasons.away(f"topic {topic} has no partitions just now")
        return sorted(found.partitions)

    def _reason_against(self, topic: str, table: str) -> str:
        # By one key in one topic two rows would be one.
        owner = self._table_of.setdefault(topic, table)
        if owner != table and _BY_TABLE in self._template:
            return f"topic {topic}: {owner} has it already"
        return self._reason_to_refuse(topic)

    def _reason_to_refuse(self, topic: str) -> str:
        if len(topic) > _LONGEST or topic in ("", ".", ".."):
            return f"topic {topic}: Kafka takes no such name"
        try:
            error = self._producer.list_topics(topic, timeout=_ANSWER_S).topics[topic].error
            if error is not None and error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                error = self._make(topic)
        except KafkaException as raised:
            error = raised.args[0]
        if error is None or error.code() == KafkaError.LEADER_NOT_AVAILABLE:
            return ""
        if reason := reason_of_topic(error, topic):
            return reason
        raise self._reasons.error_of(error)

    def _make(self, topic: str) -> KafkaError | None:
        """With the cluster's number of partitions and replicas."""
        wanted = NewTopic(topic, _CLUSTERS_DEFAULT, _CLUSTERS_DEFAULT)
        try:
            self._admin.create_topics([wanted], request_timeout=_ANSWER_S)[topic].result()
        except KafkaException as raised:
            error: KafkaError = raised.args[0]
            return None if error.code() == KafkaError.TOPIC_ALREADY_EXISTS else error
        return None
