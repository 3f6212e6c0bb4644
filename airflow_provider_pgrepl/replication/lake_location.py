"""Where a lake is, by its name: a directory, or a place in an object store. Pure.

Delta, Arrow and Hadoop have names of their own for the same store: what is kept and passed on is Delta's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_DELTA_SCHEMES = {"s3": "s3", "s3a": "s3"}
_HADOOP_SCHEMES = {"s3": "s3a"}
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(.*)", re.DOTALL)
# deltalake encodes all else where it tells a table's place, and other readers decode it in some places only.
_PATH = re.compile(r"[A-Za-z0-9_.~+=/-]*")
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def parse_uri(lake: str) -> tuple[str, str, str] | None:
    """Scheme, bucket and path of a URI; None for a path of this host."""
    match = _URI.fullmatch(lake)
    return None if match is None else (match[1].lower(), match[2], match[3])


def fault_of_uri(lake: str) -> str:
    """What is wrong with a lake's URI, in words; empty when it can be used."""
    parts = parse_uri(lake)
    if parts is None:
        return "is neither a path nor a URI with a bucket"
    scheme, bucket, path = parts
    if scheme not in _DELTA_SCHEMES:
        return f"{scheme}:// is not supported yet"
    if not _BUCKET.fullmatch(bucket):
        return f"{bucket!r} cannot be the name of a bucket"
    if not path.strip("/"):
        return "names no folder in the bucket"
    if not _PATH.fullmatch(path):
        return "may have ASCII letters, digits and _ . ~ + = - in its path, since all else would be encoded"
    if "//" in path.rstrip("/") or any(part in (".", "..") for part in path.split("/")):
        return "has an empty part, . or .. in its path"
    return ""


def canonical(lake: str) -> str:
    """A store's URI as it is kept: Delta's scheme, no slash at the end."""
    return _named(lake, _DELTA_SCHEMES).rstrip("/") if is_object_store(lake) else lake


def hadoop_uri(uri: str) -> str:
    """The same place as Spark's own readers name it."""
    return _named(uri, _HADOOP_SCHEMES)


def _named(uri: str, schemes: Mapping[str, str]) -> str:
    parts = parse_uri(uri)
    if parts is None:
        return uri
    scheme, bucket, path = parts
    return f"{schemes.get(scheme, scheme)}://{bucket}{path}"


def is_object_store(uri: str) -> bool:
    """Whether what has been written there is durable, and nothing is there before all of it is."""
    return place_in_store(uri) is not None


def place_in_store(uri: str) -> tuple[str, str] | None:
    """Bucket and key of a place in an object store; None of a directory."""
    parts = parse_uri(uri)
    if parts is None or parts[0] == "file":
        return None
    return parts[1], parts[2].strip("/")
