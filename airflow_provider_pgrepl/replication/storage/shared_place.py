"""SharedPlace: a lake as one host sees it, to be looked at by the others that write into it."""

from __future__ import annotations

import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.storage.durable import local_path
from airflow_provider_pgrepl.replication.storage.probe import check_store

_HINT = (
    "mount one directory under this path on all hosts, which their users may write, or keep the lake in an"
    " object store"
)


@dataclass(frozen=True)
class SharedPlace:
    """While it is entered, a directory holds a file by which others know it; a store needs none."""

    lake_root: str
    name: str = field(default_factory=lambda: f"_pgrepl_probe_{uuid.uuid4().hex}")

    def __enter__(self) -> Self:
        folder = local_path(self.lake_root)
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / self.name).touch()
            except OSError as error:
                raise _unwritable(folder, error) from None
        return self

    def __exit__(self, *_: object) -> None:
        folder = local_path(self.lake_root)
        if folder is not None:
            (folder / self.name).unlink(missing_ok=True)

    def check(self) -> None:
        """On any host: that it is the same place, which may be written. Raises LakeError."""
        folder = local_path(self.lake_root)
        if folder is None:
            check_store(self.lake_root)
            return
        try:
            if not (folder / self.name).exists():
                raise LakeError(f"{folder} is not the directory that the driver has there", _HINT)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> LakeError:
    return LakeError(f"{folder} cannot be written: {error.strerror}", _HINT)
