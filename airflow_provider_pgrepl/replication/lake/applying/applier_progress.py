"""How far the applier has got."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from airflow_provider_pgrepl.replication.lsn import LSN


@dataclass
class ApplierProgress:
    """`version`: the changelog version up to which all streaming tables are; `applied_lsn` likewise.

    `caught_up`: whether the last batch left none of them lagging; what is left comes with the next one.
    `idle_at`: when the last batch began, by the clock of the state database: no earlier one was running then.
    """

    version: int = -1
    applied_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    commit_ts: datetime | None = None
    changes: int = 0
    batches: int = 0
    caught_up: bool = False
    idle_at: datetime | None = None
