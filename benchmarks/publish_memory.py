"""The memory of a publisher's process after an hour of steady load, compared with that after the warm-up."""

from __future__ import annotations

import os
import re
import statistics
from pathlib import Path

import pika

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from benchmarks import pipelines, running_app, workload
from benchmarks.figure import Figure, thousands
from benchmarks.source import running_source
from demo.rabbitmq import Broker

_RATE = 2_000
_SECONDS = 3_600
_SAMPLE_S = 10
_WARM = 0.1
"""The share of the time for the warm-up, and for each of the two parts that are compared."""
_LIMIT = 0.10
_QUEUE = "bench"


def run(folder: Path, scale: float) -> Figure:
    """Measure the memory. The broker keeps only the newest events, so that its disk does not fill up."""
    seconds = _SECONDS * scale
    broker = Broker(folder / "rabbitmq")
    with running_source() as source:
        workload.create_table(source)
        workload.insert(source, 1, 200_000)
        publishers = {_QUEUE: {"target": "rabbitmq", "exchange": _QUEUE}}
        pipeline = pipelines.make_pipeline(folder, "memory", workload.TABLE, publishers=publishers)
        pipelines.publish(source.dsn, pipeline)
        (point,) = source.fetch(
            "select lsn from pg_create_logical_replication_slot(%s, 'pgoutput')", pipeline.slot
        )
        pipelines.begin_changelog(source.dsn, pipeline, LSN.parse(point))
        broker.start()
        try:
            _make_queue(broker)
            os.environ["PGREPL_TARGET_URI"] = broker.uri
            with pipelines.receiving(source.dsn, pipeline):
                app = running_app.App("publish", source.replicator_dsn(), pipeline, "--publisher", _QUEUE)
                try:
                    load = workload.SteadyLoad(source, 200_001, _RATE, seconds)
                    load.start()
                    sizes = _watch(app, load)
                finally:
                    app.stop()
        finally:
            broker.stop()
    if load.error is not None:
        raise load.error
    return _figure(sizes, load.committed.total, load.seconds)


def _make_queue(broker: Broker) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker.uri)) as connection:
        channel = connection.channel()
        channel.exchange_declare(_QUEUE, "topic", durable=True)
        kept = {"x-queue-type": "quorum", "x-max-length": 10_000}
        channel.queue_declare(_QUEUE, durable=True, arguments=kept)
        channel.queue_bind(_QUEUE, _QUEUE, "#")


def _watch(app: running_app.App, load: workload.SteadyLoad) -> list[float]:
    """Return the resident memory of the publisher in MB, every 10 s."""
    sizes: list[float] = []
    while load.is_alive():
        load.join(_SAMPLE_S)
        app.check()
        sizes.append(_resident_mb(app.pid))
    return sizes


def _resident_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def _figure(sizes: list[float], events: int, seconds: float) -> Figure:
    part = max(1, int(len(sizes) * _WARM))
    warm, end = statistics.median(sizes[part : 2 * part]), statistics.median(sizes[-part:])
    return Figure(
        f"memory: a publisher to RabbitMQ, {seconds / 60:.0f} minutes at {thousands(_RATE)} events/s",
        f"{end:.0f} MB at the end, {warm:.0f} MB once warm",
        "",
        f"{end / warm:.2f}",
        f"within {_LIMIT:.0%}",
        abs(end / warm - 1) <= _LIMIT,
        {"events": events, "MB": [round(size) for size in sizes[:: max(1, len(sizes) // 30)]]},
    )
