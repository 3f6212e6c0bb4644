"""The bytes of a lake: written, stored and live bytes, and the bytes of the applied changes."""

from __future__ import annotations

from pathlib import Path

from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.lake.delta.live_files import live_files
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from benchmarks.visibility import read_log
from benchmarks.watcher import Watcher


class WrittenBytes(Watcher):
    """The bytes of all files that were ever in a folder, including deleted ones."""

    def __init__(self, folder: Path) -> None:
        super().__init__(every_s=10.0)  # maintenance deletes no file that is younger than that
        self._folder = folder
        self._sizes: dict[Path, int] = {}

    def total(self) -> int:
        """Return the bytes written so far."""
        self.look()
        return sum(self._sizes.values())

    def _look(self) -> None:
        self._sizes.update(_sizes(self._folder))


def stored_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder: of all versions, of the log, and unreferenced files."""
    return sum(_sizes(folder).values())


def live_bytes(folder: Path) -> int:
    """Return the bytes of a Delta table's newest version: data files and deletion vector files."""
    files = live_files(DeltaTable(str(folder))).values()
    vectors = {file.vector.path for file in files if file.vector and file.vector.path}
    return sum(file.size for file in files) + sum((folder / path).stat().st_size for path in vectors)


def change_bytes(pipeline: Pipeline, begin: float, end: float) -> int:
    """Return the uncompressed bytes of the values of the changes received in a period.

    The names of changelog files have these bytes. Compacted files are left out: they have no new changes.
    """
    added = [
        action["add"]
        for at, actions in read_log(changelog_uri(pipeline.lake_root))
        for action in actions
        if begin <= at < end and "add" in action
    ]
    return sum(_value_bytes(add["path"]) for add in added if add["dataChange"])


def _value_bytes(path: str) -> int:
    return int(path.rpartition("-")[2].removesuffix(".parquet"))


def _sizes(folder: Path) -> dict[Path, int]:
    found = {}
    for file in folder.rglob("*"):
        try:
            if file.is_file():
                found[file] = file.stat().st_size
        except FileNotFoundError:  # the file was deleted after it was listed
            continue
    return found
