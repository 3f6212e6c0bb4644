"""Settings of Spark sessions: ours, what spark-submit was given, the caller's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from airflow_provider_pgrepl.replication.runtime.spark_submit import SMALL_JVM
from airflow_provider_pgrepl.replication.spark.connectors import added_jars, connector_settings, joined

DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
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
_WITHOUT_ROWS = dict.fromkeys(("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"), SMALL_JVM)
_MODULE = "spark.python.daemon.module"
_DAEMON = Path(__file__).parents[1] / "lake" / "apply" / "worker_daemon.py"
WORKERS = {
    _MODULE: f"airflow_provider_pgrepl.replication.lake.apply.{_DAEMON.stem}",
    # Workers of SQL would have this in their environment, and Spark starts one more daemon for each of those.
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
}
"""Of the apps' own sessions: in others somebody else's code runs in workers, too."""
# Executors are sent the daemon's file, into the folder where they run Python: a module of a package ends each
# task on a host that lacks it, in words of Spark's.
DAEMON_MODULE = _DAEMON.stem
_EXECUTORS_WORKERS = {**WORKERS, _MODULE: DAEMON_MODULE}
_DELTA_SETTINGS = {
    "spark.sql.extensions": DELTA_EXTENSION,
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Fifty by default, which is slower for logs as small as ours.
    "spark.databricks.delta.snapshotPartitions": "1",
}


def session_settings(
    submitted: Mapping[str, str], master: str | None, extra: Mapping[str, str], *, delta: bool
) -> dict[str, str]:
    """All settings of the session, later ones winning: ours, what was submitted, the caller's.

    Raises ToolError when Delta's jars are needed and missing.
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


def with_spare_slot(master: str) -> str:
    """A local master with one slot more; any other as it is."""
    found = re.fullmatch(r"local(?:\[(\d+|\*)\])?", master)
    if found is None:
        return master
    cores = os.cpu_count() or 1
    return f"local[{(cores if found[1] == '*' else int(found[1] or 1)) + 1}]"


def _brings_files(given: Mapping[str, str]) -> bool:
    """Whether Python files are shipped, or this package lies in one: workers are told of them, their daemon
    is not."""
    shipped = any(given.get(name) for name in ("spark.submit.pyFiles", "spark.yarn.dist.pyFiles"))
    return shipped or not _DAEMON.is_file() or "--py-files" in os.environ.get("PYSPARK_SUBMIT_ARGS", "")
