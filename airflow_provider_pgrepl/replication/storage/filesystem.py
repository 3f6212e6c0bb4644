"""Where lake files are written: one native Arrow filesystem for local paths and object stores alike."""

from __future__ import annotations

import pyarrow as pa
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.storage.durable import local_path

# Hadoop's names of schemes that Arrow knows under another one.
_SCHEMES = {"s3a": "s3", "s3n": "s3", "gs": "gs", "abfss": "abfss"}


def open_storage(root: str) -> tuple[fs.FileSystem, str]:
    """The filesystem of a lake, or of a place below one, and the path in it. Raises LakeError."""
    local = local_path(root)
    if local is not None:
        return fs.LocalFileSystem(), str(local)
    scheme, _, rest = root.partition("://")
    uri = f"{_SCHEMES.get(scheme, scheme)}://{rest}"
    try:
        filesystem, path = fs.FileSystem.from_uri(uri)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise LakeError(
            f"the lake {root} cannot be opened: {error.__class__.__name__}", "give a directory or a URI"
        ) from error
    return filesystem, path.rstrip("/")


def make_folder(uri: str) -> None:
    """Have the folder of a table that is to be made: deltalake takes one that it cannot make for one that is
    not there. Raises OSError."""
    local = local_path(uri)
    if local is not None:
        local.mkdir(parents=True, exist_ok=True)
