"""A store that speaks S3, as the three libraries that read and write a lake want it opened."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any

from obstore.store import S3Store
from pyarrow import fs

from airflow_provider_pgrepl.replication.lake_location import place_in_store
from airflow_provider_pgrepl.replication.store_variables import (
    ENDPOINT,
    KEY_ID,
    REGION,
    SECRET,
    TOKEN,
    store_variable,
)

_DEFAULT_REGION = "us-east-1"
_PATIENCE = timedelta(minutes=3)
_ATTEMPTS = 15


@dataclass(frozen=True)
class Access:
    """A bucket, and how it is reached. `url`: empty for Amazon's own. Without keys: by the role there is."""

    bucket: str
    url: str
    region: str
    key_id: str = field(repr=False)
    secret: str = field(repr=False)
    token: str = field(repr=False)

    @property
    def is_plain(self) -> bool:
        """Whether without TLS."""
        return self.url.lower().startswith("http://")

    @classmethod
    def of(cls, bucket: str) -> Access:
        """Raises OSError where no region is named, and Amazon knows no such bucket."""
        url = store_variable(ENDPOINT)
        region = store_variable(REGION) or (_DEFAULT_REGION if url else _region_of(bucket))
        return cls(bucket, url, region, *(store_variable(name) for name in (KEY_ID, SECRET, TOKEN)))


@lru_cache(maxsize=8)
def _region_of(bucket: str) -> str:
    try:
        return str(fs.resolve_s3_region(bucket))
    except OSError as error:
        unknown = f"<Code>NoSuchBucket</Code> {bucket}" if "not found" in str(error) else str(error)
        raise OSError(unknown) from None


def open_bucket(bucket: str) -> fs.FileSystem:
    """Arrow's filesystem, in which `bucket` is a folder. Raises OSError."""
    return _filesystem(Access.of(bucket))


@lru_cache(maxsize=8)
def _filesystem(access: Access) -> fs.FileSystem:
    # A small file is one request when it is opened late, otherwise three.
    options: dict[str, Any] = {
        "region": access.region,
        "allow_delayed_open": True,
        # It waits up to 20 s before each after the first few: some minutes in all.
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
    }
    if access.url:
        scheme, _, host = access.url.rpartition("://")
        options |= {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"}
    if access.key_id:
        options |= {"access_key": access.key_id, "secret_key": access.secret}
        options |= {"session_token": access.token} if access.token else {}
    return fs.S3FileSystem(**options)


def open_store(bucket: str, patience: timedelta = _PATIENCE) -> S3Store:
    """For a put on condition, which Arrow does not know. Its connections are kept. Raises OSError.

    `patience`: for how long what the store does not answer, or has no time for, is asked again.
    """
    return _store(Access.of(bucket), patience)


@lru_cache(maxsize=8)
def _store(access: Access, patience: timedelta) -> S3Store:
    options = {name.removeprefix("aws_"): value for name, value in _options(access).items()}
    options.pop("allow_http", None)
    config: Any = options
    return S3Store(
        access.bucket,
        config=config,
        client_options={"allow_http": access.is_plain},
        retry_config={"retry_timeout": patience},
    )


def store_options(uri: str) -> dict[str, str]:
    """What deltalake is to be told of the store of a place; nothing of a directory. Raises OSError."""
    place = place_in_store(uri)
    return {} if place is None else _options(Access.of(place[0]))


def _options(access: Access) -> dict[str, str]:
    options = {
        "aws_region": access.region,
        "aws_endpoint": access.url,
        "aws_allow_http": str(access.is_plain).lower() if access.url else "",
        "aws_access_key_id": access.key_id,
        "aws_secret_access_key": access.secret,
        "aws_session_token": access.token,
    }
    return {name: value for name, value in options.items() if value}
