"""An archive of the classes that Spark's JVM loads: a session starts with a third less CPU time.

`python -m tests.support.class_archive` makes it, once per Java and pyspark. Java ignores an archive that does
not fit its version or jars: https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import pyspark

JARS = Path(__file__).parents[2] / ".jars"


def archive() -> Path:
    """Return the path of the archive for this Java and pyspark; it may not exist."""
    java = Path(shutil.which("java") or "java").resolve()
    version = (java.parents[1] / "release").read_bytes() if (java.parents[1] / "release").exists() else b""
    key = hashlib.sha256(f"{pyspark.__version__} {java}".encode() + version).hexdigest()[:12]
    return JARS / f"spark-{key}.jsa"


def options() -> str:
    """Return the options of a JVM that uses the archive; empty if there is none."""
    return (
        f"-XX:SharedArchiveFile={archive()} -Xlog:cds=off -Xlog:cds+dynamic=off" if archive().exists() else ""
    )


def main() -> None:
    """Make the archive, if there is none, from a session that runs a job, a query and a stream."""
    if archive().exists():
        return
    print("archiving the classes of Spark's JVM, once")
    from pyspark import SparkContext

    from airflow_provider_pgrepl.replication.spark.connectors import JARS_VARIABLE
    from airflow_provider_pgrepl.replication.spark.session import build_session

    os.environ[JARS_VARIABLE] = str(JARS)
    with tempfile.TemporaryDirectory(dir=JARS) as folder:
        made = Path(folder) / "spark.jsa"
        spark = build_session(
            "archive",
            "local[2]",
            {"spark.driver.extraJavaOptions": f"-XX:ArchiveClassesAtExit={made} -Xlog:cds=off"},
        )
        gateway = SparkContext._gateway
        assert gateway is not None
        spark.sparkContext.parallelize([1, 2], 2).map(str).collect()
        table = str(Path(folder) / "table")
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
        made.replace(archive())


if __name__ == "__main__":
    main()
