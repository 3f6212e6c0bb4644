"""ConsistentPoint, and the Parquet files that points are kept in."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from airflow_provider_pgrepl.replication.changelog import own_tables
from airflow_provider_pgrepl.replication.changelog.layout import POINTS
from airflow_provider_pgrepl.replication.delta.table import create_delta, open_delta, write_file
from airflow_provider_pgrepl.replication.storage import open_storage, parse_parquet, read_file, storage_errors

_BY_TABLE = pa.map_(pa.string(), pa.int64())
SCHEMA = pa.schema(
    [
        ("epoch", pa.int64()),
        ("lsn", pa.int64()),
        ("commit_ts", pa.timestamp("us", "UTC")),
        ("tables", _BY_TABLE),
        ("positions", _BY_TABLE),
    ]
)
CHECKPOINT_EVERY = 100
_TABLE_PROPERTIES = {
    "delta.checkpointInterval": str(CHECKPOINT_EVERY),
    "delta.enableExpiredLogCleanup": "false",
    # The only one with bounds: readers take any other for one that never matches.
    "delta.dataSkippingStatsColumns": "epoch",
}


@dataclass(frozen=True)
class ConsistentPoint:
    """All that was committed at or before `lsn` of `epoch` is in each of `tables`, at the given version.

    The keys are `str(TableName)`; `commit_ts` is the source's time of the last commit, or of the snapshot's
    export when there was none since. `positions` are the tables' own, as the point saw them: a table that is
    not there any more has gone back, whatever the point says. Points of earlier versions have none.
    """

    epoch: int
    lsn: int
    commit_ts: datetime | None
    tables: dict[str, int]
    positions: dict[str, int] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.lsn


_FIELDS = {known.name for known in fields(ConsistentPoint)}


def create(uri: str) -> DeltaTable:
    """A table without points."""
    create_delta(uri, SCHEMA, _TABLE_PROPERTIES)
    return open_delta(uri)


def upgrade(table: DeltaTable) -> None:
    """Give a table that an earlier version made the columns that it lacks, in a commit without data."""
    held = {one.name for one in table.schema().fields}
    lacking = [one for one in Schema.from_arrow(SCHEMA).fields if one.name not in held]
    if lacking:
        table.alter.add_columns(lacking)


def read_points(uri: str) -> tuple[DeltaTable | None, list[str], list[ConsistentPoint]]:
    """The table, None without one; its files' paths; and all points in their order. Raises LakeError where a
    file is damaged or lost, LakeUnavailableError."""
    table = _open(uri)
    while table is not None:
        try:
            return table, *_read_files(uri, table)
        except FileNotFoundError as error:
            read, table = table, _open(uri)
            # A file that was replaced meanwhile may be deleted.
            if table is not None and table.version() == read.version():
                raise own_tables.damaged(uri, POINTS, f"the file {error} is not there") from None
    return None, [], []


def _open(uri: str) -> DeltaTable | None:
    try:
        return open_delta(uri)
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as error:
        raise own_tables.unreadable(uri, POINTS, error) from None


def _read_files(uri: str, table: DeltaTable) -> tuple[list[str], list[ConsistentPoint]]:
    added = pa.table(table.get_add_actions()).sort_by([("modification_time", "ascending")])
    points: list[tuple[datetime, int, ConsistentPoint]] = []
    paths: list[str] = added["path"].to_pylist()
    for path, written_at in zip(paths, added["modification_time"].to_pylist(), strict=True):
        found = list(map(_point, read_rows(uri, path)))
        versions = sum(found[0].tables.values()) if found else 0
        points.extend((written_at, versions, point) for point in found)
    # Of two at one LSN the later written comes later; of two of one millisecond, that of the later versions.
    # A stable sort: points of one file stay in their order.
    points.sort(key=lambda place: (place[2].order, *place[:2]))
    return paths, [point for _, _, point in points]


def read_rows(uri: str, path: str) -> list[dict[str, Any]]:
    """The rows of one file of points. Raises FileNotFoundError, which says only the path; LakeError where the
    file is damaged; LakeUnavailableError."""
    content = None
    with storage_errors(uri), suppress(FileNotFoundError):
        filesystem, root = open_storage(uri)
        content = read_file(filesystem, f"{root}/{path}")
    if content is None:
        raise FileNotFoundError(path)
    try:
        rows: list[dict[str, Any]] = parse_parquet(content).to_pylist()
    except ValueError:
        raise own_tables.damaged(uri, POINTS, f"the file {path} is damaged") from None
    return rows


def _point(row: dict[str, Any]) -> ConsistentPoint:
    by_table = {name: dict(row.get(name) or ()) for name in ("tables", "positions")}
    return ConsistentPoint(**{**{name: row[name] for name in row.keys() & _FIELDS}, **by_table})


def write_points(uri: str, points: Sequence[ConsistentPoint]) -> AddAction:
    """A file of these points, for a commit to add."""
    by_table = [
        {name: list(getattr(point, name).items()) for name in ("tables", "positions")} for point in points
    ]
    rows = [{**vars(point), **maps} for point, maps in zip(points, by_table, strict=True)]
    first, last = points[0], points[-1]
    bounds = {
        "minValues": {"epoch": first.epoch},
        "maxValues": {"epoch": last.epoch},
        "nullCount": {"epoch": 0, "lsn": 0},
    }
    with storage_errors(uri):
        return write_file(uri, pa.Table.from_pylist(rows, SCHEMA), bounds)
