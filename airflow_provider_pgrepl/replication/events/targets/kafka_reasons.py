"""Why a connection to Kafka ended, or a message was not taken, and whether to try again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import KafkaError

from airflow_provider_pgrepl.errors import PgReplError, TargetError, TargetUnavailableError

_REFUSED = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    }
)
_OF_A_TOPIC = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "the user may not write it",
    KafkaError.UNKNOWN_TOPIC_OR_PART: "it is not there",
    KafkaError._UNKNOWN_TOPIC: "it is not there",
    KafkaError._UNKNOWN_PARTITION: "it is not there",
    KafkaError.TOPIC_EXCEPTION: "its name is refused; Kafka takes no two that differ in . and _ alone",
    KafkaError.POLICY_VIOLATION: "a policy of the cluster is against it",
    KafkaError.INVALID_PARTITIONS: "the cluster's default number of partitions is refused",
    KafkaError.INVALID_RECORD: "it does not take such a message",
    KafkaError.INVALID_TIMESTAMP: "it does not take the time of the commit (message.timestamp.…max.ms)",
    KafkaError._INVALID_DIFFERENT_RECORD: "it does not take such a message",
}
TOO_LARGE = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
OF_ANOTHER = frozenset({KafkaError._INVALID_DIFFERENT_RECORD})
"""A batch was refused for another message in it."""
_HINT = "are its brokers there? Events wait in the changelog meanwhile"


class KafkaReasons:
    """Of one connection. Messages of librdkafka name brokers, and hold neither credentials nor rows."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self._user = properties.get("sasl.username", "")
        self.where = f"Kafka at {properties['bootstrap.servers']}"

    def error_of(self, error: KafkaError) -> PgReplError:
        """What ends the connection."""
        if error.code() in _REFUSED:
            return self.refused(
                f"the login{f' of {self._user}' if self._user else ''} was refused",
                "look at the connection's login, password and sasl.mechanism",
            )
        if error.code() == KafkaError._SSL and "certificate verify failed" in error.str():
            return self.refused(
                "the brokers' certificate was refused",
                "name the hosts as their certificates do, and give the authority's as ssl.ca.location",
            )
        return self.away(error.str())

    def away(self, what: str) -> TargetUnavailableError:
        """The cluster takes nothing just now."""
        return TargetUnavailableError(f"{self.where}: {what}", _HINT)

    def refused(self, what: str, hint: str) -> TargetError:
        """The cluster takes nothing before somebody has changed something."""
        return TargetError(f"{self.where}: {what}", hint)


def property_error(error: Exception, given: Iterable[str]) -> TargetError:
    """Of properties of which the client does not take one. Its message may hold the value."""
    named = [name for name in given if f'"{name}"' in str(error)]
    what = ", ".join(named) or "one of the connection's"
    return TargetError(
        f"Kafka: property {what}: there is no such one, or not with such a value",
        "they are librdkafka's, see its CONFIGURATION.md",
    )


def reason_of_topic(error: KafkaError, topic: str) -> str:
    """Why a topic takes no event of its table; empty when the topic is not to blame."""
    found = _OF_A_TOPIC.get(error.code())
    return f"topic {topic}: {found}" if found else ""
