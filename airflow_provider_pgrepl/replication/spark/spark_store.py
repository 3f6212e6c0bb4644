"""How Spark's own readers reach a store: by Hadoop's connectors, told from the environment.

Keys are no settings here: the connectors take them from each JVM's own environment, else from the role that
there is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

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
from airflow_provider_pgrepl.replication.spark.connectors import CONNECTORS

_S3, _GOOGLE, _AZURE = "spark.hadoop.fs.s3a", "spark.hadoop.fs.gs", "spark.hadoop.fs.azure"
_WEB_IDENTITY = "AWS_WEB_IDENTITY_TOKEN_FILE"
# The connector's own, in its order, which lacks web identities (of Kubernetes).
# https://hadoop.apache.org/docs/r3.5.0/hadoop-aws/tools/hadoop-aws/authentication.html
_PROVIDERS = (
    "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider",
    "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
    "software.amazon.awssdk.auth.credentials.EnvironmentVariableCredentialsProvider",
    "software.amazon.awssdk.auth.credentials.WebIdentityTokenFileCredentialsProvider",
    "org.apache.hadoop.fs.s3a.auth.IAMInstanceCredentialsProvider",
)


def connector_settings(given: Mapping[str, str]) -> dict[str, str]:
    """Settings of a session, by what the environment says of each store; Google's default credentials where
    it says nothing of that. None of a store whose keys are among those that are `given`."""

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
    """It reads keys from files only, and by itself asks none but the host of an instance."""
    # https://hadoop.apache.org/docs/r3.5.0/hadoop-gcp/tools/hadoop-gcp/Configuration.html
    file = next((found for name in GOOGLE.identities if (found := os.environ.get(name))), None)
    if file:
        return {
            f"{_GOOGLE}.auth.type": "SERVICE_ACCOUNT_JSON_KEYFILE",
            f"{_GOOGLE}.auth.service.account.json.keyfile": file,
        }
    return {f"{_GOOGLE}.auth.type": "APPLICATION_DEFAULT"}


def _of_azure() -> dict[str, str]:
    """The settings hold the names of variables: Hadoop puts in their values where it reads them
    (org.apache.hadoop.conf.Configuration, "Variable Expansion"), in each process those of its own."""
    # https://hadoop.apache.org/docs/r3.5.0/hadoop-azure/abfs.html
    if name := name_in_environment(AZURE_KEY):
        return {f"{_AZURE}.account.key": f"${{env.{name}}}"}
    if name := name_in_environment(AZURE_SAS):
        return {f"{_AZURE}.account.auth.type": "SAS", f"{_AZURE}.sas.fixed.token": f"${{env.{name}}}"}
    return {}


def check_connector(error: BaseException) -> None:
    """Raise ToolError when what failed says that the session has no connector."""
    for connector in CONNECTORS:
        if f"{connector.system} not found" in str(error):
            raise ToolError(
                f"this Spark session has no connector to {connector.store}",
                f"start it with --packages org.apache.hadoop:{connector.artifact}:VERSION, in the version of"
                f" Spark's Hadoop; in a checkout of this project `make {connector.folder}` fetches what"
                " build_session takes",
            ) from None
