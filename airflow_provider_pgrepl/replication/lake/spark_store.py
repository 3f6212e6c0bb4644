"""How Spark's own readers reach a store: by Hadoop's connectors, that of S3 told from the environment.

Keys are no settings here: the connector takes them from the JVM's environment, else from the role there is.
"""

from __future__ import annotations

import os

from airflow_provider_pgrepl.errors import ToolError
from airflow_provider_pgrepl.replication.lake.spark_jars import CONNECTOR
from airflow_provider_pgrepl.replication.store_variables import ENDPOINT, REGION, store_variable

_PREFIX = "spark.hadoop.fs.s3a"
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

_CONNECTORS = {
    "s3a.S3AFileSystem": (CONNECTOR, "stores that speak S3"),
    "gs.GoogleHadoopFileSystem": ("hadoop-gcp", "Google Cloud Storage"),
    "azurebfs.SecureAzureBlobFileSystem": ("hadoop-azure", "Azure's storage"),
}
"""By what Spark's Hadoop calls their classes: its package of Maven's, and what it leads to."""
_IN_CHECKOUT = "; in a checkout of this project `make s3a` fetches less, which build_session takes"


def connector_settings() -> dict[str, str]:
    """Settings of a session; none where the environment says nothing of a store."""
    endpoint, region = store_variable(ENDPOINT), store_variable(REGION)
    settings = {f"{_PREFIX}.endpoint.region": region} if region else {}
    if endpoint:
        settings |= {f"{_PREFIX}.endpoint": endpoint, f"{_PREFIX}.path.style.access": "true"}
    if os.environ.get(_WEB_IDENTITY):
        settings |= {f"{_PREFIX}.aws.credentials.provider": ",".join(_PROVIDERS)}
    return settings


def check_connector(error: BaseException) -> None:
    """Raise ToolError when what failed says that the session has no connector."""
    for missing, (package, store) in _CONNECTORS.items():
        if f"org.apache.hadoop.fs.{missing} not found" in str(error):
            raise ToolError(
                f"this Spark session has no connector to {store}",
                f"start it with --packages org.apache.hadoop:{package}:VERSION, in the version of Spark's"
                f" Hadoop{_IN_CHECKOUT if package == CONNECTOR else ''}",
            ) from None
