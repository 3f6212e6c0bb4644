"""Where a lake is, by its name: a directory, or a place in an object store. Pure.

Delta, Arrow and Hadoop have names of their own for the same store: what is kept and passed on is Delta's.
"""

from __future__ import annotations

import re
from typing import NamedTuple

S3, GOOGLE, AZURE = "s3", "gs", "abfss"
_DELTA_SCHEMES = {"s3": S3, "s3a": S3, "gs": GOOGLE, "abfss": AZURE, "abfs": AZURE}
SCHEMES = frozenset(_DELTA_SCHEMES.values())
_HADOOP_SCHEMES = {S3: "s3a"}
EXAMPLES = (
    "s3://bucket/path, gs://bucket/path, abfss://container@account.dfs.core.windows.net/path, or a directory"
    " of this host or of a file system that all hosts share"
)
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(.*)", re.DOTALL)
# deltalake encodes all else where it tells a table's place, and other readers decode it in some places only.
_PATH = re.compile(r"[A-Za-z0-9_.~+=/-]*")
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html;
# https://cloud.google.com/storage/docs/buckets#naming: _, too, and 222 characters where it is a domain.
_BUCKETS = {
    S3: re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"),
    GOOGLE: re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"),
}
# https://learn.microsoft.com/azure/storage/blobs/data-lake-storage-introduction-abfs-uri. Its other clouds
# (as of China) deltalake takes for no store.
_AZURE_HOST = re.compile(r"([a-z0-9][a-z0-9-]{1,61}[a-z0-9])@([a-z0-9]{3,24})\.dfs\.core\.windows\.net")


class Place(NamedTuple):
    """A place in an object store. `bucket`: Azure calls it a container, which is in an `account`."""

    scheme: str
    bucket: str
    key: str
    account: str = ""


def parse_uri(lake: str) -> tuple[str, str, str] | None:
    """Scheme, host and path of a URI; None for a path of this host."""
    match = _URI.fullmatch(lake)
    return None if match is None else (match[1].lower(), match[2], match[3])


def fault_of_uri(lake: str) -> str:
    """What is wrong with a lake's URI, in words; empty when it can be used."""
    parts = parse_uri(lake)
    if parts is None:
        return "is neither a path nor a URI with a bucket"
    scheme, host, path = parts
    if scheme not in _DELTA_SCHEMES:
        return f"{scheme}:// is not supported"
    if fault := _fault_of_host(_DELTA_SCHEMES[scheme], host):
        return fault
    if not path.strip("/"):
        return "names no folder in the bucket"
    if not _PATH.fullmatch(path):
        return "may have ASCII letters, digits and _ . ~ + = - in its path, since all else would be encoded"
    if "//" in path.rstrip("/") or any(part in (".", "..") for part in path.split("/")):
        return "has an empty part, . or .. in its path"
    return ""


def _fault_of_host(scheme: str, host: str) -> str:
    if scheme == AZURE:
        return (
            "" if _AZURE_HOST.fullmatch(host) else f"{host!r} is not container@account.dfs.core.windows.net"
        )
    return "" if _BUCKETS[scheme].fullmatch(host) else f"{host!r} cannot be the name of a bucket"


def canonical(lake: str) -> str:
    """A store's URI as it is kept: Delta's scheme, no slash at the end."""
    parts = parse_uri(lake)
    if parts is None or not is_object_store(lake):
        return lake
    scheme, host, path = parts
    return f"{_DELTA_SCHEMES.get(scheme, scheme)}://{host}{path}".rstrip("/")


def hadoop_uri(uri: str) -> str:
    """The same place as Spark's own readers name it."""
    parts = parse_uri(uri)
    if parts is None:
        return uri
    scheme, host, path = parts
    return f"{_HADOOP_SCHEMES.get(scheme, scheme)}://{host}{path}"


def is_object_store(uri: str) -> bool:
    """Whether what has been written there is durable, and nothing is there before all of it is."""
    return place_in_store(uri) is not None


def place_in_store(uri: str) -> Place | None:
    """A place in an object store; None of a directory."""
    parts = parse_uri(uri)
    if parts is None or parts[0] == "file":
        return None
    scheme, host, path = parts
    bucket, _, domain = host.partition("@")
    return Place(_DELTA_SCHEMES.get(scheme, scheme), bucket, path.strip("/"), domain.partition(".")[0])
