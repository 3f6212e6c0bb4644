"""WorkItem: what a batch has to do for one relation; where batches end, and how far the applier is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.state.progress import TableMerges

MARK = 0
"""The relation id of the item that stands for the batch itself."""


@dataclass(frozen=True)
class WorkItem:
    """A relation's share of the commits after `from_version` up to `to_version`.

    The batch's own item has relation MARK and says what is durable as of `to_version`; with epoch 0 its
    commits do not say it, and the changelog has to be asked (`as_recorded`).
    """

    relation_id: int
    from_version: int
    to_version: int
    paths: tuple[str, ...] = ()
    bytes: int = 0
    epoch: int = 0
    durable_lsn: int = 0
    last_commit_us: int = 0

    def as_recorded(self, uri: str) -> WorkItem:
        """The batch's own item, with what the changelog itself says of its `to_version`."""
        table = reader.open_changelog(uri)
        version = min(self.to_version, int(table.version()))
        if version < table.version():
            table = open_delta(uri, version)
        epoch, durable_lsn = reader.read_epoch_number(table), reader.read_durable_lsn(table)
        return replace(self, to_version=version, epoch=epoch, durable_lsn=durable_lsn)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkItem:
        fields = json.loads(text)
        return cls(**{**fields, "paths": tuple(fields["paths"])})


@dataclass
class ApplierProgress:
    """`version`: the changelog version up to which all streaming tables are; `applied_lsn` likewise.

    `point_version`: that at which the newest consistent point was made. `caught_up`: whether all tables have
    what has come. `idle_at`, by the clock of the state database: no merge that runs goes by older states.
    `merges`: of tables that were merged, by their paths, made anew every few seconds.
    """

    version: int = -1
    point_version: int = -1
    applied_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    commit_ts: datetime | None = None
    changes: int = 0
    batches: int = 0
    caught_up: bool = False
    idle_at: datetime | None = None
    merges: dict[str, TableMerges] | None = None

    def described(self) -> str:
        """Return up to which LSN all streaming tables are in the lake, as a clause."""
        if not self.applied_lsn:
            return "nothing was applied since the start"
        return f"the lake is at {self.applied_lsn}"


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
