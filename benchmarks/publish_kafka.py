"""The publish rate from the changelog to Kafka on the same cores, with each event acknowledged."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from airflow_provider_pgrepl.replication.events.targets.kafka import Kafka
from benchmarks import published
from benchmarks.figure import Figure, thousands
from benchmarks.source import running_source
from demo.kafka import KafkaBroker

_REPEAT = 3
_LIMIT = 60_000
_TABLE = "public.bench"


def run(folder: Path, scale: float) -> Figure:
    """Measure this package from the changelog, and a peer that sends encoded events with the same client.

    The broker acknowledges the events of both.
    """
    broker = KafkaBroker(folder / "kafka")
    rates: dict[str, list[float]] = {"ours": [], "transactions": [], "peer": []}
    with running_source() as source:
        pipeline, events = published.received(source, folder, scale)
        broker.start()
        try:
            for number in range(_REPEAT):
                rates["peer"].append(events / _handed_over(broker, f"peer{number}", events))
                for kind in ("ours", "transactions"):
                    name = f"{kind}{number}"
                    given: dict[str, Any] = {"target": "kafka", "topic": f"{name}.{{schema}}.{{table}}"}
                    given["transactions"] = kind == "transactions"
                    target = Kafka(broker.uri, published.settings(pipeline, name, given))
                    rates[kind].append(events / published.publish(pipeline, name, given, target))
                    _check(broker, f"{name}.{_TABLE}", events)
        finally:
            broker.stop()
    own, whole, peer = (statistics.median(rates[kind]) for kind in rates)
    return Figure(
        f"publish: changelog → Kafka with acks, {thousands(events)} events as JSON",
        f"{thousands(own)} events/s (in transactions: {thousands(whole)})",
        f"confluent-kafka, given encoded events: {thousands(peer)} events/s",
        f"{own / peer:.2f}",
        f"≥ {thousands(_LIMIT)} events/s",
        own >= _LIMIT,
        {kind: [round(rate) for rate in found] for kind, found in rates.items()},
    )


def _handed_over(broker: KafkaBroker, topic: str, count: int) -> float:
    admin = AdminClient({"bootstrap.servers": broker.servers})
    admin.create_topics([NewTopic(topic)])[topic].result()
    producer = Producer({"bootstrap.servers": broker.servers, "enable.idempotence": True, "linger.ms": 5})
    body = b'{"table":"public.bench","op":"insert","data":{"id":1,"k":1},"old":null}' + b" " * 150
    producer.list_topics(timeout=30)
    started, arrived = time.perf_counter(), [0]

    def delivered(error: object, _: object) -> None:
        if error is not None:
            raise RuntimeError(str(error))
        arrived[0] += 1

    for number in range(count):
        headers: list[tuple[str, str | bytes | None]] = [
            ("id", f"1:0/16B3748:{number}"),
            ("generation", "1700000000"),
            ("op", "insert"),
        ]
        key = f'{{"id":{number}}}'
        while True:
            try:
                producer.produce(topic, body, key, headers=headers, on_delivery=delivered)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    while arrived[0] < count:
        producer.poll(0.1)
    return time.perf_counter() - started


def _check(broker: KafkaBroker, topic: str, count: int) -> None:
    consumer = Consumer({"bootstrap.servers": broker.servers, "group.id": "bench"})
    low, high = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)
    consumer.close()
    # The end of each Kafka transaction also has an offset.
    if not count <= high - low <= 1.01 * count:
        raise RuntimeError(f"{high - low} events arrived of {count}")
