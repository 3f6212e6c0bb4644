"""Spark's connectors: jars and settings for Delta and for object stores.

Jars are searched in the folder that PGREPL_JARS names, or else in `.jars` of the current folder.

Spark's own readers reach an object store through Hadoop's connectors, which are configured here from the
environment variables. Keys are not copied into settings: each JVM's connector reads them from its own
environment, or uses the role of its host.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from airflow_provider_pgrepl.errors import ToolError
from airflow_provider_pgrepl.replication.settings.store_variables import (
    AZURE_KEY,
    AZURE_SAS,
    ENDPOINT,
    GOOGLE,
    REGION,
    name_in_environment,
    store_variable,
)

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
_S3, _GOOGLE, _AZURE = "spark.hadoop.fs.s3a", "spark.hadoop.fs.gs", "spark.hadoop.fs.azure"
_WEB_IDENTITY = "AWS_WEB_IDENTITY_TOKEN_FILE"
# The connector's default providers, in their order, and the one for web identities (of Kubernetes), which the
# default lacks. https://hadoop.apache.org/docs/r3.5.0/hadoop-aws/tools/hadoop-aws/authentication.html
_PROVIDERS = (
    "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider",
    "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
    "software.amazon.awssdk.auth.credentials.EnvironmentVariableCredentialsProvider",
    "software.amazon.awssdk.auth.credentials.WebIdentityTokenFileCredentialsProvider",
    "org.apache.hadoop.fs.s3a.auth.IAMInstanceCredentialsProvider",
)


class Connector(NamedTuple):
    """A connector of Hadoop to a kind of object store. `folder`: the folder below that of the jars that holds
    the connector and its dependencies, fetched only for lakes in such a store. `artifact`: its name in Maven.
    `system`: its class. `store`: the store's name, for messages."""

    folder: str
    artifact: str
    system: str
    store: str


CONNECTORS = (
    Connector("s3a", "hadoop-aws", "org.apache.hadoop.fs.s3a.S3AFileSystem", "stores that speak S3"),
    Connector("gs", "hadoop-gcp", "org.apache.hadoop.fs.gs.GoogleHadoopFileSystem", "Google Cloud Storage"),
    Connector(
        "abfs",
        "hadoop-azure",
        "org.apache.hadoop.fs.azurebfs.SecureAzureBlobFileSystem",
        "Azure's storage",
    ),
)


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
    """Return the connector settings of a session, from the environment variables for each store. Without a
    variable for Google, its default credentials are used. If the `given` settings have credentials for Google
    or Azure, no settings are returned for that store."""

    def says(*parts: str) -> bool:
        return any(name.startswith(part) for name in given for part in parts)

    settings = _of_s3()
    if not says(f"{_GOOGLE}.auth."):
        settings |= _of_google()
    if not says(f"{_AZURE}.account.", f"{_AZURE}.sas."):
        settings |= _of_azure()
    return settings


def _of_s3() -> dict[str, str]:
    endpoint, region = store_variable(ENDPOINT), store_variable(REGION)
    settings = {f"{_S3}.endpoint.region": region} if region else {}
    if endpoint:
        settings |= {f"{_S3}.endpoint": endpoint, f"{_S3}.path.style.access": "true"}
    if os.environ.get(_WEB_IDENTITY):
        settings |= {f"{_S3}.aws.credentials.provider": ",".join(_PROVIDERS)}
    return settings


def _of_google() -> dict[str, str]:
    """Return the settings for Google Cloud Storage. Its connector reads keys only from files, and by default
    asks only the metadata server of the host's instance."""
    # https://hadoop.apache.org/docs/r3.5.0/hadoop-gcp/tools/hadoop-gcp/Configuration.html
    file = next((found for name in GOOGLE.identities if (found := os.environ.get(name))), None)
    if file:
        return {
            f"{_GOOGLE}.auth.type": "SERVICE_ACCOUNT_JSON_KEYFILE",
            f"{_GOOGLE}.auth.service.account.json.keyfile": file,
        }
    return {f"{_GOOGLE}.auth.type": "APPLICATION_DEFAULT"}


def _of_azure() -> dict[str, str]:
    """Return the settings for Azure. They hold the names of environment variables: Hadoop replaces each name
    with the value in the process that reads the setting (org.apache.hadoop.conf.Configuration, "Variable
    Expansion")."""
    # https://hadoop.apache.org/docs/r3.5.0/hadoop-azure/abfs.html
    if name := name_in_environment(AZURE_KEY):
        return {f"{_AZURE}.account.key": f"${{env.{name}}}"}
    if name := name_in_environment(AZURE_SAS):
        return {f"{_AZURE}.account.auth.type": "SAS", f"{_AZURE}.sas.fixed.token": f"${{env.{name}}}"}
    return {}


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
