"""The demo with `EVENTS=rabbitmq`: JSON events in a queue."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import pika

from airflow_provider_pgrepl.replication.events.position import EventPosition
from demo.airflow import connection
from demo.errors import DemoError
from demo.events import Events, Service
from demo.rabbitmq import Broker

_EXCHANGE = "demo"
Place = tuple[int, EventPosition]


class RabbitMQService(Service):
    """A service that ignores events whose `(generation, position)` is not above the last of their table.

    The how-to for consumers recommends this.
    """

    def __init__(self, uri: str) -> None:
        super().__init__()
        self._parameters = pika.URLParameters(uri)
        self._places: dict[str, Place] = {}

    def prepare(self) -> None:
        """Create the exchange, and a queue that receives all its messages."""
        with pika.BlockingConnection(self._parameters) as broker:
            channel = broker.channel()
            channel.exchange_declare(_EXCHANGE, "topic", durable=True)
            channel.queue_declare(_EXCHANGE, durable=True, arguments={"x-queue-type": "quorum"})
            channel.queue_bind(_EXCHANGE, _EXCHANGE, "#")

    def read(self) -> None:
        with pika.BlockingConnection(self._parameters) as broker:
            channel = broker.channel()
            channel.basic_qos(prefetch_count=1_000)
            for method, properties, body in channel.consume(_EXCHANGE, inactivity_timeout=0.5):
                if method is not None:
                    self._receive(properties, json.loads(body))
                    channel.basic_ack(method.delivery_tag)
                if self.stop_asked.is_set():
                    return

    def _receive(self, properties: pika.BasicProperties, event: dict[str, Any]) -> None:
        table, position = event["table"], EventPosition.parse(properties.message_id)
        place = ((properties.headers or {})["generation"], position)
        if table in self._places and place <= self._places[table]:
            return
        self._places[table] = place
        moment = datetime.fromisoformat(event["commit_ts"])
        self.take(table, event["data"], properties.message_id, moment)


class RabbitMQEvents(Events):
    """A RabbitMQ broker, and a service that reads a queue."""

    publishers: ClassVar = {"events": {"target": "rabbitmq", "exchange": _EXCHANGE}}

    def __init__(self, folder: Path) -> None:
        self._broker = Broker(folder)

    @property
    def variables(self) -> dict[str, str]:
        uri = pika.URLParameters(self._broker.uri)
        return {"AIRFLOW_CONN_PGREPL_RABBITMQ": connection("amqp", host=uri.host, port=uri.port)}

    def start(self) -> str:
        try:
            self._broker.start()
        except RuntimeError as error:
            raise DemoError(str(error)) from None
        self.service = service = RabbitMQService(self._broker.uri)
        service.prepare()
        service.start()
        return f"RabbitMQ on port {self._broker.port}; a service reads queue {_EXCHANGE}"

    def stop(self) -> None:
        if self.service is not None:
            self.service.stop()
        self._broker.stop()
