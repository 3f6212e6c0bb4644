"""The demo with `EVENTS=kafka`: JSON events in topics, with the row keys as message keys."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from confluent_kafka import Consumer

from airflow_provider_pgrepl.replication.events.position import EventPosition
from demo.airflow import connection
from demo.errors import DemoError
from demo.events import Events, Service
from demo.kafka import KafkaBroker

_TOPICS = "demo"
Place = tuple[int, EventPosition]


class KafkaService(Service):
    """A service that ignores events whose `(generation, position)` is not above the last of their partition.

    The how-to for consumers recommends this.
    """

    def __init__(self, servers: str) -> None:
        super().__init__()
        self._properties = {
            "bootstrap.servers": servers,
            "group.id": "demo-service",
            "auto.offset.reset": "earliest",
            # Find topics that are created later within 1 s.
            "topic.metadata.refresh.interval.ms": 1_000,
        }
        self._places: dict[tuple[str, int], Place] = {}

    def read(self) -> None:
        with closing(Consumer(self._properties)) as consumer:
            consumer.subscribe([rf"^{_TOPICS}\..*"])
            while not self.stop_asked.is_set():
                message = consumer.poll(0.5)
                if message is not None and message.error() is None:
                    self._receive(message)

    def _receive(self, message: Any) -> None:
        headers = {name: value.decode() for name, value in message.headers()}
        position = EventPosition.parse(headers["id"].removesuffix(":old"))
        partition, place = (message.topic(), message.partition()), (int(headers["generation"]), position)
        if partition in self._places and place <= self._places[partition]:
            return
        self._places[partition] = place
        event = json.loads(message.value())
        self.take(event["table"], event["data"], headers["id"], datetime.fromisoformat(event["commit_ts"]))


class KafkaEvents(Events):
    """A Kafka broker, and a service that reads its topics."""

    publishers: ClassVar = {"events": {"target": "kafka", "topic": f"{_TOPICS}.{{schema}}.{{table}}"}}

    def __init__(self, folder: Path) -> None:
        self._broker = KafkaBroker(folder)

    @property
    def variables(self) -> dict[str, str]:
        return {"AIRFLOW_CONN_PGREPL_KAFKA": connection("kafka", host="127.0.0.1", port=self._broker.port)}

    def start(self) -> str:
        try:
            self._broker.start()
        except RuntimeError as error:
            raise DemoError(str(error)) from None
        self.service = service = KafkaService(self._broker.servers)
        service.start()
        return f"Kafka on port {self._broker.port}; a service reads the topics {_TOPICS}.*"

    def stop(self) -> None:
        if self.service is not None:
            self.service.stop()
        self._broker.stop()
