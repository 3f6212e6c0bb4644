"""Debezium's own engine and its connector for PostgreSQL, on a slot of a test's database."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2.extensions
import pytest
from py4j.java_gateway import CallbackServerParameters, GatewayParameters, JavaGateway, launch_gateway

from tests.support.replicated import execute, wait_until

JARS = Path(__file__).resolve().parents[2] / ".debezium"
SLOT = "debezium"
_REQUIRED = "PGREPL_REQUIRE_DEBIAN"
_WHY = "needs Debezium's engine: sh setup/debezium.sh"
_CONVERTER = "io.debezium.engine.format.Json"
_PROPERTIES = {
    "name": "engine",
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
    "plugin.name": "pgoutput",
    "publication.autocreate.mode": "disabled",
    "snapshot.mode": "no_data",
    "slot.name": SLOT,
    "skipped.operations": "none",
    "converter.schemas.enable": "true",
    "errors.max.retries": "0",
    "slot.drop.on.stop": "true",
}


@dataclass(frozen=True)
class DebeziumEvent:
    """A message as a consumer gets it; None for what it lacks."""

    topic: str
    key: dict[str, Any] | None
    value: dict[str, Any] | None


class _Consumer:
    def __init__(self) -> None:
        self.events: list[DebeziumEvent] = []

    def accept(self, event: Any) -> None:
        key, value = event.key(), event.value()
        self.events.append(
            DebeziumEvent(event.destination(), key and json.loads(key), value and json.loads(value))
        )

    class Java:
        implements = ("java.util.function.Consumer",)


class Debezium:
    """A JVM with Debezium's engine, which runs one connector at a time."""

    def __init__(self, gateway: JavaGateway) -> None:
        self._gateway = gateway

    @contextmanager
    def reading(self, dsn: str, publication: str, source: str) -> Iterator[list[DebeziumEvent]]:
        """The events of what is committed while the block runs; the list grows."""
        consumer = _Consumer()
        engine = _engine(self._gateway.jvm, dsn, publication, source, consumer)
        thread = self._gateway.jvm.java.lang.Thread(engine)
        thread.start()
        try:
            wait_until(lambda: _is_active(dsn), 150, "Debezium to read its slot")
            yield consumer.events
        finally:
            engine.close()


@contextmanager
def running_debezium() -> Iterator[Debezium]:
    """Yield a JVM for the block. Skips the test where Debezium is missing, unless it is required."""
    if not JARS.is_dir():
        assert not os.environ.get(_REQUIRED), _WHY
        pytest.skip(_WHY)
    jars = ":".join(map(str, sorted(JARS.glob("*.jar"))))
    port = launch_gateway(
        classpath=jars, die_on_exit=True, javaopts=["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    )
    gateway = JavaGateway(
        gateway_parameters=GatewayParameters(port=port),
        # Daemon threads: py4j's notice the end of a connection late, and would keep the process alive.
        callback_server_parameters=CallbackServerParameters(
            port=0, daemonize=True, daemonize_connections=True
        ),
    )
    back = gateway.get_callback_server().get_listening_port()
    server = gateway.java_gateway_server
    server.resetCallbackClient(server.getCallbackClient().getAddress(), back)
    try:
        yield Debezium(gateway)
    finally:
        gateway.shutdown()


def _engine(jvm: Any, dsn: str, publication: str, source: str, consumer: _Consumer) -> Any:
    execute(dsn, f"select pg_create_logical_replication_slot('{SLOT}', 'pgoutput')")
    parts = psycopg2.extensions.parse_dsn(dsn)
    own = {
        "topic.prefix": source,
        "publication.name": publication,
        "database.hostname": parts["host"],
        "database.port": parts["port"],
        "database.user": parts["user"],
        "database.password": "none",
        "database.dbname": parts["dbname"],
    }
    properties = jvm.java.util.Properties()
    for name, value in {**_PROPERTIES, **own}.items():
        properties.setProperty(name, value)
    builder = jvm.io.debezium.engine.DebeziumEngine.create(jvm.java.lang.Class.forName(_CONVERTER))
    return builder.using(properties).notifying(consumer).build()


def _is_active(dsn: str) -> bool:
    connection = psycopg2.connect(dsn)
    try:
        cursor = connection.cursor()
        cursor.execute(f"select active from pg_replication_slots where slot_name = '{SLOT}'")
        return cursor.fetchone() == (True,)
    finally:
        connection.close()
