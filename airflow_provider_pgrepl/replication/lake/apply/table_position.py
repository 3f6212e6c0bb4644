"""The LSN up to which a lake table is complete, from its own position and from consistent points.

A consistent point can show that an unchanged table is complete up to a later LSN than its own position. That
holds only while the table has what the point names. A folder that was restored from a copy or lost its newest
commits does not.
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
    """The position of a lake table.

    `own`: the position that the table stores. Every change up to `whole` is in the table. `version`: the
    newest version of the table. `known`: a version that this pipeline is known to have written, or None.
    `seen`: the later position at which a consistent point recorded the table if it was reverted since,
    otherwise None.
    """

    own: LSN
    whole: LSN
    version: int
    known: int | None = None
    seen: LSN | None = None

    def problem(self, copied: LSN, floor: LSN, durable: LSN) -> PgReplError | None:
        """Return the error if the table cannot continue from the changelog, otherwise None.

        `copied`: the position of the table's last copy. The changelog has changes above `floor` and up to
        `durable`.
        """
        text = ""
        if self.own < copied:
            text = f"the lake table is at {self.own}, before its last copy at {copied}: it was reverted"
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
    """Return the position of a table, or None if this epoch never wrote the table. Raises FencedError.

    `point`: the newest consistent point of the epoch that names the table by `key`, None without one.
    """
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
    """Return the position at which the point recorded the table, or None if the table does not have the
    version that the point names."""
    if key in point.positions:
        return LSN(point.positions[key])
    # A point of an earlier version of this package has no positions. Read the position from the version that
    # the point names.
    try:
        found = app_version(open_delta(table.table_uri, point.tables[key]), app)
    except (DeltaError, OSError, LakeTableError):
        return None
    return None if found is None or found > point.lsn else LSN(found)
