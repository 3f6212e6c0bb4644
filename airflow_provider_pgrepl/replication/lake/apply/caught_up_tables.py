"""CaughtUpTables: what the applier knows of tables that have caught up; it only saves looking.

Tables are merged each at its own pace. What is to be seen of all of them at one moment, each must have had a
version for; so the versions of a table are kept until a consistent point has passed them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from airflow_provider_pgrepl.replication.lake.history.place import history_key
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName


@dataclass(frozen=True)
class CaughtUpTable:
    """Of a table: taken at which snapshot; caught up with the changelog from version `since`, at which it was
    merged, up to `through`, without a change in between; at which own version and position; its history, if
    it keeps one, at which version; `fingerprint` of the commits by which it got there."""

    snapshot: LSN
    since: int
    through: int
    version: int
    position: int
    history_version: int | None
    fingerprint: str


class CaughtUpTables(dict[int, CaughtUpTable]):
    """The newest of each table, by relation id."""

    def __init__(self) -> None:
        super().__init__()
        self._earlier: dict[int, list[CaughtUpTable]] = {}
        self._next_look = 0.0

    def forget(self, oid: int) -> None:
        """Nothing is known of a table any more."""
        self.pop(oid, None)
        self._earlier.pop(oid, None)

    def forget_others(self, snapshots: Mapping[int, LSN]) -> list[int]:
        """Keep what is known of these tables, each as of this snapshot; which are forgotten."""
        others = [oid for oid, known in self.items() if snapshots.get(oid) != known.snapshot]
        for oid in others:
            self.forget(oid)
        return others

    def add(self, oid: int, caught_up: CaughtUpTable) -> None:
        """A table was merged."""
        if (before := self.get(oid)) is not None:
            self._earlier.setdefault(oid, []).append(before)
        self[oid] = caught_up

    def extend(self, oid: int, through: int) -> None:
        """Up to there the table had no change."""
        if (known := self.get(oid)) is not None and known.through < through:
            self[oid] = replace(known, through=through)

    def at(self, oid: int, version: int) -> CaughtUpTable | None:
        """What a table was at a version of the changelog; None when it never was just that."""
        return next((known for known in self._versions(oid) if known.since <= version <= known.through), None)

    def common(self, oids: Collection[int], newest: int) -> int | None:
        """The newest version of the changelog, up to `newest`, with which each of these tables has caught up
        just so; None when there is none."""
        version, is_common = newest, False
        while not is_common:
            is_common = True
            for oid in oids:
                reached = (min(known.through, version) for known in self._versions(oid, version))
                nearest = next(reached, None)
                if nearest is None:
                    return None
                is_common = is_common and nearest == version
                version = nearest
        return version

    def forget_before(self, version: int, spans: Collection[tuple[int, int]] | None = None) -> None:
        """No consistent point of before this version is to come any more; nor, of what is earlier than the
        newest of each table, one outside of these spans of versions, if any are given."""
        for oid, earlier in list(self._earlier.items()):
            self._earlier[oid] = [
                known
                for known in earlier
                if known.through >= version
                and (
                    spans is None
                    or any(known.since <= last and first <= known.through for first, last in spans)
                )
            ]
            if not self._earlier[oid]:
                del self._earlier[oid]

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
                self.forget(oid)
                yield oid

    def _versions(self, oid: int, begun_at: int | None = None) -> Iterator[CaughtUpTable]:
        """Newest first; with `begun_at`, those that had begun at that version."""
        known = self.get(oid)
        if known is None:
            return
        for one in (known, *reversed(self._earlier.get(oid, ()))):
            if begun_at is None or one.since <= begun_at:
                yield one


def versions_of(tables: Mapping[TableName, CaughtUpTable]) -> dict[str, int]:
    """The versions of tables, and of their histories, as a consistent point names them."""
    versions = {str(table): known.version for table, known in tables.items()}
    histories = {
        history_key(table): known.history_version
        for table, known in tables.items()
        if known.history_version is not None
    }
    return versions | histories
