"""Archives of the classes that Spark's JVM and Kafka's broker load: they start with a third less CPU time.

`python -m tests.support.class_archive` makes those whose program is there, once per version of it and of
Java. Java ignores an archive that does not fit its version or jars:
https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyspark

from demo import kafka

JARS = Path(__file__).parents[2] / ".jars"
_QUIET = "-Xlog:cds=off"


def archive(program: str = "spark") -> Path:
    """Return the path of the program's archive for this Java; it may not exist."""
    java = Path(shutil.which("java") or "java").resolve()
    version = (java.parents[1] / "release").read_bytes() if (java.parents[1] / "release").exists() else b""
    jars = sorted(file.name for file in kafka.JARS.glob("*.jar"))
    own = pyspark.__version__ if program == "spark" else " ".join(jars)
    key = hashlib.sha256(f"{own} {java}".encode() + version).hexdigest()[:12]
    return JARS / f"{program}-{key}.jsa"


def options(program: str = "spark") -> str:
    """Return the options of a JVM that uses the archive; empty if there is none."""
    if program == "kafka" and not kafka.is_there():
        return ""
    found = archive(program)
    return f"-XX:SharedArchiveFile={found} {_QUIET} -Xlog:cds+dynamic=off" if found.exists() else ""


def main() -> None:
    """Make the archives that are missing, each from a run of its program."""
    _make("spark", _run_spark)
    if kafka.is_there():
        _make("kafka", _run_kafka)


def _make(program: str, run: Callable[[Path, tuple[str, ...]], None]) -> None:
    if archive(program).exists():
        return
    print(f"archiving the classes of {program}, once")
    with tempfile.TemporaryDirectory(dir=JARS) as folder:
        made = Path(folder) / "classes.jsa"
        run(Path(folder), (f"-XX:ArchiveClassesAtExit={made}", _QUIET))
        made.replace(archive(program))


def _run_spark(folder: Path, java_options: tuple[str, ...]) -> None:
    """Run a job, a query and a stream."""
    from pyspark import SparkContext

    from airflow_provider_pgrepl.replication.spark.connectors import JARS_VARIABLE
    from airflow_provider_pgrepl.replication.spark.session import build_session

    os.environ[JARS_VARIABLE] = str(JARS)
    options = {"spark.driver.extraJavaOptions": " ".join(java_options)}
    spark = build_session("archive", "local[2]", options)
    gateway = SparkContext._gateway
    assert gateway is not None
    spark.sparkContext.parallelize([1, 2], 2).map(str).collect()
    table = str(folder / "table")
    spark.range(10).write.format("delta").save(table)
    assert spark.read.format("delta").load(table).count() == 10
    rows = spark.readStream.format("rate").load()
    query = rows.writeStream.foreachBatch(lambda *_: None).trigger(once=True).start()
    query.awaitTermination()
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    # Java writes the archive when it ends.
    gateway.proc.wait(300)


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
