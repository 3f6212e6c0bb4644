"""Parts: changelog files that are written before a commit makes them count."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from airflow_provider_pgrepl.replication.changelog.layout import PARTITION, ROW_SCHEMA, hour_of
from airflow_provider_pgrepl.replication.storage import (
    Output,
    delete_files,
    durable,
    make_folders,
    open_storage,
)

_ROW_GROUP_ROWS = 65_536
_SMALL_GROUP_ROWS = 1_024
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Part:
    """A written changelog file that no commit holds yet."""

    path: str
    size: int
    value_bytes: int
    rows: int
    stats: str
    relations: frozenset[int]
    hour: str

    def add_action(self, *, changes_data: bool = True) -> AddAction:
        """What a commit says of it; `changes_data`: whether its rows are new."""
        now = int(time.time() * 1000)
        return AddAction(self.path, self.size, {PARTITION: self.hour}, now, changes_data, self.stats)


class PartFolder:
    """Where parts are written, below the changelog's root, in a folder an hour."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._filesystem, self._root = open_storage(uri)
        self._folders: set[str] = set()

    def write(self, rows: pa.Table, hour: str | None = None) -> Part:
        """Write rows (ROW_SCHEMA, in stream order) as one Parquet file, sorted by relation, onto the disk.

        `hour`: in which they were received, as the partition says it; the present one when not given.
        Raises OSError.
        """
        rows, relations, bounds = _sort_by_relation(rows)
        hour = hour or hour_of(datetime.now(UTC))
        # Readers bound their memory by the values' size, which a compressed file does not tell.
        path = f"{hour}/{uuid.uuid4().hex}-{rows.nbytes}.parquet"
        self._make_folder(hour)
        try:
            size = self._write(path, rows, bounds)
        except OSError:
            # What is half written would take up space that may be short.
            with suppress(OSError):
                delete_files(self._filesystem, [f"{self._root}/{path}"])
            raise
        return Part(path, size, rows.nbytes, rows.num_rows, _stats(rows), frozenset(relations), hour)

    def discard(self, parts: Iterable[Part]) -> None:
        """Delete what no commit will hold, as far as the storage lets us."""
        with suppress(OSError):
            delete_files(self._filesystem, [f"{self._root}/{part.path}" for part in parts])

    def _write(self, path: str, rows: pa.Table, bounds: list[int]) -> int:
        """The file's size in bytes."""
        with Output(self._filesystem, f"{self._root}/{path}", rows.nbytes) as file:
            with pq.ParquetWriter(
                file.stream,
                ROW_SCHEMA,
                compression="zstd",
                compression_level=1,
                use_dictionary=["epoch", "relation_id", "relation_version", "op"],
                write_statistics=["epoch", "commit_lsn", "commit_ts", "relation_id", "op"],
            ) as writer:
                for start, stop in _row_groups(bounds):
                    writer.write_table(rows.slice(start, stop - start), row_group_size=_ROW_GROUP_ROWS)
            size = file.tell()
        durable.flush_files(self._uri, [path])
        return size

    def _make_folder(self, hour: str) -> None:
        if hour not in self._folders:
            make_folders(self._filesystem, f"{self._root}/{hour}")
            self._folders.add(hour)


def _sort_by_relation(rows: pa.Table) -> tuple[pa.Table, list[int], list[int]]:
    """Rows by relation, stream order kept within each; the relations, and where each begins."""
    ids = rows["relation_id"].to_numpy()
    order = np.argsort(ids, kind="stable")
    if not np.array_equal(order, np.arange(len(order))):
        rows, ids = rows.take(pa.array(order)), ids[order]
    relations, starts = np.unique(ids, return_index=True)
    return rows, relations.tolist(), [*starts.tolist(), rows.num_rows]


def _row_groups(bounds: list[int]) -> list[tuple[int, int]]:
    """Row groups of one relation each; tiny relations share one, which a reader then filters."""
    groups, start = [], 0
    for index, stop in enumerate(bounds[1:], 1):
        following = bounds[index + 1] - stop if index + 1 < len(bounds) else _SMALL_GROUP_ROWS
        if stop - start >= _SMALL_GROUP_ROWS or following >= _SMALL_GROUP_ROWS:
            groups.append((start, stop))
            start = stop
    return groups


def _stats(rows: pa.Table) -> str:
    ranges: dict[str, Any] = {
        name: pc.min_max(rows[name]).as_py() for name in ("epoch", "commit_lsn", "relation_id")
    }
    least = {name: bounds["min"] for name, bounds in ranges.items()}
    most = {name: bounds["max"] for name, bounds in ranges.items()}
    times = pc.min_max(rows["commit_ts"].cast(pa.int64())).as_py()
    if times["min"] is not None:
        shown = _shown_time(times["min"]), _shown_time(-(-times["max"] // 1000) * 1000)
        if None not in shown:
            least["commit_ts"], most["commit_ts"] = shown
    nulls = {**dict.fromkeys(ranges, 0), "commit_ts": rows["commit_ts"].null_count}
    return json.dumps(
        {"numRecords": rows.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}
    )


def _shown_time(microseconds: int) -> str | None:
    """Whole milliseconds, which is all that some readers keep; None for a year that none takes."""
    try:
        moment = _EPOCH + timedelta(milliseconds=microseconds // 1000)
    except OverflowError:
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
