"""The JVM of a driver on this host, which spark-submit starts: it starts tasks, no row goes through it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from airflow_provider_pgrepl.replication.lake.session_settings import SERIAL_COLLECTOR, SMALL_JVM

OPTIONS = "SPARK_SUBMIT_OPTS"
"""The variable whose options spark-submit puts before those of `spark.driver.extraJavaOptions`."""

_OF_JAVA = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")
_FILE = "--properties-file"
_COLLECTOR = re.compile(r"-XX:\+Use\w+GC\b")


def small_jvm(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variable by which a command of spark-submit's starts a small JVM, in place of that in its
    environment, whose options come behind ours, and so count; as those of the command and of Spark's settings
    do.

    Java does not start with two collectors of garbage: where another is named ours is left out.
    """
    own = environment.get(OPTIONS, "")
    texts = [own, *command, *(environment.get(name, "") for name in _OF_JAVA)]
    texts += _settings(command, environment)
    collector = [] if any(map(_COLLECTOR.search, texts)) else [SERIAL_COLLECTOR]
    return {OPTIONS: " ".join([*collector, SMALL_JVM, *filter(None, [own])])}


def _settings(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """The files from which spark-submit reads more."""
    named = [part.removeprefix(f"{_FILE}=") for part in command if part.startswith(f"{_FILE}=")]
    if _FILE in command:
        named += command[command.index(_FILE) + 1 :][:1]
    folders = [f"{home}/conf" for home in _homes(command[0], environment)]
    if folder := environment.get("SPARK_CONF_DIR"):
        folders = [folder]
    for file in (*named, *(f"{folder}/spark-defaults.conf" for folder in folders)):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            yield Path(file).read_text(encoding="utf-8")


def _homes(submit: str, environment: Mapping[str, str]) -> list[str]:
    """Where Spark may be, as its scripts look for it: that of pip has them in another place than itself."""
    if home := environment.get("SPARK_HOME"):
        return [home]
    spec = find_spec("pyspark")
    of_pip = [str(Path(spec.origin).parent)] if spec is not None and spec.origin else []
    return [str(Path(os.path.realpath(submit)).parents[1]), *of_pip]
