"""Debezium in Kafka Connect as a peer, which publishes from a slot to the same Kafka."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, TopicPartition

from benchmarks import workload
from benchmarks.source import Source
from demo.kafka import KafkaBroker
from demo.postgres import free_port

ENGINE = Path(__file__).resolve().parents[1] / ".debezium"
_SLOT = "debezium_peer"
_WAIT_S = 240.0
_WORKER = {
    "key.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
    "key.converter.schemas.enable": "false",
    "value.converter.schemas.enable": "false",
    "offset.flush.interval.ms": "1000",
}
_CONNECTOR = {
    "name": "peer",
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "tasks.max": "1",
    "plugin.name": "pgoutput",
    "publication.autocreate.mode": "disabled",
    "snapshot.mode": "no_data",
    "slot.name": _SLOT,
    "topic.prefix": "peer",
    "database.user": "postgres",
    "database.password": "none",
    "tombstones.on.delete": "false",
}


def prepare(source: Source) -> None:
    """Create the slot of Debezium. Call this before the changes to publish are committed."""
    source.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", _SLOT)


def rate(source: Source, publication: str, broker: KafkaBroker, folder: Path, events: int) -> float:
    """Return events per second, from the first arrived event to the last."""
    topic = f"peer.public.{workload.TABLE.rpartition('.')[2]}"
    with _running(source, publication, broker, folder):
        _until(lambda: arrived(broker, topic) > 0)
        begun, started = arrived(broker, topic), time.perf_counter()
        _until(lambda: arrived(broker, topic) >= events)
        return (events - begun) / (time.perf_counter() - started)


def arrived(broker: KafkaBroker, topic: str) -> int:
    """Return the number of messages of a topic, or 0 if it cannot be read."""
    with closing(Consumer({"bootstrap.servers": broker.servers, "group.id": "bench"})) as consumer:
        try:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)
        except KafkaException:
            return 0
        return int(high - low)


@contextmanager
def _running(source: Source, publication: str, broker: KafkaBroker, folder: Path) -> Iterator[None]:
    own = {
        "publication.name": publication,
        "database.hostname": "127.0.0.1",
        "database.port": str(source.server.port),
        "database.dbname": source.fetch("select current_database()")[0],
    }
    worker = {
        "bootstrap.servers": broker.servers,
        "offset.storage.file.filename": str(folder / "offsets"),
        "listeners": f"HTTP://127.0.0.1:{free_port()}",
        # The connector is on the classpath: in a plugin folder, each jar would be a plugin of its own.
        "plugin.path": str(folder / "plugins"),
    }
    files = [
        _write(folder / "worker.properties", {**_WORKER, **worker}),
        _write(folder / "connector.properties", {**_CONNECTOR, **own}),
    ]
    (folder / "plugins").mkdir()
    command = [shutil.which("java") or "java", "-Xmx1g", "-cp", f"{ENGINE}/*"]
    command += ["org.apache.kafka.connect.cli.ConnectStandalone", *files]
    with (folder / "connect.log").open("ab") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def _write(file: Path, properties: Mapping[str, str]) -> str:
    file.write_text("".join(f"{name}={value}\n" for name, value in properties.items()), encoding="utf-8")
    return str(file)


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("Debezium did not get there")
        time.sleep(0.2)
