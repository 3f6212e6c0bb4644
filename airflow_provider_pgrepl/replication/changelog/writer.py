"""Writing the changelog: parts first, then one commit that makes them count.

Whoever writes holds one table handle and commits under the receiver's app id. A successor's fence, a commit
under the same app id, makes every later commit through an older handle fail: that is what keeps two writers
apart, whatever locks, networks and paused processes do.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction

from airflow_provider_pgrepl.errors import FencedError, LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.changelog.layout import (
    DURABLE_APP,
    EPOCH_APP,
    PARTITION,
    RECEIVER_APP,
    ROW_SCHEMA,
    TABLE_SCHEMA,
    CommitRecord,
    EpochRecord,
)
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog
from airflow_provider_pgrepl.replication.lsn import LSN, Epoch

_ROW_GROUP_ROWS = 65_536
_SMALL_GROUP_ROWS = 1_024
_TABLE_PROPERTIES = {
    # 86,400 commits a day: checkpoints are for opening the table, and each costs a rewrite of the file list.
    "delta.checkpointInterval": "1000",
    "delta.logRetentionDuration": "interval 30 days",
    "delta.enableExpiredLogCleanup": "false",
}


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


def create_changelog(uri: str, record: EpochRecord) -> None:
    """Make the changelog with its first epoch, in one commit. Raises LakeError when it cannot be written."""
    try:
        DeltaTable.create(
            uri,
            schema=Schema.from_arrow(TABLE_SCHEMA),
            partition_by=[PARTITION],
            description=record.to_json(),
            configuration=_TABLE_PROPERTIES,
            commit_properties=_epoch_properties(record, 1),
        )
    except (DeltaError, OSError) as error:
        raise LakeError(
            f"the changelog cannot be created under {uri}: {error.__class__.__name__}",
            "check that the lake path exists, is writable and is not used by something else",
        ) from error


def begin_epoch(uri: str, record: EpochRecord) -> None:
    """Begin a new history in an existing changelog, in one commit that also fences any running receiver."""
    table = DeltaTable(uri)
    sequence = (table.transaction_version(RECEIVER_APP) or 0) + 1
    try:
        table.alter.set_table_description(
            record.to_json(), commit_properties=_epoch_properties(record, sequence)
        )
    except CommitFailedError as error:
        raise FencedError("the changelog was written to while a new epoch began; run it again") from error


def _epoch_properties(record: EpochRecord, sequence: int) -> CommitProperties:
    commit = CommitRecord("epoch", record.epoch, record.consistent_point)
    return _properties(commit, sequence)


def _properties(commit: CommitRecord, sequence: int) -> CommitProperties:
    return CommitProperties(
        custom_metadata=commit.to_metadata(),
        app_transactions=[
            Transaction(RECEIVER_APP, sequence),
            Transaction(EPOCH_APP, commit.epoch),
            Transaction(DURABLE_APP, commit.durable_lsn),
        ],
    )


def mark(uri: str) -> None:
    """Commit nothing, so that the version moves and the applier looks at its tables again."""
    table = DeltaTable(uri)
    commit = CommitRecord(
        "marker",
        Epoch(table.transaction_version(EPOCH_APP) or 0),
        LSN(table.transaction_version(DURABLE_APP) or 0),
    )
    table.create_write_transaction(
        [],
        mode="append",
        schema=table.schema(),
        partition_by=[PARTITION],
        commit_properties=CommitProperties(custom_metadata=commit.to_metadata()),
    )


class ChangelogWriter:
    """The one writer. Opening it commits a fence; after that `durable_lsn` is what the changelog holds.

    Raises ChangelogError when there is no changelog, FencedError when another writer took over,
    LakeUnavailableError when the storage refuses.
    """

    def __init__(self, uri: str) -> None:
        self._table = open_changelog(uri)
        self._filesystem, self._root = pafs.FileSystem.from_uri(uri)
        self.epoch_record = EpochRecord.from_json(self._table.metadata().description)
        self._sequence = self._table.transaction_version(RECEIVER_APP) or 0
        self.durable_lsn = LSN(self._table.transaction_version(DURABLE_APP) or 0)
        self._folders: set[str] = set()
        self._commit([], CommitRecord("fence", self.epoch, self.durable_lsn))

    @property
    def epoch(self) -> Epoch:
        return self.epoch_record.epoch

    @property
    def version(self) -> int:
        """The Delta version of the last commit that this writer knows."""
        version: int = self._table.version()
        return version

    def write_part(self, rows: pa.Table) -> Part:
        """Write rows (ROW_SCHEMA, in stream order) as one Parquet file, sorted by relation.

        Raises LakeUnavailableError.
        """
        try:
            return self._write_part(rows)
        except OSError as error:
            raise _unwritable(error) from error

    def _write_part(self, rows: pa.Table) -> Part:
        rows, relations, bounds = _sort_by_relation(rows)
        hour = datetime.now(UTC).strftime("%Y-%m-%dT%H")
        # Readers bound their memory by the values' size, which a compressed file does not tell.
        path = f"{hour}/{uuid.uuid4().hex}-{rows.nbytes}.parquet"
        self._make_folder(hour)
        with (
            self._filesystem.open_output_stream(f"{self._root}/{path}") as sink,
            pq.ParquetWriter(
                sink,
                ROW_SCHEMA,
                compression="zstd",
                compression_level=1,
                use_dictionary=["epoch", "relation_id", "relation_version", "op"],
                write_statistics=["epoch", "commit_lsn", "relation_id", "op"],
            ) as writer,
        ):
            for start, stop in _row_groups(bounds):
                writer.write_table(rows.slice(start, stop - start), row_group_size=_ROW_GROUP_ROWS)
        size = self._filesystem.get_file_info(f"{self._root}/{path}").size
        return Part(path, size, rows.nbytes, rows.num_rows, _stats(rows), frozenset(relations), hour)

    def append(
        self, parts: Sequence[Part], *, durable_lsn: LSN, first_lsn: LSN, last_lsn: LSN, last_commit_us: int
    ) -> None:
        """Make whole transactions durable: all parts in one commit.

        Raises FencedError or LakeUnavailableError.
        """
        relations = frozenset[int]().union(*(part.relations for part in parts))
        commit = CommitRecord(
            "data",
            self.epoch,
            durable_lsn,
            first_lsn,
            last_lsn,
            last_commit_us,
            tuple(sorted(relations)),
            sum(part.value_bytes for part in parts),
            sum(part.rows for part in parts),
        )
        self._commit([_add_action(part) for part in parts], commit)

    def record_keepalive(self, lsn: LSN) -> None:
        """Record, by a commit without data, that nothing of ours was committed up to `lsn`."""
        self._commit([], CommitRecord("keepalive", self.epoch, lsn))

    def _commit(self, actions: list[AddAction], commit: CommitRecord) -> None:
        self._sequence += 1
        try:
            self._table.create_write_transaction(
                actions,
                mode="append",
                schema=self._table.schema(),
                partition_by=[PARTITION],
                commit_properties=_properties(commit, self._sequence),
            )
            self._table.update_incremental()
        except CommitFailedError as error:
            raise _fenced() from error
        except (DeltaError, OSError) as error:
            raise _unwritable(error) from error
        # The handle now also holds what others committed since; a fence among it must not go unseen.
        if self._table.transaction_version(RECEIVER_APP) != self._sequence:
            raise _fenced()
        self.durable_lsn = commit.durable_lsn

    def _make_folder(self, hour: str) -> None:
        if hour not in self._folders:
            self._filesystem.create_dir(f"{self._root}/{hour}", recursive=True)
            self._folders.add(hour)


def _fenced() -> FencedError:
    return FencedError("another receiver took over the changelog; this one stops")


def _unwritable(error: Exception) -> LakeUnavailableError:
    return LakeUnavailableError(
        f"the changelog cannot be written: {error.__class__.__name__}: {error}", "check the lake's storage"
    )


def _add_action(part: Part) -> AddAction:
    now = int(time.time() * 1000)
    return AddAction(part.path, part.size, {PARTITION: part.hour}, now, True, part.stats)


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
    return json.dumps(
        {
            "numRecords": rows.num_rows,
            "minValues": {name: bounds["min"] for name, bounds in ranges.items()},
            "maxValues": {name: bounds["max"] for name, bounds in ranges.items()},
            "nullCount": dict.fromkeys(ranges, 0),
        }
    )
