"""Parts of the publisher to NATS: what its errors mean, stamps, packets."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import nats.errors
import nats.js.errors
import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.app.metrics.publisher import CreekMetrics
from airflow_provider_pgrepl.replication.avro.codec import decimals
from airflow_provider_pgrepl.replication.creek.events import CreekEvent
from airflow_provider_pgrepl.replication.creek.streams import write_as_creek
from airflow_provider_pgrepl.replication.creek.wire import Wire, framed, largest_payload, unframed
from airflow_provider_pgrepl.replication.events.event import RESERVE, EventNumbers, above_all
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.record import PublisherProgress
from airflow_provider_pgrepl.replication.events.targets.jetstream import JetStream, JetStreamReasons
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.publisher import parse_publisher

stub: Any = SimpleNamespace
ENVELOPE = stub()
SERVER = "nats://me:canary@here:4222"


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        (nats.errors.Error("nats: 'Authorization Violation'"), "the login of me was refused"),
        (nats.errors.Error('nats: permissions violation for publish to "a_wal_b.c.d"'), "lacks a right"),
    ],
)
def test_nats_authorization_and_permission_errors_become_target_error(reason, says):
    error = JetStreamReasons([SERVER]).error_of(reason)
    assert type(error) is TargetError
    assert says in error.message
    assert error.message.startswith("NATS at here:4222: ")


@pytest.mark.parametrize(
    "reason",
    [
        nats.errors.Error("nats: 'Authentication Timeout'"),
        nats.errors.NoServersError(),
        nats.errors.StaleConnectionError(),
        ConnectionRefusedError(111, "Connection refused"),
        nats.js.errors.ServiceUnavailableError(),
        RuntimeError("geheim"),
    ],
)
def test_transient_nats_error_becomes_target_unavailable_without_secrets(reason):
    error = JetStreamReasons([SERVER]).error_of(reason)
    assert isinstance(error, TargetUnavailableError)
    assert "geheim" not in str(error)
    assert "canary" not in str(error)


def test_nats_login_error_omits_token_from_server_url():
    said = JetStreamReasons(["nats://token@one:1", "nats://two"]).error_of(
        nats.errors.Error("nats: 'Authorization Violation'")
    )
    assert said.message == "NATS at one:1, two: the login was refused"


def test_stamps_grow_within_a_run_and_over_runs():
    stamps = EventNumbers()
    places = [LSN(one) for one in (100, 100, 100, 101, 90, 500)]
    given = [stamps.next(place) for place in places]
    assert given == [100, 101, 102, 103, 104, 500]
    assert above_all(120, LSN(500)) >= 500 + RESERVE
    assert above_all(900, LSN(500)) >= 900 + RESERVE


@pytest.mark.parametrize("packets", [[], [b""], [b"x"], [b"\x00\x00\x00\x00\x00"], [framed(b"ab")[:-1]]])
def test_unframing_rejects_malformed_packets(packets):
    with pytest.raises(ValueError, match="packet"):
        unframed(packets)


def test_packets_are_put_together_and_none_may_be_missing():
    first = b"\x00\x00\x00\x00\x00\x06ab"
    assert unframed([first, b"\x00\x01cd", b"\x00\x02ef"]) == b"abcdef"
    with pytest.raises(ValueError, match="missing"):
        unframed([first, b"\x00\x02cdef"])
    assert unframed([framed(b"x" * 10)]) == b"x" * 10
    assert len(framed(b"x" * largest_payload(1000))) <= 1000 - 2


@pytest.mark.parametrize(
    ("text", "scale", "expected"),
    [
        ("1234567890123456789012345678901234.5", 5, 123456789012345678901234567890123450000),
        ("1.50", 1, 15),
        ("-1.50", 1, -15),
        ("7", 2, 700),
        ("1e3", 0, 1000),
    ],
)
def test_a_numeric_of_another_scale_keeps_all_its_digits(text, scale, expected):
    (encoded,) = decimals(scale)(pa.array([text], pa.large_string()))
    assert encoded is not None
    assert int.from_bytes(encoded[1:], "big", signed=True) == expected


@pytest.mark.parametrize(
    ("table", "expected"),
    [("public.t", "w.public.t"), ('"a.b"."c d"', "w.a%2Eb.c%20d"), ('"x>*"."%\n"', "w.x%3E%2A.%25%0A")],
)
def test_a_subject_has_three_words_however_a_table_is_called(table, expected):
    assert Wire("N", "d", "v2").subject("wal", table) == expected.replace("w.", "N_wal_d.", 1)
    assert Wire("N", "d", "v1").subject("snap", table) == expected.replace("w.", "N.d.snap.", 1)


def test_streams_and_requests_are_called_as_creek_calls_them():
    first, second = Wire("CREEK", "db", "v1"), Wire("CREEK", "db")
    assert (first.stream("wal"), second.stream("wal")) == ("CREEK_wal", "CREEK_wal_db")
    assert (first.all_subjects("schema"), second.all_subjects("schema")) == (
        "CREEK.db.schema.>",
        "CREEK_schema_db.>",
    )
    assert (first.request("schema"), first.request("snap")) == ("CREEK._schema", "CREEK._snapshot")
    assert (second.request("schema"), second.request("snap")) == ("CREEK_schema_db", "CREEK_snap_db")


def test_creeks_metrics_count_what_was_acknowledged_and_lines_of_the_log():
    settings = parse_publisher("p", "events", {"target": "nats", "database": "d"})
    target = JetStream("nats://127.0.0.1:1", settings)
    target.sent.counts["insert", "public.t"] += 2
    target.sent.commit_ts = datetime.now(UTC) - timedelta(seconds=5)
    progress = PublisherProgress(published_lsn=LSN(100), durable_lsn=LSN(201))
    metrics = CreekMetrics(target.sent, lambda: progress)
    for level in (logging.DEBUG, logging.WARNING, logging.CRITICAL, logging.CRITICAL):
        metrics.emit(logging.LogRecord("x", level, "x", 1, "x", (), None))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in metrics.collect()
        for sample in metric.samples
    }
    assert found["creek_producer_pg_reads", "wal", "insert", "public.t"] == 2
    assert found["log_messages_total", "error", "creek_producer"] == 2
    assert found["log_messages_total", "info", "creek_producer"] == 0
    assert found["creek_producer_pg_behind_bytes",] == 100
    assert 4_000 < found["creek_producer_pg_behind_time",] < 600_000
    assert (found["creek_producer_lsn",], found["creek_producer_wal_subscriptions",]) == (201, 1)


def test_message_names_the_change_of_its_table_that_was_sent_before_it():
    """Also on the next connection, and if that change was rejected; not if it is never sent."""
    target: Any = stub(servers=[], stamps=EventNumbers())
    settings = parse_publisher("shop", "events", {"target": "nats", "database": "shop"})
    write_as_creek(target, settings, stub(id="lake"))
    first, second, other, third, fourth = (
        creek_event(number, table) for number, table in enumerate(["a.t", "a.t", "a.u", "a.t", "a.t"])
    )
    assert previous_of(target, first, second, other) == ["", first.id, ""]
    assert previous_of(target, second, third) == [first.id, second.id]
    target.messages().skip(third)
    assert previous_of(target, third, fourth) == [second.id, second.id]


def previous_of(target: Any, *events: CreekEvent) -> list[str]:
    """Return which changes the messages of one connection name."""
    messages = target.messages()
    messages._announced = ENVELOPE
    return [asyncio.run(messages.of(event)).headers.get("Pgrepl-Previous", "") for event in events]


def creek_event(number: int, table: str) -> CreekEvent:
    unstamped: Any = stub(stamped=lambda *_: b"")
    position = EventPosition(Epoch(1), LSN(100), number)
    moment = datetime.now(UTC)
    return CreekEvent(
        position, str(position), 1, table, "insert", moment, b"", envelope=ENVELOPE, unstamped=unstamped
    )
