"""Publishers and readers of changes leave the trace of an unexpected exception, and none of its text."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from types import SimpleNamespace
from typing import Any

import fastavro
import nats.errors
import pytest

from airflow_provider_pgrepl.errors import LakeUnavailableError, PgReplError, TransformError
from airflow_provider_pgrepl.replication.app.creek import consume
from airflow_provider_pgrepl.replication.creek import messages, streams
from airflow_provider_pgrepl.replication.creek.snapshot_requests import SnapshotRequests
from airflow_provider_pgrepl.replication.creek.streams import RequestResponder
from airflow_provider_pgrepl.replication.creek.wire import Wire
from airflow_provider_pgrepl.replication.events.business import imported, transformed
from airflow_provider_pgrepl.replication.events.reader import changelog_errors
from airflow_provider_pgrepl.replication.events.targets.jetstream import JetStreamLink, JetStreamReasons
from airflow_provider_pgrepl.replication.events.targets.jetstream import _quietly as quietly
from airflow_provider_pgrepl.replication.events.targets.kafka import KafkaLink, SchemaRegistry
from airflow_provider_pgrepl.replication.events.targets.kafka_broker import KafkaReasons
from airflow_provider_pgrepl.replication.events.targets.rabbitmq import RabbitMQLink
from airflow_provider_pgrepl.replication.events.unchanged_toast import LakeValues
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from tests.support.canary import (
    CANARY,
    UnexpectedError,
    bare,
    check,
    check_log,
    in_thread,
    raise_unexpected,
)
from tests.unit.test_publisher_parts import SETTINGS
from tests.unit.test_publisher_parts import link as rabbitmq

TABLE = TableName("public", "t")
stub: Any = SimpleNamespace


# --- publishers and readers ---


def test_thread_of_kafka_leaves_its_trace(caplog):
    link: Any = bare(KafkaLink, _error=None, _is_stopping=False, _lock=threading.Lock(), _sendings={})
    link._reasons = KafkaReasons({"bootstrap.servers": "host:9092"})
    polls = iter([raise_unexpected, lambda _: None])
    link._producer = stub(poll=lambda s: next(polls)(s), purge=lambda **_: None)
    in_thread(link._hear)
    assert not link.is_open
    check_log(caplog, " in KafkaLink._hear", "hearing from Kafka")


def test_thread_of_rabbitmq_leaves_its_trace(monkeypatch, caplog):
    from airflow_provider_pgrepl.replication.events.targets import rabbitmq as rabbitmq_link

    monkeypatch.setattr(rabbitmq_link, "BufferingConnection", raise_unexpected)
    made: RabbitMQLink = rabbitmq()
    in_thread(made._run)
    assert not made.is_open
    assert CANARY not in str(made._error)
    check_log(caplog, " in RabbitMQLink._run")


def test_thread_of_nats_leaves_its_trace(monkeypatch, caplog):
    link = JetStreamLink(["nats://host:4222"], SETTINGS, stub(), stub())
    monkeypatch.setattr(JetStreamLink, "_live", raise_unexpected)
    in_thread(link._run)
    assert not link.is_open
    assert CANARY not in str(link._error)
    check_log(caplog, " in JetStreamLink._run")


def test_connection_that_does_not_close_leaves_its_trace(caplog):
    caplog.set_level(logging.DEBUG)

    async def close() -> None:
        raise_unexpected()

    asyncio.run(quietly(close()))
    check_log(caplog, " in _quietly")


def test_thread_of_snapshot_requests_leaves_its_trace(caplog):
    is_over = threading.Event()

    def send(*_: Any) -> None:
        is_over.set()
        raise_unexpected()

    requests: Any = bare(SnapshotRequests, _is_over=is_over, _lock=threading.Lock(), _waiting={})
    requests._snapshots = SimpleNamespace(send=send)
    requests._accepted = queue.Queue()
    requests._accepted.put((TABLE, "subject"))
    in_thread(requests._serve)
    check_log(caplog, " in SnapshotRequests._serve")


def test_transform_leaves_its_trace_in_log_and_error(caplog):
    with pytest.raises(TransformError) as found:
        transformed(raise_unexpected, {}, "public.t", LSN(5), stub)
    assert found.value.message == "the transform of public.t failed: UnexpectedError"
    check(found.value.trace, " in transformed")
    check_log(caplog, " in transformed")


def test_transform_that_cannot_be_imported_names_its_frames():
    with pytest.raises(PgReplError) as found:
        imported("tests.support.no_such_module:f")
    assert "ModuleNotFoundError" in found.value.trace.splitlines()[0]
    assert " in imported" in found.value.trace


@pytest.mark.parametrize("read", [messages.parsed_schema, lambda _: messages.row_of(b"", {})])
def test_message_that_cannot_be_read_keeps_its_trace(monkeypatch, read):
    monkeypatch.setattr(fastavro, "parse_schema", raise_unexpected)
    monkeypatch.setattr(fastavro, "schemaless_reader", raise_unexpected)
    with pytest.raises(PgReplError) as found:
        read("{}")
    check(found.value.trace)


def test_consumers_of_several_databases_all_leave_their_traces(monkeypatch, caplog):
    from airflow_provider_pgrepl.replication.creek import client

    class Client:
        def __init__(self, *_: Any) -> None:
            """Accept any arguments."""

        async def __aenter__(self) -> None:
            raise_unexpected()

        async def __aexit__(self, *_: object) -> None:
            """Close nothing."""

    from airflow_provider_pgrepl.replication.creek import copy_database

    monkeypatch.setattr(client, "CreekClient", Client)
    monkeypatch.setattr(copy_database, "CopyDatabase", lambda *_: stub(close=lambda: None))
    settings: Any = stub(name="copy", tables={"a": {}, "b": {}}, namespace="", wire="v2")
    with pytest.raises(UnexpectedError):
        asyncio.run(consume._consume(settings, "", "", stub(), set(), is_limited=True))
    check_log(caplog, "consuming another database: unexpected")


def test_values_that_cannot_be_looked_up_leave_a_trace(monkeypatch, caplog):
    monkeypatch.setattr(LakeValues, "_table", raise_unexpected)
    values = LakeValues(Pipeline(name="shop", tables=("public.*",), lake="/lake/shop"))
    record: Any = stub(version=1, name="public.t")
    assert values.find(record, Epoch(1), LSN(5), {}) == {}
    check_log(caplog, " in LakeValues.find")


def test_changelog_that_cannot_be_read_leaves_a_trace(caplog):
    with pytest.raises(LakeUnavailableError) as found, changelog_errors():
        raise_unexpected()
    check(found.value.trace, " in changelog_errors")
    check_log(caplog, " in changelog_errors")


def test_registry_that_cannot_be_asked_leaves_a_trace(caplog):
    registry: Any = bare(
        SchemaRegistry, _where="the registry at host", _client=stub(register_schema=raise_unexpected)
    )
    with pytest.raises(PgReplError, match="does not answer: UnexpectedError"):
        registry._register("subject", "{}")
    check_log(caplog, " in SchemaRegistry._register")


def test_answer_to_a_request_leaves_its_trace(caplog):
    served: list[Any] = []

    async def subscribe(_: str, cb: Any, **__: Any) -> None:
        served.append(cb)

    async def answer(_: bytes) -> None:
        raise_unexpected()

    async def ask() -> None:
        requests: Any = bare(
            RequestResponder, _said_at=-1000.0, _reasons=JetStreamReasons(["nats://host:4222"])
        )
        requests._client, requests._wire = stub(subscribe=subscribe), Wire("CREEK", "shop", "v2")
        await requests._serve("schema", answer)
        [asked] = served
        await asked(stub(reply="_INBOX.1", data=b""))

    asyncio.run(ask())
    check_log(caplog, "answering a request for a schema or a snapshot", "asked")


def test_snapshot_that_cannot_be_sent_leaves_a_trace(monkeypatch, caplog):
    monkeypatch.setattr(streams._Sender, "send", raise_unexpected)
    with pytest.raises(PgReplError) as found:
        streams.send_snapshot(["nats://host:4222"], SETTINGS, "subject", stub())
    assert CANARY not in str(found.value)
    check_log(caplog, " in send_snapshot")


def test_expected_reasons_of_nats_leave_no_trace(caplog):
    reasons = JetStreamReasons(["nats://host:4222"])
    for reason in (
        OSError("gone"),
        TimeoutError(),
        asyncio.CancelledError(),
        nats.errors.ConnectionClosedError(),
    ):
        reasons.log_unknown("sending", reason)
    assert caplog.records == []
