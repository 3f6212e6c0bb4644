"""How far the applier has got."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.state.progress import TableMerges


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
