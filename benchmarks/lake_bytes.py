"""Bytes of the lake: written, stored, live, and those of the changes that they are written for."""

from __future__ import annotations

from pathlib import Path

from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.lake.delta.live_files import live_files
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from benchmarks.visibility import read_log
from benchmarks.watcher import Watcher


class WrittenBytes(Watcher):
    """Of all that ever lay in a folder, what is gone again included."""

    def __init__(self, folder: Path) -> None:
        super().__init__(every_s=10.0)  # maintenance deletes nothing that is younger
        self._folder = folder
        self._sizes: dict[Path, int] = {}

    def total(self) -> int:
        """Until now."""
        self.look()
        return sum(self._sizes.values())

    def _look(self) -> None:
        self._sizes.update(_sizes(self._folder))


def stored_bytes(folder: Path) -> int:
    """All that lies there: files of old versions, the log, what nothing names."""
    return sum(_sizes(folder).values())


def live_bytes(folder: Path) -> int:
    """What the newest version of a Delta table consists of: data files, and those of deletion vectors."""
    files = live_files(DeltaTable(str(folder))).values()
    vectors = {file.vector.path for file in files if file.vector and file.vector.path}
    return sum(file.size for file in files) + sum((folder / path).stat().st_size for path in vectors)


def change_bytes(pipeline: Pipeline, begin: float, end: float) -> int:
    """The values of the changes that were received between two moments, uncompressed.

    The changelog's files have theirs in their names. Such as only join others hold no changes of their own.
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
        except FileNotFoundError:  # deleted meanwhile
            continue
    return found
