"""CaughtUpTables: what the applier knows of tables that have caught up; it only saves looking."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from airflow_provider_pgrepl.replication.lake.history.place import history_key
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.names import TableName


@dataclass(frozen=True)
class CaughtUpTable:
    """Of a table: taken at which snapshot, level with which changelog version, at which own version and
    position, its history, if it keeps one, at which version; `stamp` of the commits by which it got there."""

    snapshot: LSN
    through: int
    version: int
    position: int
    history_version: int | None
    stamp: str


class CaughtUpTables(dict[int, CaughtUpTable]):
    """By relation id."""

    def __init__(self) -> None:
        super().__init__()
        self._next_look = 0.0

    def forget_others(self, snapshots: dict[int, LSN]) -> None:
        """Keep what is known of these tables, each as of this snapshot."""
        for oid in [oid for oid, level in self.items() if snapshots.get(oid) != level.snapshot]:
            del self[oid]

    def at(self, version: int) -> dict[int, CaughtUpTable]:
        """Those that are level with a changelog version."""
        return {oid: level for oid, level in list(self.items()) if level.through == version}

    def move(self, oids: Collection[int], from_version: int, to_version: int) -> list[int]:
        """Tables not level with a batch's end. One that was level and had no work is level again."""
        behind = []
        for oid in oids:
            level = self.get(oid)
            if level is not None and level.through == from_version:
                self[oid] = replace(level, through=to_version)
            elif level is None or level.through != to_version:
                behind.append(oid)
        return behind

    def look(
        self, oids: Collection[int], stamp: Callable[[int, CaughtUpTable], str], every_s: float
    ) -> Iterator[int]:
        """From time to time: which of these tables are not as they were left; each is forgotten."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + every_s
        for oid in oids:
            level = self.get(oid)
            if level is not None and stamp(oid, level) != level.stamp:
                del self[oid]
                yield oid


def versions_of(tables: Mapping[TableName, CaughtUpTable]) -> dict[str, int]:
    """The versions of tables, and of their histories, as a consistent point names them."""
    versions = {str(table): known.version for table, known in tables.items()}
    histories = {
        history_key(table): known.history_version
        for table, known in tables.items()
        if known.history_version is not None
    }
    return versions | histories
