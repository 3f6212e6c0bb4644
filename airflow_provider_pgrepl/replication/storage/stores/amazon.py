"""A store that speaks S3."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from obstore.store import S3Store
from pyarrow import fs

from airflow_provider_pgrepl.replication.settings.lake import Place
from airflow_provider_pgrepl.replication.settings.store_variables import (
    ENDPOINT,
    KEY_ID,
    REGION,
    SECRET,
    TOKEN,
    store_variable,
)
from airflow_provider_pgrepl.replication.storage.stores.base import Access, said

_DEFAULT_REGION = "us-east-1"
_ATTEMPTS = 13
"""Of Arrow, which waits 50 ms before the second, and twice as long before each that follows: 3.4 minutes."""


@dataclass(frozen=True)
class AmazonAccess(Access):
    """Without keys: by the role there is."""

    store_class = S3Store
    prefix = "aws_"
    # More than fit into PATIENCE, which alone is to decide. Not for Google and Azure: without a key their
    # libraries ask a host of the cloud for one, and would do so for as long where there is none.
    attempts = 10_000

    region: str
    key_id: str = field(repr=False)
    secret: str = field(repr=False)
    token: str = field(repr=False)

    @classmethod
    def of(cls, place: Place) -> AmazonAccess:
        """Raises OSError where no region is named, and Amazon knows no such bucket."""
        url = store_variable(ENDPOINT)
        region = store_variable(REGION) or (_DEFAULT_REGION if url else _region_of(place.bucket))
        return cls(place.bucket, url, region, *(store_variable(name) for name in (KEY_ID, SECRET, TOKEN)))

    def filesystem(self) -> fs.FileSystem:
        # A small file is one request when it is opened late, otherwise three.
        options: dict[str, Any] = {
            "region": self.region,
            "allow_delayed_open": True,
            # Amazon's standard strategy has pauses of 20 s at most, and gives up early: all requests of a
            # process share what it allows to be tried again, which a few at once use up within seconds.
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
