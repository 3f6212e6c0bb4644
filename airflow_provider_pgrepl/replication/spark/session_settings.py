"""Settings of Spark sessions, merged from this package's, spark-submit's and the caller's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from airflow_provider_pgrepl.replication.runtime.spark_jvm import SMALL_JVM
from airflow_provider_pgrepl.replication.spark.connectors import added_jars, connector_settings, joined

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
