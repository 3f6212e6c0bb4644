"""The Spark session: settings, the Delta jars, and clear words when something to run it is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.errors import ToolError
from airflow_provider_pgrepl.replication.lake.spark_jars import added_jars, joined
from airflow_provider_pgrepl.replication.lake.spark_store import connector_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # A speculative copy of a task would merge the same changes a second time, and be refused.
    "spark.speculation": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "WARN",
    # Our Parquet files are not Spark's and carry proleptic Gregorian dates.
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
}
_LOCAL_SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.sql.shuffle.partitions": "2",
}
_WITHOUT_ROWS = {
    # No row goes through this JVM: it starts tasks. By itself it begins with a 1/64 of the host's memory.
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xms64m"
    " -XX:MinHeapFreeRatio=10 -XX:MaxHeapFreeRatio=25",
}
WORKERS = {
    "spark.python.daemon.module": "airflow_provider_pgrepl.replication.lake.applying.worker_daemon",
    # Workers of SQL would have this in their environment, and Spark starts one more daemon for each of those.
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
}
"""Of the apps' own sessions: in others somebody else's code runs in workers, too."""
_DELTA_SETTINGS = {
    "spark.sql.extensions": _DELTA_EXTENSION,
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Fifty by default, which is slower for logs as small as ours.
    "spark.databricks.delta.snapshotPartitions": "1",
}


def build_session(
    app_name: str,
    master: str | None = None,
    extra_conf: Mapping[str, str] | None = None,
    delta: bool = True,
    spare_slot: bool = False,
) -> SparkSession:
    """A Spark session with the settings that this package needs.

    What `spark-submit` was given wins over our settings, `extra_conf` over both; `master` is `local[*]` when
    nobody names one, and has one slot more for a `spare_slot`: a streaming query needs one for what it reads,
    whatever else runs. `delta=False` needs no jars: enough for all that reads and writes lake tables with
    deltalake. Raises ToolError when pyspark, Java or a jar is missing.
    """
    if find_spec("pyspark") is None:
        raise ToolError("pyspark is not installed", "pip install 'airflow-provider-pgrepl[spark]'")
    submitted = _submitted_settings()
    if submitted is None:
        check_java()
    settings = session_settings(submitted or {}, master, extra_conf or {}, delta=delta)
    if spare_slot:
        settings["spark.master"] = with_spare_slot(settings["spark.master"])
    if settings["spark.master"].startswith("local"):
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if submitted is not None and settings.get("spark.jars", "") != submitted.get("spark.jars", ""):
        _load_into_running_jvm(settings["spark.jars"])

    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def session_settings(
    submitted: Mapping[str, str], master: str | None, extra: Mapping[str, str], *, delta: bool
) -> dict[str, str]:
    """All settings of the session, later ones winning: ours, what was submitted, the caller's.

    Raises ToolError when Delta's jars are needed and missing.
    """
    given = {**submitted, **extra}
    chosen = master or given.get("spark.master") or "local[*]"
    settings = dict(_SETTINGS)
    if chosen.startswith("local"):
        settings |= _LOCAL_SETTINGS if delta else {**_LOCAL_SETTINGS, **_WITHOUT_ROWS}
        if not delta and not _brings_files(given):
            settings |= WORKERS
    if delta:
        settings |= {**_DELTA_SETTINGS, **connector_settings()}
    settings |= {**given, "spark.master": chosen}
    if delta:
        settings["spark.sql.extensions"] = joined(settings["spark.sql.extensions"], _DELTA_EXTENSION)
        if jars := added_jars(given):
            settings["spark.jars"] = joined(given.get("spark.jars", ""), jars)
    return settings


def runs_on_cluster() -> bool:
    """Whether spark-submit was given a master whose executors are processes of their own."""
    return not (_submitted_settings() or {}).get("spark.master", "local").startswith("local")


def with_spare_slot(master: str) -> str:
    """A local master with one slot more; any other as it is."""
    found = re.fullmatch(r"local(?:\[(\d+|\*)\])?", master)
    if found is None:
        return master
    cores = os.cpu_count() or 1
    return f"local[{(cores if found[1] == '*' else int(found[1] or 1)) + 1}]"


def check_java() -> None:
    """Raise ToolError unless there is a Java that Spark can run on."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    hint = "sudo apt-get install -y openjdk-17-jre-headless"
    if java is None or not Path(java).exists():
        where = f"in JAVA_HOME ({home})" if home else "on the PATH"
        raise ToolError(f"Spark needs Java 17 or later, and there is none {where}", hint)
    # Java before 9 does not know the option, and a cut-down build lacks the module.
    probe = subprocess.run(
        [java, "--add-modules", "jdk.incubator.vector", "-version"],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        raise ToolError(f"Spark needs Java 17 or later with jdk.incubator.vector; {java} is not one", hint)
    major = _java_major(probe.stderr)
    if major is not None and major < 17:
        raise ToolError(f"Spark needs Java 17 or later; {java} is {major}", hint)


def has_delta(spark: SparkSession) -> bool:
    """Whether this session was started with Delta."""
    return _DELTA_EXTENSION in (spark.conf.get("spark.sql.extensions", "") or "")


def check_delta(spark: SparkSession) -> None:
    """Raise ToolError unless this session was started with Delta."""
    if not has_delta(spark):
        raise ToolError(
            "this Spark session was started without Delta",
            "start it with airflow_provider_pgrepl.replication.lake.session.build_session",
        )


def _java_major(version_text: str) -> int | None:
    for line in version_text.splitlines():
        if " version " in line and line.count('"') >= 2:
            first = line.split('"')[1].split(".")[0].split("-")[0]
            return int(first) if first.isdigit() else None
    return None


def _submitted_settings() -> dict[str, str] | None:
    """What spark-submit was given; None when this process was not started by it."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    # The name is always set there, if only to the file's.
    return {key: value for key, value in SparkConf(loadDefaults=True).getAll() if key != "spark.app.name"}


def _brings_files(given: Mapping[str, str]) -> bool:
    """Whether Python files are shipped: workers are told of them, their daemon is not."""
    return bool(given.get("spark.submit.pyFiles")) or "--py-files" in os.environ.get(
        "PYSPARK_SUBMIT_ARGS", ""
    )


def _load_into_running_jvm(jars: str) -> None:
    """spark-submit has started the JVM, and its driver looks only into jars that its class loader knows."""
    from pyspark import SparkContext

    jvm = SparkContext._jvm
    assert jvm is not None
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        for jar in jars.split(","):
            if "://" not in jar:
                loader.addURL(jvm.java.io.File(jar).toURI().toURL())
    except Exception as error:
        raise ToolError(
            "the jars cannot be added to the running Spark driver",
            f"spark-submit --jars {jars} …",
        ) from error


class LazySession:
    """A Spark session that is made when it is first needed."""

    def __init__(self, make: Callable[[], SparkSession]) -> None:
        self._make = make
        self._spark: SparkSession | None = None

    def get(self) -> SparkSession:
        if self._spark is None:
            self._spark = self._make()
        return self._spark

    def stop(self) -> None:
        if self._spark is not None:
            self._spark.stop()
