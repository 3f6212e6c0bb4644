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
    """Of a table: taken at which snapshot, caught up with which changelog version, at which own version and
    position, its history, if it keeps one, at which version; `fingerprint` of the commits by which it got
    there."""

    snapshot: LSN
    through: int
    version: int
    position: int
    history_version: int | None
    fingerprint: str


class CaughtUpTables(dict[int, CaughtUpTable]):
    """By relation id."""

    def __init__(self) -> None:
        super().__init__()
        self._next_look = 0.0

    def forget_others(self, snapshots: dict[int, LSN]) -> None:
        """Keep what is known of these tables, each as of this snapshot."""
        for oid in [oid for oid, known in self.items() if snapshots.get(oid) != known.snapshot]:
            del self[oid]

    def at(self, version: int) -> dict[int, CaughtUpTable]:
        """Those that have caught up with a changelog version."""
        return {oid: known for oid, known in list(self.items()) if known.through == version}

    def move(self, oids: Collection[int], from_version: int, to_version: int) -> list[int]:
        """Tables that lag behind a batch's end. One that had caught up and had no work still has."""
        lagging = []
        for oid in oids:
            known = self.get(oid)
            if known is not None and known.through == from_version:
                self[oid] = replace(known, through=to_version)
            elif known is None or known.through != to_version:
                lagging.append(oid)
        return lagging

    def look(
        self, oids: Collection[int], fingerprint: Callable[[int, CaughtUpTable], str], every_s: float
    ) -> Iterator[int]:
        """From time to time: which of these tables are not as they were left; each is forgotten."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + every_s
        for oid in oids:
            known = self.get(oid)
            if known is not None and fingerprint(oid, known) != known.fingerprint:
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
