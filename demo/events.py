"""`EVENTS=rabbitmq`: the changes as events beside the lake, and a service that rebuilds rows from them."""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pika
import psycopg2

from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.lsn import LSN
from demo.airflow import connection
from demo.errors import DemoError
from demo.rabbitmq import Broker

EXCHANGE = "demo"
PUBLISHERS = {"events": {"target": "rabbitmq", "exchange": EXCHANGE}}

_KEYS = {
    "public.pgbench_accounts": "aid",
    "public.pgbench_tellers": "tid",
    "public.pgbench_branches": "bid",
}
_WAIT_S = 10

Place = tuple[int, EventPosition]


class Service(threading.Thread):
    """Someone else's service: it knows the queue alone, and keeps each row that an event spoke of.

    It passes over what is not above the last `(generation, position)` of its table, as the how-to says.
    """

    def __init__(self, uri: str) -> None:
        super().__init__(name="demo-service", daemon=True)
        self._parameters = pika.URLParameters(uri)
        self.rows: dict[str, dict[Any, dict[str, Any]]] = {table: {} for table in _KEYS}
        self.counts: Counter[str] = Counter()
        self.error = ""
        self.position = EventPosition.parse("0:0/0:0")
        self.delay_s = 0.0
        self._places: dict[str, Place] = {}
        self._stop_asked = threading.Event()

    def prepare(self) -> None:
        """Make the exchange and a queue that takes everything."""
        with pika.BlockingConnection(self._parameters) as broker:
            channel = broker.channel()
            channel.exchange_declare(EXCHANGE, "topic", durable=True)
            channel.queue_declare(EXCHANGE, durable=True, arguments={"x-queue-type": "quorum"})
            channel.queue_bind(EXCHANGE, EXCHANGE, "#")

    def run(self) -> None:
        try:
            with pika.BlockingConnection(self._parameters) as broker:
                channel = broker.channel()
                channel.basic_qos(prefetch_count=1_000)
                for method, properties, body in channel.consume(EXCHANGE, inactivity_timeout=0.5):
                    if method is not None:
                        self._take(properties, json.loads(body))
                        channel.basic_ack(method.delivery_tag)
                    if self._stop_asked.is_set():
                        return
        except pika.exceptions.AMQPError as error:
            self.error = str(error) or type(error).__name__

    def stop(self) -> None:
        self._stop_asked.set()
        if self.is_alive():
            self.join(_WAIT_S)

    def _take(self, properties: pika.BasicProperties, event: dict[str, Any]) -> None:
        table, position = event["table"], EventPosition.parse(properties.message_id)
        place = ((properties.headers or {})["generation"], position)
        if table in self._places and place <= self._places[table]:
            return
        self._places[table], self.position = place, max(self.position, position)
        self.counts[table] += 1
        self.delay_s = (datetime.now(UTC) - datetime.fromisoformat(event["commit_ts"])).total_seconds()
        if table in _KEYS:
            self.rows[table][event["data"][_KEYS[table]]] = event["data"]


class Events:
    """The broker, the service, and what the demo says of them."""

    def __init__(self, folder: Path) -> None:
        self._broker = Broker(folder)
        self._service: Service | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The Airflow connection of the publisher."""
        uri = pika.URLParameters(self._broker.uri)
        return {"AIRFLOW_CONN_PGREPL_RABBITMQ": connection("amqp", host=uri.host, port=uri.port)}

    def start(self) -> str:
        """Start broker and service; what was started. Raises DemoError."""
        try:
            self._broker.start()
        except RuntimeError as error:
            raise DemoError(str(error)) from None
        self._service = Service(self._broker.uri)
        self._service.prepare()
        self._service.start()
        return f"RabbitMQ on port {self._broker.port}; a service reads queue {EXCHANGE}"

    def line(self) -> str:
        """For the status line. Raises DemoError when the service has ended."""
        service = self._running()
        return f"{service.counts.total():,} events, the last {service.delay_s:.1f} s after its commit"

    def has_reached(self, lsn: LSN) -> bool:
        """Whether an event of a transaction after that LSN has arrived."""
        return self._running().position.commit_lsn > lsn

    def compare(self, dsn: str) -> list[tuple[str, int]]:
        """For each table a sentence, and how many of the service's rows are not as the source has them."""
        service, found = self._running(), []
        with closing(psycopg2.connect(dsn)) as source, source.cursor() as cursor:
            for table, key in _KEYS.items():
                rows = service.rows[table]
                # The table's name is one of ours.
                cursor.execute(
                    f"select to_jsonb(t) from {table} t where {key} = any(%s)",
                    (list(rows),),
                )
                theirs = {row[key]: row for (row,) in cursor.fetchall()}
                different = sum(rows[one] != theirs.get(one) for one in rows)
                verdict = "equal" if not different else f"{different:,} DIFFERENT"
                found.append((f"{table}: {len(rows):,} rows rebuilt from events, {verdict}", different))
        return found

    def stop(self) -> None:
        if self._service is not None:
            self._service.stop()
        self._broker.stop()

    def _running(self) -> Service:
        assert self._service is not None
        if self._service.error:
            raise DemoError(f"The service that reads events lost RabbitMQ: {self._service.error}")
        return self._service
