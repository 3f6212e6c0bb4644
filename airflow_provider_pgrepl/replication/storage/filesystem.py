"""Where lake files are written: one native Arrow filesystem for local paths and object stores alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError
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


@contextmanager
def storage_errors(place: str) -> Iterator[None]:
    """Turn what a filesystem raises into a LakeError that names the place; only some of it may pass."""
    try:
        yield
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise LakeError(
            f"cannot write under {place}: {error}", "check the rights, and that it is a directory"
        ) from error
    except OSError as error:
        raise LakeUnavailableError(
            f"cannot write under {place}: {error}", "check free space, and that the storage can be reached"
        ) from error
