"""A pipeline whose publisher sends to a RabbitMQ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.publish import main
from airflow_provider_pgrepl.replication.events.publish.record import PublisherRecord, read_record
from demo.rabbitmq import Broker
from tests.support.rabbitmq import Message, Queue
from tests.support.received import Received
from tests.support.replicated import execute


class Published(Received):
    """A pipeline with one publisher, whose app is run in the test's process."""

    queue: Queue
    broker: Broker

    def publish(self, *arguments: str, code: int = process.DONE) -> list[Message]:
        assert self.run_publisher(*arguments) == code
        return self.queue.take()

    def run_publisher(self, *arguments: str) -> int:
        return main(
            ["--pipeline", str(self.file), "--publisher", "events", "--until", "caught-up", *arguments]
        )

    @property
    def record(self) -> PublisherRecord:
        record = read_record(self.pipeline.lake_root, "events")
        assert record is not None
        return record

    def publisher(self, **settings: Any) -> None:
        given = {"target": "rabbitmq", "exchange": f"pgrepl.{self.pipeline.name}", **settings}
        self.configure(publishers={"events": given})


def begin_publishing(dsn: str, folder: Path, broker: Broker) -> Published:
    """Three tables, received from here on; a queue takes all their events."""
    execute(
        dsn,
        "create table t(id int primary key, v text, price numeric(10,2), at timestamptz)",
        "create table other(id int primary key, v text)",
        'create schema "S.1"; create table "S.1"."a#b"(id int primary key)',
    )
    pipeline = Published(dsn, folder, ("public.t", "public.other", '"S.1"."a#b"'), flush_interval_s=0.05)
    pipeline.begin()
    pipeline.publisher()
    pipeline.broker = broker
    pipeline.queue = Queue(broker.uri, f"pgrepl.{pipeline.pipeline.name}", pipeline.pipeline.name)
    return pipeline
