"""Access to a store with the S3 protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from obstore.store import S3Store
from pyarrow import fs

from airflow_provider_pgrepl.replication.settings.lake import StoreLocation
from airflow_provider_pgrepl.replication.settings.store_variables import (
    ENDPOINT,
    KEY_ID,
    REGION,
    SECRET,
    TOKEN,
    store_variable,
)
from airflow_provider_pgrepl.replication.storage.stores.base import StoreAccess, said

_DEFAULT_REGION = "us-east-1"
_ATTEMPTS = 13
"""Arrow's attempts for a request. It waits 50 ms before the second, and doubles each pause: 3.4 minutes."""


@dataclass(frozen=True)
class AmazonAccess(StoreAccess):
    """Access with keys, or, without keys, with the role of the host."""

    store_class = S3Store
    prefix = "aws_"
    # More attempts than fit into PATIENCE, so that PATIENCE alone limits retries. Google and Azure keep the
    # default: without a key their libraries request one from a host of the cloud, and would retry that as
    # long outside of the cloud.
    attempts = 10_000

    region: str
    key_id: str = field(repr=False)
    secret: str = field(repr=False)
    token: str = field(repr=False)

    @classmethod
    def of(cls, place: StoreLocation) -> AmazonAccess:
        """Read endpoint, region and keys from the environment.

        If neither region nor endpoint is set, Amazon is asked for the bucket's region. Raises OSError if that
        fails.
        """
        url = store_variable(ENDPOINT)
        region = store_variable(REGION) or (_DEFAULT_REGION if url else _region_of(place.bucket))
        return cls(place.bucket, url, region, *(store_variable(name) for name in (KEY_ID, SECRET, TOKEN)))

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
        return str(fs.resolve_s3_region(bucket))
    except OSError as error:
        unknown = f"<Code>NoSuchBucket</Code> {bucket}" if "not found" in str(error) else str(error)
        raise OSError(unknown) from None
