"""The Spark session with its settings, merged from this package's, spark-submit's and the caller's, and
checks that name what Spark needs and the host lacks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.errors import ToolError
from airflow_provider_pgrepl.replication.runtime.spark_submit import SMALL_JVM

from .connectors import added_jars, connector_settings, joined

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # A speculative copy of a task would merge the same changes a second time, and its commit would be
    # rejected.
    "spark.speculation": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "WARN",
    # The Parquet files of this package are not written by Spark, and have proleptic Gregorian dates.
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
}
_LOCAL_SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.sql.shuffle.partitions": "2",
}
_WITHOUT_ROWS = dict.fromkeys(("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"), SMALL_JVM)
_MODULE = "spark.python.daemon.module"
_DAEMON = Path(__file__).parents[1] / "lake" / "apply" / "worker_daemon.py"
WORKERS = {
    _MODULE: f"airflow_provider_pgrepl.replication.lake.apply.{_DAEMON.stem}",
    # SQL workers would have this setting in their environment, and Spark starts another daemon for each
    # different environment.
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
}
"""Set only in the apps' own sessions: in other sessions, code of other programs runs in workers, too."""
# Executors receive the daemon's file in the folder where they run Python. If the setting named a module of a
# package, each task on a host that lacks the package would fail with an error in Spark's own words.
DAEMON_MODULE = _DAEMON.stem
_EXECUTORS_WORKERS = {**WORKERS, _MODULE: DAEMON_MODULE}
_DELTA_SETTINGS = {
    "spark.sql.extensions": DELTA_EXTENSION,
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # The default is 50, which is slower for logs as small as this package's.
    "spark.databricks.delta.snapshotPartitions": "1",
}


def session_settings(
    submitted: Mapping[str, str], master: str | None, extra: Mapping[str, str], *, delta: bool
) -> dict[str, str]:
    """Return all settings of the session. Later ones override earlier ones: this package's, spark-submit's,
    the caller's.

    Raises ToolError if Delta's jars are needed and missing.
    """
    given = {**submitted, **extra}
    chosen = master or given.get("spark.master") or "local[*]"
    is_local = chosen.startswith("local")
    settings = {**_SETTINGS, **(_LOCAL_SETTINGS if is_local else {})}
    if delta:
        settings |= {**_DELTA_SETTINGS, **connector_settings(given)}
    else:
        settings |= _WITHOUT_ROWS
        if not _brings_files(given):
            settings |= WORKERS if is_local else _EXECUTORS_WORKERS
    settings |= {**given, "spark.master": chosen}
    if settings.get(_MODULE) == DAEMON_MODULE:
        settings["spark.files"] = joined(given.get("spark.files", ""), str(_DAEMON))
    if delta:
        settings["spark.sql.extensions"] = joined(settings["spark.sql.extensions"], DELTA_EXTENSION)
        if jars := added_jars(given):
            settings["spark.jars"] = joined(given.get("spark.jars", ""), jars)
    return settings


def _brings_files(given: Mapping[str, str]) -> bool:
    """Return True if Python files are shipped to the workers, or if this package is imported from one.
    Workers get the files on their path, but the workers' daemon does not."""
    shipped = any(given.get(name) for name in ("spark.submit.pyFiles", "spark.yarn.dist.pyFiles"))
    return shipped or not _DAEMON.is_file() or "--py-files" in os.environ.get("PYSPARK_SUBMIT_ARGS", "")


def build_session(
    app_name: str,
    master: str | None = None,
    extra_conf: Mapping[str, str] | None = None,
    delta: bool = True,
) -> SparkSession:
    """Return a Spark session with the settings that this package needs.

    Settings given to `spark-submit` override this package's, and `extra_conf` overrides both.

    :param app_name: the name of the Spark application
    :param master: Spark's master. Default: `local[*]`
    :param extra_conf: more Spark settings
    :param delta: load Delta's jars, which Spark needs to read lake tables. The apps read and write them with
        deltalake instead
    :raises ToolError: if pyspark, Java or a jar is missing
    """
    if find_spec("pyspark") is None:
        raise ToolError("pyspark is not installed", "pip install 'airflow-provider-pgrepl[spark]'")
    submitted = _submitted_settings()
    if submitted is None:
        check_java()
    settings = session_settings(submitted or {}, master, extra_conf or {}, delta=delta)
    if settings["spark.master"].startswith("local"):
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if submitted is not None and settings.get("spark.jars", "") != submitted.get("spark.jars", ""):
        _load_into_running_jvm(settings["spark.jars"])

    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def runs_on_cluster() -> bool:
    """Return True if spark-submit was given a master whose executors are separate processes."""
    return not (_submitted_settings() or {}).get("spark.master", "local").startswith("local")


def has_local_jvm() -> bool:
    """Return True if spark-submit started this process with a local master: its JVM runs already."""
    submitted = _submitted_settings()
    return submitted is not None and submitted.get("spark.master", "local").startswith("local")


def check_java() -> None:
    """Raise ToolError unless there is a Java that Spark can run on."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    hint = (
        "install Java 17 (sudo apt-get install -y openjdk-17-jre-headless), and set JAVA_HOME to it or unset"
        " JAVA_HOME"
    )
    if java is None or not Path(java).exists():
        where = f"in JAVA_HOME ({home})" if home else "on the PATH"
        raise ToolError(f"Spark needs Java 17 or later, and there is none {where}", hint)
    # Java before version 9 does not know the option, and a reduced build lacks the module.
    probe = subprocess.run(
        [java, "--add-modules", "jdk.incubator.vector", "-version"],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        raise ToolError(
            f"Spark needs Java 17 or later with the module jdk.incubator.vector, and {java} lacks it", hint
        )
    major = _java_major(probe.stderr)
    if major is not None and major < 17:
        raise ToolError(f"Spark needs Java 17 or later; {java} is {major}", hint)


def has_delta(spark: SparkSession) -> bool:
    """Return True if this session was started with Delta."""
    return DELTA_EXTENSION in (spark.conf.get("spark.sql.extensions", "") or "")


def check_delta(spark: SparkSession) -> None:
    """Raise ToolError unless this session was started with Delta."""
    if not has_delta(spark):
        raise ToolError(
            "this Spark session was started without Delta",
            "start it with airflow_provider_pgrepl.replication.spark.session.build_session",
        )


def _java_major(version_text: str) -> int | None:
    for line in version_text.splitlines():
        if " version " in line and line.count('"') >= 2:
            first = line.split('"')[1].split(".")[0].split("-")[0]
            return int(first) if first.isdigit() else None
    return None


def _submitted_settings() -> dict[str, str] | None:
    """Return the settings given to spark-submit, or None if spark-submit did not start this process."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    # spark-submit always sets the application's name, by default to the name of the file.
    return {key: value for key, value in SparkConf(loadDefaults=True).getAll() if key != "spark.app.name"}


def _load_into_running_jvm(jars: str) -> None:
    """Add jars to the class loader of the JVM that spark-submit has started: the driver finds classes only in
    jars that the class loader knows. Raises ToolError."""
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
    """A Spark session that is created when it is first needed, or from `begin` on by a thread of its own.

    :param make: returns the session; called once
    """

    def __init__(self, make: Callable[[], SparkSession]) -> None:
        self._make = make
        self._made: Future[SparkSession] = Future()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start creating the session, and return at once. Does nothing if that has begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pgrepl-spark", daemon=True)
            self._thread.start()

    def get(self) -> SparkSession:
        """Return the session once it is created. Raises the error that `make` has raised."""
        self.begin()
        return self._made.result()

    def stop(self) -> None:
        """Stop the session. A session that is still being created is stopped later, by its thread."""
        self._made.add_done_callback(_stop_made)

    def _run(self) -> None:
        try:
            self._made.set_result(self._make())
        except BaseException as error:  # noqa: BLE001 - `get` raises it
            self._made.set_exception(error)


def _stop_made(made: Future[SparkSession]) -> None:
    if made.exception() is None:
        made.result().stop()
