"""What the changelog takes in the lake, since when it goes back, and what the slowest table needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.changelog.layout import PARTITION, start_of_hour
from airflow_provider_pgrepl.replication.postgres.lsn import LSN


@dataclass(frozen=True)
class ChangelogStatus:
    """`bytes` of `files` that hold changes, as they lie in the storage; `since`: the oldest hour of them.
    `slowest`: the table whose position is the lowest, None without one, and the bytes of files it needs."""

    files: int
    bytes: int
    since: datetime | None = None
    slowest: str | None = None
    needed_bytes: int = 0


def changelog_status(changelog: DeltaTable, epoch: int, positions: Mapping[str, LSN]) -> ChangelogStatus:
    """`positions`: by table up to where it is whole, in this epoch."""
    files = pa.table(changelog.get_add_actions(flatten=True))
    if files.num_rows == 0:
        return ChangelogStatus(0, 0)
    slowest = min(positions, key=lambda table: positions[table], default=None)
    needed = 0
    if slowest is not None:
        above = pc.and_(
            pc.equal(files["min.epoch"], epoch), pc.greater(files["max.commit_lsn"], positions[slowest])
        )
        needed = pc.sum(files.filter(above)["size_bytes"]).as_py() or 0
    since = start_of_hour(pc.min(files[f"partition.{PARTITION}"]).as_py())
    return ChangelogStatus(files.num_rows, pc.sum(files["size_bytes"]).as_py(), since, slowest, needed)
