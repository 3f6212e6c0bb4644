"""Paths of the apps and of the programs that run them on this host, their environment, and options of Spark's
JVMs with an archive of the classes that they load.

With the archive a JVM starts in half of the CPU time, because Java maps parsed classes from a file (class
data sharing, https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html). It ignores an archive
that does not fit its version or its jars.
"""

from __future__ import annotations

import hashlib
import locale
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from airflow_provider_pgrepl.errors import ToolError

from . import compiled_loops

_PACKAGE = Path(__file__).resolve().parents[2]
_OPEN_FILES, _USUAL_OPEN_FILES = 512, 1024
"""The number of open files that a Spark process needs: the JVM of an idle driver has 333 open."""
_ASCII = "ANSI_X3.4-1968"
"""libc's name of the character set of the locale C."""
log = logging.getLogger(__name__)
SMALL_JVM = "-XX:+NeverActAsServerClassMachine -Xms64m"
"""Options of the apps' JVMs, which only start tasks, and process no rows. By default a JVM reserves
1/64 of the host's memory at its start, and spends time on optimizing code that runs for seconds. The options
name no garbage collector: Java does not start if another option names a different one."""
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"
_ARCHIVING_S = 300.0
# A session and a job, as the apps have them. Python workers load nothing of this package for it.
_ARCHIVED_PROGRAM = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.parallelize([1, 2], 2).map(str).collect()
spark.stop()
"""


def application(name: str) -> str:
    """Return the path of the app `snapshot`, `replicate` or `publish`. Raises ToolError.

    A wheel contains the apps inside the package. In a source checkout they are next to the package.
    """
    found = _beside_the_applications(f"{name}.py")
    if found is None:
        raise ToolError(
            f"the app {name}.py is not in {_PACKAGE / 'spark_apps'}",
            "reinstall the wheel of airflow-provider-pgrepl, or give its path as application=",
        )
    return found


def quiet_logging() -> dict[str, str]:
    """Return the environment variable that names this package's logging configuration for a JVM.

    Returns an empty dict if the configuration is not installed.
    """
    found = _beside_the_applications("log4j2.properties")
    return {"LOG4J_CONFIGURATION_FILE": found} if found else {}


def shipped_folder(name: str, holding: str, in_checkout: str = ".") -> Path | None:
    """Return the folder that holds the file `holding`, or None.

    It is `name` inside the package, as in a wheel, or else `in_checkout` in a source checkout.
    """
    for folder in (_PACKAGE / name, _PACKAGE.parent / in_checkout):
        if (folder / holding).is_file():
            return folder
    return None


def _beside_the_applications(name: str) -> str | None:
    folder = shipped_folder("spark_apps", name, "spark_apps")
    return str(folder / name) if folder else None


def spark_submit(binary: str = "spark-submit") -> str:
    """Return the path of spark-submit: as given, on the PATH, or next to this Python. Raises ToolError."""
    found = shutil.which(binary) or shutil.which(binary, path=str(Path(sys.executable).parent))
    if found is None:
        raise ToolError(
            f"{binary} is neither on the PATH nor in the folder of {sys.executable}",
            "pip install 'airflow-provider-pgrepl[spark]', or give its path as spark_binary=",
        )
    return found


def driver_python(conf: Mapping[Any, Any], chosen: str | None) -> dict[str, str]:
    """Return the Spark setting of the driver's Python, unless `conf` has it.

    Spark would otherwise use the executors' Python for the driver, too. `chosen`: PYSPARK_DRIVER_PYTHON;
    default: the Python of this process.
    """
    name = "spark.pyspark.driver.python"
    return {} if name in conf else {name: chosen or sys.executable}


def readable_names(command: Sequence[str]) -> dict[str, str]:
    """Return a UTF-8 locale for a JVM if this process has an ASCII locale and the command needs more.

    Otherwise returns an empty dict. With an ASCII locale, a JVM cannot read other characters in `command` or
    in the current folder: it would fail at its start, or open a wrong file.
    """
    is_readable = all(name.isascii() for name in (str(Path.cwd()), *command))
    return {} if is_readable or locale.nl_langinfo(locale.CODESET) != _ASCII else {"LC_ALL": "C.UTF-8"}


def allow_open_files() -> None:
    """Increase the soft limit of open files to 1024, or to the hard limit if that is lower.

    Raises ToolError if the result is too low for Spark, whose JVM would fail with a stack trace.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _USUAL_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_USUAL_OPEN_FILES, hard)
    if 0 <= soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if 0 <= soft < _OPEN_FILES:
        raise ToolError(
            f"a process may have {soft} files open here, and Spark needs {_OPEN_FILES}",
            f"raise the hard limit: ulimit -n {_USUAL_OPEN_FILES}; LimitNOFILE={_USUAL_OPEN_FILES} in a unit"
            f" of systemd; --ulimit nofile={_USUAL_OPEN_FILES} of a container",
        )


def without_spark(application: str, pipeline_file: str, own: Sequence[str]) -> list[str]:
    """Return the command that runs an app without Spark, for a pipeline without lake tables."""
    return [sys.executable, "-P", application, "--pipeline", pipeline_file, *own]


def small_process(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process without Spark: limits glibc to 2 malloc arenas, to save memory.

    Variables in `environment` take precedence.
    """
    return {"MALLOC_ARENA_MAX": "2", **environment}


def java() -> str:
    """Return the path of the Java that spark-submit will run. Raises ToolError if there is none."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(str(Path(home) / "bin" / "java") if home else "java")
    if found is None:
        raise ToolError(
            f"no Java {f'in JAVA_HOME={home}' if home else 'on the PATH'}",
            "Spark needs Java 17 or newer: apt-get install openjdk-17-jre-headless",
        )
    return found


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
    name = _archive_name()
    found = (folder / name for folder in _archive_folders()) if name else iter(())
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
    submit, name = spark_submit(), _archive_name()
    if (made := class_archive()) is not None:
        return made
    folder = next(filter(compiled_loops.is_writable, _archive_folders()), None)
    if name is None or folder is None:
        return None
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        program, archive = Path(scratch) / "program.py", Path(scratch) / "spark.jsa"
        program.write_text(_ARCHIVED_PROGRAM)
        options = f"-XX:ArchiveClassesAtExit={archive} {_QUIET}"
        ended = subprocess.run(
            [submit, "--master", "local[2]", str(program)],
            env={**os.environ, "SPARK_SUBMIT_OPTS": options, "PYSPARK_PYTHON": sys.executable},
            capture_output=True,
            timeout=_ARCHIVING_S,
            check=False,
        )
        if ended.returncode or not archive.is_file():
            log.warning("Java wrote no archive of Spark's classes (exit code %d)", ended.returncode)
            return None
        for outdated in folder.glob("spark-*.jsa"):
            outdated.unlink(missing_ok=True)
        return archive.replace(folder / name)


def _archive_name() -> str | None:
    try:
        found = Path(java()).resolve()
        release = found.parents[1] / "release"
        about = release.read_bytes() if release.is_file() else b""
        key = hashlib.sha256(f"{version('pyspark')} {found} ".encode() + about).hexdigest()[:12]
    except (ToolError, PackageNotFoundError):
        return None
    return f"spark-{key}.jsa"


def _archive_folders() -> Iterator[Path]:
    """Yield the folders in which an archive may be: next to this package, and in the user's cache.

    JVMs run code from the archive, so a folder that other users may write is left out.
    """
    beside = compiled_loops.BESIDE.parent
    if compiled_loops.is_writable(beside) or any(beside.glob("spark-*.jsa")):
        yield beside
    own = compiled_loops.user_cache()
    if own is not None and compiled_loops.is_private(own):
        yield own
