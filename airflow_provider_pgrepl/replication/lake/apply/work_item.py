"""Work items of a batch: the changelog files to merge for one relation. Also the ends of batches, and the
applier's progress."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.state.progress import TableMerges

MARK = 0
"""The relation id of the item that describes the batch itself."""


@dataclass(frozen=True)
class WorkItem:
    """The files with one relation's changes, from the changelog commits after `from_version` up to
    `to_version`.

    The item of the batch itself has the relation id MARK, and the epoch, durable LSN and last commit time as
    of `to_version`. If its `epoch` is 0, the commits of the batch do not record these, and `as_recorded`
    reads them. `wanted_lsn`: the highest LSN past which another process wants the changelog to be durable.
    """

    relation_id: int
    from_version: int
    to_version: int
    paths: tuple[str, ...] = ()
    bytes: int = 0
    epoch: int = 0
    durable_lsn: int = 0
    last_commit_us: int = 0
    wanted_lsn: int = 0

    def as_recorded(self, uri: str) -> WorkItem:
        """Return the batch's own item with the epoch and the durable LSN that the changelog at `uri` has at
        `to_version`.

        If the changelog ends before `to_version`, its newest version is used instead.
        """
        table = reader.open_changelog(uri)
        version = min(self.to_version, int(table.version()))
        if version < table.version():
            table = open_delta(uri, version)
        epoch, durable_lsn = reader.read_epoch_number(table), reader.read_durable_lsn(table)
        return replace(self, to_version=version, epoch=epoch, durable_lsn=durable_lsn)


@dataclass
class ApplierProgress:
    """The progress of the applier.

    `version`: the changelog version that all followed tables have caught up with. `point_version`: the
    changelog version of the newest consistent point, and `applied_lsn` its LSN. `caught_up`: True if all
    tables have every change received so far. `idle_at`, by the clock of the state database: every running
    merge uses table states that were read then or later.

    Counts since the start: `changes`, `batches`, `merges_ended`, their `merge_seconds`, and the
    `merged_bytes` that they wrote. By table path: `merges`, statistics, updated every few seconds;
    `positions`, of the tables that were merged since the start. `wanted_lsn`: the LSN past which another
    process wants the changelog to be durable, 0 for none.
    """

    version: int = -1
    point_version: int = -1
    applied_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    commit_ts: datetime | None = None
    changes: int = 0
    batches: int = 0
    merges_ended: int = 0
    merge_seconds: float = 0.0
    merged_bytes: int = 0
    caught_up: bool = False
    idle_at: datetime | None = None
    merges: dict[str, TableMerges] | None = None
    positions: dict[str, LSN] = field(default_factory=dict)
    wanted_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable

    def described(self) -> str:
        """Return up to which LSN all streaming tables are in the lake, as a clause."""
        if not self.applied_lsn:
            return "nothing was applied since the start"
        return f"the lake is at {self.applied_lsn}"


@dataclass(frozen=True)
class BatchEnd:
    """The end of a batch. Everything committed at or before `lsn` is in the changelog at `version`."""

    version: int
    lsn: LSN
    commit_ts: datetime | None

    @classmethod
    def of(cls, mark: WorkItem) -> BatchEnd:
        """Return the end that the batch's own item describes. Its time is None if the item has no commit
        time."""
        last = mark.last_commit_us
        # A position includes the commit at its LSN. The durable LSN is the end of a commit record, so
        # subtract 1.
        return cls(
            mark.to_version,
            LSN(mark.durable_lsn - 1),
            datetime.fromtimestamp(last / 1e6, UTC) if last else None,
        )


class BatchEnds(dict[int, BatchEnd]):
    """Ends of batches by changelog version, in order. Those before the first version that a consistent point
    can still have are dropped."""

    def add(self, end: BatchEnd) -> None:
        """Add the newest end. If it has no commit time, it gets that of the end before it."""
        if end.commit_ts is None and self:
            end = BatchEnd(end.version, end.lsn, next(reversed(self.values())).commit_ts)
        self[end.version] = end

    def forget_before(self, version: int) -> None:
        """Drop the ends before `version`."""
        for before in [known for known in self if known < version]:
            del self[before]
