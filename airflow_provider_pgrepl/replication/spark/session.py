"""The Spark session, and checks that name what Spark needs and the host lacks."""

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
from airflow_provider_pgrepl.replication.spark.session_settings import DELTA_EXTENSION, session_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
