"""TablePosition: up to where a lake table is whole, by its own word and that of the consistent points.

A point says of a table that was not changed that it is whole up to a later LSN than its own position. That
holds only as long as the table has what the point saw: a folder that was put back, or lost its newest
commits, has not.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from airflow_provider_pgrepl.errors import ChangelogError, LakeChangedError, LakeTableError, PgReplError
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.table import read_position
from airflow_provider_pgrepl.replication.postgres.lsn import LSN


@dataclass(frozen=True)
class TablePosition:
    """`own`: the table's position. All up to `whole` is in it. `known`: a version that is known to be ours.

    `seen`: the position at which a consistent point saw it, if that is beyond its own: it has gone back.
    `version`: its newest.
    """

    own: LSN
    whole: LSN
    version: int
    known: int | None = None
    seen: LSN | None = None

    def problem(self, copied: LSN, floor: LSN, durable: LSN) -> PgReplError | None:
        """Why the table, whose last copy was at `copied`, cannot go on with a changelog that holds changes
        above `floor` and up to `durable`."""
        text = ""
        if self.own < copied:
            text = f"the lake table is at {self.own}, older than its last copy, at {copied}: it was put back"
        elif self.own > max(durable, copied):
            text = f"the lake table is at {self.own}, but the changelog goes up to {durable} only"
        elif self.whole > max(durable, copied):
            text = (
                f"by a consistent point in _pgrepl/consistent_points the table is whole up to {self.whole},"
                f" but the changelog goes up to {durable} only: are the points those of this lake?"
            )
        if text:
            return LakeChangedError(text)
        if self.whole >= floor:
            return None
        text = f"the table is at {self.whole}, but the changelog holds changes above {floor} only"
        return ChangelogError(text)


def read_table_position(
    table: DeltaTable, app: str, key: str, point: ConsistentPoint | None
) -> TablePosition | None:
    """What is true of a table that `point`, of the app's epoch, names by `key`; None when the epoch never
    wrote it. Raises FencedError."""
    own, version = read_position(table, app), int(table.version())
    if own is None:
        return None
    if point is None:
        return TablePosition(own, own, version)
    named, seen = point.tables.get(key), _seen(point, key, table, app)
    if seen is None or own < seen:
        return TablePosition(own, own, version, seen=LSN(own + 1) if seen is None else seen)
    known = named if named is not None and named <= version else None
    return TablePosition(own, max(own, LSN(point.lsn)), version, known)


def _seen(point: ConsistentPoint, key: str, table: DeltaTable, app: str) -> LSN | None:
    """The table's position as the point saw it; None when nothing in the table agrees with the point."""
    if key in point.positions:
        return LSN(point.positions[key])
    # A point of before positions were recorded: the version that it names says it, if it is the same still.
    try:
        found = app_version(open_delta(table.table_uri, point.tables[key]), app)
    except (DeltaError, OSError, LakeTableError):
        return None
    return None if found is None or found > point.lsn else LSN(found)
