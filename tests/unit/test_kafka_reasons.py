"""events/targets/kafka_broker.py: what is refused for good, and what is tried again."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from airflow_provider_pgrepl.errors import Retry
from airflow_provider_pgrepl.replication.events.targets.base import topic_of
from airflow_provider_pgrepl.replication.events.targets.kafka import table_key
from airflow_provider_pgrepl.replication.events.targets.kafka_broker import KafkaReasons, reason_of_topic


@pytest.mark.parametrize(
    ("code", "text", "says", "is_tried_again"),
    [
        (KafkaError._AUTHENTICATION, "", "the login was refused", False),
        (KafkaError.SASL_AUTHENTICATION_FAILED, "", "the login was refused", False),
        (KafkaError._SSL, "x: certificate verify failed: y", "certificate was refused", False),
        (KafkaError._SSL, "handshake", "handshake", True),
        (KafkaError._TRANSPORT, "connection refused", "connection refused", True),
        (KafkaError._MSG_TIMED_OUT, "timed out", "timed out", True),
        (KafkaError.INVALID_REPLICATION_FACTOR, "too few", "too few", True),
    ],
)
def test_an_error_is_for_good_or_passes(code, text, says, is_tried_again):
    found = KafkaReasons({"bootstrap.servers": "here:9092"}).error_of(KafkaError(code, text))
    assert says in found.message
    assert (found.retry is Retry.TIMED) is is_tried_again


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "topic t: the user may not write it"),
        (KafkaError.INVALID_TIMESTAMP, "does not take the time of the commit"),
        (KafkaError.TOPIC_EXCEPTION, "its name is refused"),
        (KafkaError._TRANSPORT, ""),
    ],
)
def test_a_topic_is_to_blame_or_is_not(code, says):
    assert says in reason_of_topic(KafkaError(code), "t")
    assert bool(says) is bool(reason_of_topic(KafkaError(code), "t"))


def test_topics_and_keys_are_made_of_names():
    assert topic_of("shop.{schema}.{table}", 'public."ä b"') == "shop.public.__b"
    assert topic_of("{table}", '"{table}"."{schema}"') == "_schema_"
    assert table_key('public."a""b"') == b'{"table":"public.\\"a\\"\\"b\\""}'
