"""PointWriter: makes a consistent point when all streaming tables have had a version of one moment."""

from __future__ import annotations

import time
from collections.abc import Mapping

from airflow_provider_pgrepl.replication.lake.apply.applier_progress import ApplierProgress
from airflow_provider_pgrepl.replication.lake.apply.caught_up_tables import versions_of
from airflow_provider_pgrepl.replication.lake.apply.schedule import BEFORE_ALL, TableSchedule
from airflow_provider_pgrepl.replication.lake.consistent_points import Points
from airflow_provider_pgrepl.replication.lake.point_files import ConsistentPoint
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.state.table_state import TableState
from airflow_provider_pgrepl.replication.state.tables import TableRecord


class PointWriter:
    """Of one run of the applier."""

    def __init__(
        self,
        points: Points,
        epoch: Epoch,
        schedule: TableSchedule,
        progress: ApplierProgress,
        every_s: float,
    ) -> None:
        self._points = points
        self._epoch = epoch
        self._schedule = schedule
        self._progress = progress
        self._every_s = every_s
        self._version = BEFORE_ALL
        self._named: frozenset[int] = frozenset()
        self._next_boundary = time.monotonic() + every_s

    def write(self, records: Mapping[int, TableRecord]) -> None:
        """Append the newest point that can be made of these tables, if it is newer than the last. Raises what
        `Points.append` does."""
        schedule = self._schedule
        if schedule.newest < self._version:
            self._version = BEFORE_ALL
        needed = [oid for oid, record in records.items() if record.state is TableState.STREAMING]
        version = schedule.common(needed)
        if version is not None and (version > self._version or self._lacks(records, version)):
            self._append(records, version)
            self._version = version
            self._next_boundary = time.monotonic() + self._every_s
        schedule.forget_before(self._version, needed)
        self._set_boundary(needed)

    def _lacks(self, records: Mapping[int, TableRecord], version: int) -> bool:
        """Whether the point of this version was made before all tables had caught up, as they have now."""
        is_settled = version == self._version == self._schedule.newest and self._schedule.is_settled(records)
        return is_settled and not self._named >= records.keys()

    def _append(self, records: Mapping[int, TableRecord], version: int) -> None:
        """A point names those with a snapshot not later than it."""
        end = self._schedule.ends[version]
        self._progress.commit_ts = end.commit_ts or self._progress.commit_ts
        named = {
            record.table: known
            for oid, record in records.items()
            if (known := self._schedule.caught_up.at(oid, version)) and known.snapshot <= end.lsn
        }
        latest, order = self._points.latest(), (self._epoch, end.lsn)
        passed = latest is not None and latest.order > order
        if not named or passed or any(known.position > end.lsn for known in named.values()):
            # Tables that were ahead of the batch do not show its moment any more.
            return
        commit_ts = self._progress.commit_ts
        if commit_ts is None and latest is not None and latest.epoch == self._epoch:
            commit_ts = latest.commit_ts
        self._named = frozenset(oid for oid in records if self._schedule.caught_up.at(oid, version))
        positions = {str(table): known.position for table, known in named.items()}
        self._points.append(ConsistentPoint(self._epoch, end.lsn, commit_ts, versions_of(named), positions))
        self._progress.applied_lsn, self._progress.point_version = end.lsn, version

    def rest_s(self, now: float) -> float:
        """How long it is until a boundary is to be set, if no point is made until then."""
        if self._schedule.newest <= self._version:
            return self._every_s
        return max(0.0, self._next_boundary - now)

    def _set_boundary(self, needed: list[int]) -> None:
        """Tables that move at different paces may never meet by themselves."""
        now = time.monotonic()
        if self.rest_s(now) > 0:
            return
        self._next_boundary = now + self._every_s
        if not self._schedule.is_passing(needed, self._version):
            self._schedule.seal()
