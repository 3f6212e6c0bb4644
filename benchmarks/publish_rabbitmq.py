"""The publish rate from the changelog to RabbitMQ on the same cores, with each event confirmed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pika

from airflow_provider_pgrepl.replication.events.targets.rabbitmq import RabbitMQ
from benchmarks import published
from benchmarks.figure import Figure, thousands
from benchmarks.source import running_source
from demo.rabbitmq import Broker

_REPEAT = 3
_LIMIT = 15_000
_PEER_EVENTS = 3_000


def run(folder: Path, scale: float) -> Figure:
    """Measure this package from the changelog, and a peer that waits for the confirm of each encoded event.

    Both publish to a quorum queue, which RabbitMQ recommends for data that must not be lost. This package is
    also measured with a classic queue.
    """
    broker = Broker(folder / "rabbitmq")
    rates: dict[str, list[float]] = {"quorum": [], "peer": [], "classic": []}
    with running_source() as source:
        pipeline, events = published.received(source, folder, scale)
        broker.start()
        try:
            for number in range(_REPEAT):
                with _queue(broker, f"peer{number}", "quorum", _PEER_EVENTS) as exchange:
                    rates["peer"].append(_PEER_EVENTS / _one_by_one(broker, exchange))
                for kind in ("quorum", "classic"):
                    with _queue(broker, f"{kind}{number}", kind, events) as exchange:
                        settings = {"target": "rabbitmq", "exchange": exchange}
                        target = RabbitMQ(broker.uri, published.settings(pipeline, exchange, settings))
                        rates[kind].append(events / published.publish(pipeline, exchange, settings, target))
        finally:
            broker.stop()
    own, peer, classic = (statistics.median(rates[kind]) for kind in ("quorum", "peer", "classic"))
    return Figure(
        f"publish: changelog → RabbitMQ with confirms, {thousands(events)} events as JSON",
        f"{thousands(own)} events/s (classic queue: {thousands(classic)})",
        f"pika, one confirmed after the other: {thousands(peer)} events/s",
        f"{own / peer:.1f}",
        f"≥ {thousands(_LIMIT)} events/s",
        own >= _LIMIT,
        {kind: [round(rate) for rate in found] for kind, found in rates.items()},
    )


@contextmanager
def _queue(broker: Broker, exchange: str, kind: str, count: int) -> Iterator[str]:
    """Yield an exchange with one queue of a kind. Raises RuntimeError unless `count` events arrive in it."""
    with pika.BlockingConnection(pika.URLParameters(broker.uri)) as connection:
        channel = connection.channel()
        channel.exchange_declare(exchange, "topic", durable=True)
        channel.queue_declare(exchange, durable=True, arguments={"x-queue-type": kind})
        channel.queue_bind(exchange, exchange, "#")
    yield exchange
    with pika.BlockingConnection(pika.URLParameters(broker.uri)) as connection:
        channel = connection.channel()
        arrived = channel.queue_declare(exchange, passive=True).method.message_count
        channel.queue_delete(exchange)
    if arrived != count:
        raise RuntimeError(f"{arrived} events arrived of {count}")


def _one_by_one(broker: Broker, exchange: str) -> float:
    body = b'{"table":"public.bench","op":"insert","data":{"id":1,"k":1},"old":null}' + b" " * 150
    properties = pika.BasicProperties(content_type="application/json", delivery_mode=2, message_id="1")
    with pika.BlockingConnection(pika.URLParameters(broker.uri)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        started = time.perf_counter()
        for _ in range(_PEER_EVENTS):
            channel.basic_publish(exchange, "public.bench.insert", body, properties, mandatory=True)
        return time.perf_counter() - started
