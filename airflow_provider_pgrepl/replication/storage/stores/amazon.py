"""Access to a store with the S3 protocol."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from obstore.store import S3Store
from pyarrow import fs

from airflow_provider_pgrepl.replication.settings.store_variables import store_variable
from airflow_provider_pgrepl.replication.settings.stores import (
    AWS_ENDPOINT,
    AWS_KEY_ID,
    AWS_REGION,
    AWS_SECRET,
    AWS_TOKEN,
    StoreLocation,
)

from .base import StoreAccess, retried, said

_DEFAULT_REGION = "us-east-1"
_ATTEMPTS = 13
"""Arrow's attempts for a request. It waits 50 ms before the second, and doubles each pause: 3.4 minutes."""

_HADOOP = "spark.hadoop.fs.s3a"
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


@dataclass(frozen=True)
class AmazonAccess(StoreAccess):
    """Access with keys, or, without keys, with the role of the host."""

    store_class = S3Store
    prefix = "aws_"

    region: str
    key_id: str = field(repr=False)
    secret: str = field(repr=False)
    token: str = field(repr=False)

    @classmethod
    def of(cls, place: StoreLocation) -> AmazonAccess:
        """Read endpoint, region and keys from the environment.

        If neither region nor endpoint is set, Amazon is asked for the bucket's region. Raises OSError if that
        fails, after RETRY_TIMEOUT if Amazon cannot be reached.
        """
        url = store_variable(AWS_ENDPOINT)
        region = store_variable(AWS_REGION) or (_DEFAULT_REGION if url else _region_of(place.bucket))
        return cls(
            place.bucket, url, region, *(store_variable(name) for name in (AWS_KEY_ID, AWS_SECRET, AWS_TOKEN))
        )

    def filesystem(self) -> fs.FileSystem:
        # With delayed open, writing a small file takes one request instead of three.
        options: dict[str, Any] = {
            "region": self.region,
            "allow_delayed_open": True,
            # Amazon's standard strategy pauses for at most 20 s, and gives up early: all requests of a
            # process share one budget for retries, which a few concurrent requests use up within seconds.
            "retry_strategy": fs.AwsDefaultS3RetryStrategy(max_attempts=_ATTEMPTS),
        }
        if self.url:
            scheme, _, host = self.url.rpartition("://")
            options |= {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"}
        if self.key_id:
            options |= {"access_key": self.key_id, "secret_key": self.secret}
            options |= {"session_token": self.token} if self.token else {}
        return fs.S3FileSystem(**options)

    @staticmethod
    def spark_settings() -> dict[str, str]:
        endpoint, region = store_variable(AWS_ENDPOINT), store_variable(AWS_REGION)
        settings = {f"{_HADOOP}.endpoint.region": region} if region else {}
        if endpoint:
            settings |= {f"{_HADOOP}.endpoint": endpoint, f"{_HADOOP}.path.style.access": "true"}
        if os.environ.get(_WEB_IDENTITY):
            settings |= {f"{_HADOOP}.aws.credentials.provider": ",".join(_PROVIDERS)}
        return settings

    def options(self) -> dict[str, str]:
        return said(
            {
                "aws_region": self.region,
                "aws_endpoint": self.url,
                "aws_allow_http": str(self.is_plain).lower() if self.url else "",
                "aws_access_key_id": self.key_id,
                "aws_secret_access_key": self.secret,
                "aws_session_token": self.token,
            }
        )


@lru_cache(maxsize=8)
def _region_of(bucket: str) -> str:
    try:
        return str(retried(lambda: fs.resolve_s3_region(bucket)))
    except OSError as error:
        unknown = f"<Code>NoSuchBucket</Code> {bucket}" if "not found" in str(error) else str(error)
        raise OSError(unknown) from None
