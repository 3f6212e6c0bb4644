"""Spark's connectors: jars and settings for Delta and for object stores.

Jars are searched in the folder that PGREPL_JARS names, or else in `.jars` of the current folder.

Spark's own readers reach an object store through Hadoop's connectors, which are configured here from the
environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from airflow_provider_pgrepl.errors import ToolError
from airflow_provider_pgrepl.replication.settings.stores import STORES, Connector
from airflow_provider_pgrepl.replication.storage.stores import access_class

JARS_VARIABLE = "PGREPL_JARS"
DELTA_ARTIFACTS = (
    "delta-spark_4.2_2.13",
    "delta-storage",
    "delta-kernel-api",
    "delta-kernel-defaults",
    "delta-kernel-unitycatalog",
    "unitycatalog-client",
    "unitycatalog-hadoop",
)
"""The artifacts that Delta needs in addition to pyspark's own jars."""
CONNECTORS = tuple(kind.connector for kind in STORES.values())


def delta_jars() -> list[Path]:
    """Return the jars to add for Delta, or none if pyspark's own folder has them. Raises ToolError if jars
    are missing."""
    folder = _folder()
    found = {artifact: sorted(folder.glob(f"{artifact}-[0-9]*.jar")) for artifact in DELTA_ARTIFACTS}
    missing = [artifact for artifact, jars in found.items() if not jars]
    if not missing:
        return [jars[-1] for jars in found.values()]
    if not os.environ.get(JARS_VARIABLE) and _pyspark_has("delta-spark_"):
        return []
    raise ToolError(
        f"the Delta jars are missing in {folder}: {', '.join(missing)}",
        "start the session with --packages io.delta:delta-spark_4.2_2.13:4.4.0 (or another version for your"
        f" Spark), or name the folder that holds them in {JARS_VARIABLE}; `make jars` fetches them in a"
        " checkout of this project",
    )


def connector_jars(connector: Connector) -> list[Path]:
    """Return the jars of a connector, or none if they were not fetched or pyspark's own folder has them."""
    if _pyspark_has(connector.artifact):
        return []
    jars = sorted((_folder() / connector.folder).glob("*.jar"))
    return jars if any(jar.name.startswith(connector.artifact) for jar in jars) else []


def brings(given: Mapping[str, str], artifact: str) -> bool:
    """Return True if the session's jar settings name the artifact."""
    settings = ("spark.jars", "spark.jars.packages", "spark.driver.extraClassPath")
    return artifact in ",".join(given.get(key, "") for key in settings)


def added_jars(given: Mapping[str, str]) -> list[Path]:
    """Return the jars of Delta and of the connectors that the `given` settings lack. Raises ToolError if
    Delta's jars are missing."""
    jars = [] if brings(given, "delta-spark") else delta_jars()
    for connector in CONNECTORS:
        if not brings(given, connector.artifact):
            jars += connector_jars(connector)
    return jars


def joined(*lists: str | Iterable[Path]) -> str:
    """Join lists with commas, in order and without repeats."""
    items = (each for one in lists for each in (one.split(",") if isinstance(one, str) else map(str, one)))
    return ",".join(dict.fromkeys(item for item in items if item))


def _folder() -> Path:
    return Path(os.environ.get(JARS_VARIABLE) or ".jars").absolute()


def _pyspark_has(artifact: str) -> bool:
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return False
    home = os.environ.get("SPARK_HOME")
    folder = (Path(home) if home else Path(spec.origin).parent) / "jars"
    return any(folder.glob(f"{artifact}*.jar"))


def connector_settings(given: Mapping[str, str]) -> dict[str, str]:
    """Return the connector settings of a session, from the environment variables for each store. If the
    `given` settings have credentials for Google or Azure, no settings are returned for that store."""
    settings = dict[str, str]()
    for kind in STORES.values():
        if not any(name.startswith(prefix) for name in given for prefix in kind.connector.credentials):
            settings |= access_class(kind).spark_settings()
    return settings


def check_connector(error: BaseException) -> None:
    """Raise ToolError if the error says that the session lacks a connector."""
    for connector in CONNECTORS:
        if f"{connector.system} not found" in str(error):
            raise ToolError(
                f"this Spark session has no connector to {connector.store}",
                f"start it with --packages org.apache.hadoop:{connector.artifact}:VERSION, in the version of"
                f" Spark's Hadoop; in a checkout of this project `make {connector.folder}` fetches what"
                " build_session takes",
            ) from None
