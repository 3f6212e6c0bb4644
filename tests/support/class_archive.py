"""An archive of the classes that Kafka's broker loads: it starts with a third less CPU time.

`python -m tests.support.class_archive` makes it if Kafka is there, once per version of it and of Java. Java
ignores an archive that does not fit its version or jars:
https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from demo import kafka

_QUIET = "-Xlog:cds=off"


def archive() -> Path:
    """Return the path of the archive for this Kafka and Java; it may not exist."""
    java = Path(shutil.which("java") or "java").resolve()
    version = (java.parents[1] / "release").read_bytes() if (java.parents[1] / "release").exists() else b""
    jars = " ".join(sorted(file.name for file in kafka.JARS.glob("*.jar")))
    key = hashlib.sha256(f"{jars} {java}".encode() + version).hexdigest()[:12]
    return kafka.JARS / f"kafka-{key}.jsa"


def options() -> str:
    """Return the options of a JVM that uses the archive; empty if there is none."""
    if not kafka.is_there() or not archive().exists():
        return ""
    return f"-XX:SharedArchiveFile={archive()} {_QUIET} -Xlog:cds+dynamic=off"


def main() -> None:
    """Make the archive if it is missing, from a run of the broker."""
    if archive().exists() or not kafka.is_there():
        return
    print("archiving the classes of Kafka, once")
    with tempfile.TemporaryDirectory(dir=kafka.JARS) as folder:
        made = Path(folder) / "classes.jsa"
        _run_kafka(Path(folder), (f"-XX:ArchiveClassesAtExit={made}", _QUIET))
        made.replace(archive())


def _run_kafka(folder: Path, java_options: tuple[str, ...]) -> None:
    """Start a broker, send a message and receive it."""
    from confluent_kafka import Producer

    from tests.support.kafka import KafkaTopics, SmallBroker

    broker = SmallBroker(folder / "kafka")
    broker.folder.mkdir()
    # The tool that formats its disk is to leave no archive.
    broker.prepare()
    broker.java_options = (*SmallBroker.java_options, *java_options)
    broker.stop_s = 300.0
    broker.start()
    try:
        topics = KafkaTopics(broker.servers, "archived")
        topics.make("t", 1)
        producer = Producer({"bootstrap.servers": broker.servers})
        producer.produce("archived.t", b"{}", b"key", headers={"id": b"1"})
        producer.flush()
        assert len(topics.raw()) == 1
    finally:
        broker.stop()


if __name__ == "__main__":
    main()
