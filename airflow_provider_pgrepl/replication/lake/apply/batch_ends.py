"""BatchEnds: what was durable where batches ended, by the changelog's version there."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from airflow_provider_pgrepl.replication.lake.apply.work_item import WorkItem
from airflow_provider_pgrepl.replication.postgres.lsn import LSN


@dataclass(frozen=True)
class BatchEnd:
    """The end of a batch. All that committed at or before `lsn` is in the changelog up to `version`."""

    version: int
    lsn: LSN
    commit_ts: datetime | None

    @classmethod
    def of(cls, mark: WorkItem) -> BatchEnd:
        """The one that a batch's own item tells of."""
        last = mark.last_commit_us
        # A position says that what committed at or before it is in; the durable LSN is where a commit ended.
        return cls(
            mark.to_version,
            LSN(mark.durable_lsn - 1),
            datetime.fromtimestamp(last / 1e6, UTC) if last else None,
        )


class BatchEnds(dict[int, BatchEnd]):
    """By changelog version, in order; those that no consistent point can be made of any more are dropped."""

    def add(self, end: BatchEnd) -> None:
        """The newest. One without a commit is as old as the one before it."""
        if end.commit_ts is None and self:
            end = BatchEnd(end.version, end.lsn, next(reversed(self.values())).commit_ts)
        self[end.version] = end

    def forget_before(self, version: int) -> None:
        """Keep those from a version on."""
        for before in [known for known in self if known < version]:
            del self[before]
