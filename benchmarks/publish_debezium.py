"""The publish rate in Debezium's format to Kafka on the same cores, compared with Debezium itself."""

from __future__ import annotations

import statistics
from pathlib import Path

from airflow_provider_pgrepl.replication.events.targets.kafka import Kafka
from benchmarks import debezium_producer, published
from benchmarks.figure import Figure, thousands
from benchmarks.source import running_source
from demo.kafka import KafkaBroker

_REPEAT = 3
_TABLE = "public.bench"
_TIMES = 1.5
"""The least ratio to Debezium's rate."""


def run(folder: Path, scale: float) -> Figure:
    """Measure both to acknowledged messages: this package from the changelog, Debezium from its slot."""
    broker = KafkaBroker(folder / "kafka", "auto.create.topics.enable=true")
    rates: list[float] = []
    with running_source() as source:
        debezium_producer.prepare(source)
        pipeline, events = published.received(source, folder, scale)
        broker.start()
        try:
            for number in range(_REPEAT):
                name = f"run{number}"
                given = {
                    "target": "kafka",
                    "topic": f"{name}.{{schema}}.{{table}}",
                    "format": "debezium",
                    "database": "bench",
                }
                target = Kafka(broker.uri, published.settings(pipeline, name, given))
                rates.append(events / published.publish(pipeline, name, given, target))
                if debezium_producer.arrived(broker, f"{name}.{_TABLE}") != events:
                    raise RuntimeError("not all events arrived")
            peer = debezium_producer.rate(source, pipeline.publication, broker, folder, events)
        finally:
            broker.stop()
    own = statistics.median(rates)
    return Figure(
        f"publish: changelog → Kafka with acks, {thousands(events)} events in Debezium's format",
        f"{thousands(own)} events/s",
        f"Debezium 3.4 in Kafka Connect, from its slot: {thousands(peer)} events/s",
        f"{own / peer:.2f}",
        f"≥ {_TIMES:g} × Debezium",
        own >= _TIMES * peer,
        {"ours": [round(rate) for rate in rates], "peer": [round(peer)]},
    )
