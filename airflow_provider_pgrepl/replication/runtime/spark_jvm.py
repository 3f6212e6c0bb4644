"""Options of Spark's JVMs, and an archive of the classes that they load.

With the archive a JVM starts in half of the CPU time, because Java maps parsed classes from a file (class
data sharing, https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html). It ignores an archive
that does not fit its version or its jars.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from airflow_provider_pgrepl.errors import ToolError
from airflow_provider_pgrepl.replication.runtime import compiled_loops
from airflow_provider_pgrepl.replication.runtime.spark_submit import java, spark_submit

log = logging.getLogger(__name__)

SMALL_JVM = "-XX:+NeverActAsServerClassMachine -Xms64m"
"""Options of the apps' JVMs, which only start tasks, and process no rows. By default a JVM reserves
1/64 of the host's memory at its start, and spends time on optimizing code that runs for seconds. The options
name no garbage collector: Java does not start if another option names a different one."""

_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"
_LIMIT_S = 300.0
# A session and a job, as the apps have them. Python workers load nothing of this package for it.
_PROGRAM = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.parallelize([1, 2], 2).map(str).collect()
spark.stop()
"""


def small_jvm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable with the options for spark-submit's JVM: SMALL_JVM, and the archive of
    Spark's classes if `pgrepl warm-up` has made one.

    Options of the environment and of Spark's settings come later on the command line, and take precedence.
    Options of a Spark session would come too late.
    """
    name = "SPARK_SUBMIT_OPTS"
    return {name: " ".join(filter(None, (SMALL_JVM, archive_options(), environment.get(name, ""))))}


def class_archive() -> Path | None:
    """Return the archive for this host's Java and pyspark, or None if `make_class_archive` has made none."""
    name = _name()
    found = (folder / name for folder in _folders()) if name else iter(())
    return next((file for file in found if file.is_file()), None)


def archive_options() -> str:
    """Return the options of a JVM that reads the archive; "" without one."""
    found = class_archive()
    # spark-submit splits the options at spaces.
    return "" if found is None or " " in str(found) else f"-XX:SharedArchiveFile={found} {_QUIET}"


def make_class_archive() -> Path | None:
    """Make the archive if there is none, and return it. Returns None if no folder can keep it, or if Java
    wrote none.

    Raises ToolError if Java or Spark is missing.
    """
    java()
    submit, name = spark_submit(), _name()
    if (made := class_archive()) is not None:
        return made
    folder = next(filter(compiled_loops.is_writable, _folders()), None)
    if name is None or folder is None:
        return None
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        program, archive = Path(scratch) / "program.py", Path(scratch) / "spark.jsa"
        program.write_text(_PROGRAM)
        options = f"-XX:ArchiveClassesAtExit={archive} {_QUIET}"
        ended = subprocess.run(
            [submit, "--master", "local[2]", str(program)],
            env={**os.environ, "SPARK_SUBMIT_OPTS": options, "PYSPARK_PYTHON": sys.executable},
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if ended.returncode or not archive.is_file():
            log.warning("Java wrote no archive of Spark's classes (exit code %d)", ended.returncode)
            return None
        for outdated in folder.glob("spark-*.jsa"):
            outdated.unlink(missing_ok=True)
        return archive.replace(folder / name)


def _name() -> str | None:
    try:
        found = Path(java()).resolve()
        release = found.parents[1] / "release"
        about = release.read_bytes() if release.is_file() else b""
        key = hashlib.sha256(f"{version('pyspark')} {found} ".encode() + about).hexdigest()[:12]
    except (ToolError, PackageNotFoundError):
        return None
    return f"spark-{key}.jsa"


def _folders() -> Iterator[Path]:
    """Yield the folders in which an archive may be: next to this package, and in the user's cache.

    JVMs run code from the archive, so a folder that other users may write is left out.
    """
    beside = compiled_loops.BESIDE.parent
    if compiled_loops.is_writable(beside) or any(beside.glob("spark-*.jsa")):
        yield beside
    own = compiled_loops.user_cache()
    if own is not None and compiled_loops.is_private(own):
        yield own
