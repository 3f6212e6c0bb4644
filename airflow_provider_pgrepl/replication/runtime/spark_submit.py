"""Where the Spark applications and the programs that run them are on this machine."""

from __future__ import annotations

import locale
import os
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from airflow_provider_pgrepl.errors import ToolError

SMALL_JVM = "-XX:+NeverActAsServerClassMachine -Xms64m"
"""Of the JVMs of our applications: no row goes through them, they start tasks. By itself a JVM begins with
1/64 of the host's memory, and compiles with care what is run for seconds. No collector of garbage is named:
Java does not start where somebody else names another."""
_PACKAGE = Path(__file__).resolve().parents[2]
_OPEN_FILES, _USUAL_OPEN_FILES = 512, 1024
"""Files that a process of Spark must be able to open: the JVM of an idle driver has 333 open."""
_ASCII = "ANSI_X3.4-1968"
"""The character set of the locale C, by the name that libc has for it."""


def application(name: str) -> str:
    """The path of the Spark application `snapshot`, `replicate` or `publish`. Raises ToolError.

    A wheel carries them inside the package; in a source checkout they lie beside it.
    """
    found = _beside_the_applications(f"{name}.py")
    if found is None:
        raise ToolError(
            f"the Spark application {name}.py is not in {_PACKAGE / 'spark_apps'}",
            "reinstall the wheel of airflow-provider-pgrepl, or give its path as application=",
        )
    return found


def quiet_logging() -> dict[str, str]:
    """The variable by which a JVM logs what is worth reading, and in the form that is expected of it."""
    found = _beside_the_applications("log4j2.properties")
    return {"LOG4J_CONFIGURATION_FILE": found} if found else {}


def shipped_folder(name: str, holding: str, in_checkout: str = ".") -> Path | None:
    """A folder that the wheel carries inside the package, or else its place in a source checkout."""
    for folder in (_PACKAGE / name, _PACKAGE.parent / in_checkout):
        if (folder / holding).is_file():
            return folder
    return None


def _beside_the_applications(name: str) -> str | None:
    folder = shipped_folder("spark_apps", name, "spark_apps")
    return str(folder / name) if folder else None


def spark_submit(binary: str = "spark-submit") -> str:
    """The path of spark-submit: as given, on the PATH, or beside this interpreter. Raises ToolError."""
    found = shutil.which(binary) or shutil.which(binary, path=str(Path(sys.executable).parent))
    if found is None:
        raise ToolError(
            f"{binary} is neither on the PATH nor beside {sys.executable}",
            "pip install 'airflow-provider-pgrepl[spark]', or give its path as spark_binary=",
        )
    return found


def driver_python(conf: Mapping[Any, Any], chosen: str | None) -> dict[str, str]:
    """What keeps a driver on this host with its Python: Spark takes that of executors for both.

    `conf`: the settings that are given. `chosen`: PYSPARK_DRIVER_PYTHON; without it this process's own.
    """
    name = "spark.pyspark.driver.python"
    return {} if name in conf else {name: chosen or sys.executable}


def small_jvm(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable by which spark-submit starts a JVM that only starts tasks. What the environment has in it,
    and Spark's settings, come behind ours, and count. A session's own options come too late."""
    name = "SPARK_SUBMIT_OPTS"
    return {name: f"{SMALL_JVM} {environment.get(name, '')}".strip()}


def readable_names(command: Sequence[str]) -> dict[str, str]:
    """The locale in which a JVM can read its `command` and the name of its folder, where this process has one
    that knows ASCII alone: it would fail at its start, or look for another file."""
    is_readable = all(name.isascii() for name in (str(Path.cwd()), *command))
    return {} if is_readable or locale.nl_langinfo(locale.CODESET) != _ASCII else {"LC_ALL": "C.UTF-8"}


def allow_open_files() -> None:
    """Raise the soft limit of open files to a usual one, as far as it may be. Raises ToolError if that is too
    low for Spark, whose JVM would end with a trace of its own."""
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
    """The command that runs an application by itself, for a pipeline without lake tables."""
    return [sys.executable, "-P", application, "--pipeline", pipeline_file, *own]


def small_process(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of such a process: as it is, and what keeps memory that was freed with few threads."""
    return {"MALLOC_ARENA_MAX": "2", **environment}


def java() -> str:
    """The Java that spark-submit will run. Raises ToolError when there is none."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(str(Path(home) / "bin" / "java") if home else "java")
    if found is None:
        raise ToolError(
            f"no Java {f'in JAVA_HOME={home}' if home else 'on the PATH'}",
            "Spark needs Java 17 or newer: apt-get install openjdk-17-jre-headless",
        )
    return found
