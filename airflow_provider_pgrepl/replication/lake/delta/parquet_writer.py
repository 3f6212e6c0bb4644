"""Writing of rows to Parquet files of one lake table, which a Delta commit then adds.

A lake table is partitioned by no column, or by this package's partition column, which its data files also
have. Polars reads a partition's value from the file or from a folder's name; all other readers read it from
the log. So the files have the column, and are not in partition folders.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.settings.tables import PARTITION
from airflow_provider_pgrepl.replication.storage import (
    Output,
    delete_files,
    durable,
    make_folders,
    open_storage,
    storage_errors,
)
from airflow_provider_pgrepl.trace import log_unexpected

from .statistics import columns_with_statistics, delta_statistics

log = logging.getLogger(__name__)

FILE_BYTES = 128 << 20
ROW_GROUP_ROWS = 256 << 10
ROW_GROUP_BYTES = 64 << 20
_WRITE_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    # A column with few values keeps its dictionary. One with many drops it before it costs time.
    "dictionary_pagesize_limit": 128 << 10,
    "store_decimal_as_integer": True,
    "store_schema": False,
}
SPLIT_BYTES = 32 << 20
"""Bytes of rows that are split by partition at a time: each split makes a small copy for each partition."""
WAITING_BYTES = 128 << 20
"""Bytes of buffered rows, over all partitions, above which the largest partitions are written."""
MOST_OPEN = 16


@dataclass(frozen=True)
class WrittenFile:
    """A complete Parquet file: its path below the table's folder, and the fields of its `add` action."""

    path: str
    size: int
    rows: int
    stats_json: str
    partition_values: Mapping[str, str | None] = field(default_factory=dict, hash=False)

    def add_action(self, *, changes_data: bool = True) -> AddAction:
        """Return the log's `add` action for the file."""
        return AddAction(
            path=self.path,
            size=self.size,
            partition_values=dict(self.partition_values),
            modification_time=int(time.time() * 1000),
            data_change=changes_data,
            stats=self.stats_json,
        )


class ParquetFiles:
    """A context manager that writes batches to files of about FILE_BYTES in a folder.

    `finish` completes and returns the files. Leaving the block without it deletes all files written.
    `partition_values`: the partition values of all rows. Raises LakeError.
    """

    def __init__(
        self,
        lake_root: str,
        folder: str,
        schema: pa.Schema,
        partition_values: Mapping[str, str | None] | None = None,
    ) -> None:
        self._partition_values = dict(partition_values or {})
        self._place = f"{lake_root}/{folder}"
        self._schema = schema
        self._filesystem, root = open_storage(lake_root)
        self._folder = f"{root}/{folder}"
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._writer: pq.ParquetWriter | None = None
        self._sink: Output | None = None
        self._metadata: list[pq.FileMetaData] = []
        self._names: list[str] = []
        self._written: list[WrittenFile] = []
        self._finished = False

    def __enter__(self) -> ParquetFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            self.discard()

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a batch. Small batches are buffered until they fill a row group, and large ones are split."""
        rows = max(1, min(ROW_GROUP_ROWS, batch.num_rows * ROW_GROUP_BYTES // max(batch.nbytes, 1)))
        for first in range(0, batch.num_rows, rows):
            self._add(batch.slice(first, rows))

    def _add(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        if self._waiting_rows >= ROW_GROUP_ROWS or self._waiting_bytes >= ROW_GROUP_BYTES:
            self._write_row_group()

    @property
    def waiting_bytes(self) -> int:
        """The bytes of the buffered rows."""
        return self._waiting_bytes

    @property
    def is_open(self) -> bool:
        """True if a file has been started and is not complete."""
        return self._writer is not None

    def write_waiting(self) -> None:
        """Write all buffered rows, even if they do not fill a row group."""
        if self._waiting_rows:
            self._write_row_group()

    def finish(self) -> list[WrittenFile]:
        """Write the buffered rows, close the last file, and return all files (empty without rows)."""
        if self._waiting_rows:
            self._write_row_group(is_last=True)
        self.close_file()
        self._finished = True
        return self._written

    def _write_row_group(self, *, is_last: bool = False) -> None:
        table = pa.Table.from_batches(self._waiting, self._schema)
        with storage_errors(self._place):
            writer = self._writer or self._open_file(table.nbytes if is_last else FILE_BYTES)
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
            self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
            if self._sink is not None and self._sink.tell() >= FILE_BYTES:
                self.close_file()

    def _open_file(self, size: int) -> pq.ParquetWriter:
        make_folders(self._filesystem, self._folder)
        self._names.append(f"part-{uuid.uuid4()}.zstd.parquet")
        self._sink = Output(self._filesystem, f"{self._folder}/{self._names[-1]}", size)
        self._writer = pq.ParquetWriter(
            self._sink.stream,
            self._schema,
            metadata_collector=self._metadata,
            write_statistics=columns_with_statistics(self._schema),
            **_WRITE_OPTIONS,
        )
        return self._writer

    def close_file(self) -> None:
        """Complete the open file, if any, and flush it to disk. Later rows are written to a new file."""
        if self._writer is None or self._sink is None:
            return
        with storage_errors(self._place):
            self._writer.close()
            size = self._sink.tell()
            self._sink.close()
            # Flush here, because the process that commits the file may be on another host.
            durable.flush_files(self._place, [self._names[-1]])
        metadata = self._metadata.pop()
        self._written.append(
            WrittenFile(
                self._names[-1],
                size,
                metadata.num_rows,
                delta_statistics(metadata, self._schema),
                self._partition_values,
            )
        )
        self._writer = self._sink = None

    def discard(self) -> None:
        """Delete every file. One that cannot be deleted is named by no commit, so vacuum deletes it later."""
        self._waiting = []
        # Ignore all errors: an unfinished file has no metadata, so closing its writer may fail.
        try:
            if self._writer is not None:
                self._writer.close()
        except Exception as error:  # noqa: BLE001 - see above
            log_unexpected(log, "closing an unfinished file", error, logging.DEBUG)
        try:
            if self._sink is not None:
                self._sink.drop()
        except Exception as error:  # noqa: BLE001 - see above
            log_unexpected(log, "dropping an unfinished file", error, logging.WARNING)
        with suppress(OSError):
            delete_files(self._filesystem, [f"{self._folder}/{name}" for name in self._names])


def delete_uncommitted(lake_root: str, folder: str, files: Iterable[WrittenFile]) -> None:
    """Delete files that this process wrote and that no commit names.

    Files that cannot be deleted are logged, and maintenance deletes them later.
    """
    try:
        filesystem, root = open_storage(lake_root)
        delete_files(filesystem, [f"{root}/{folder}/{file.path}" for file in files])
    except (OSError, PgReplError) as error:
        log.warning("%s: files of a copy that was given up stay until maintenance: %s", folder, error)


class PartitionedFiles:
    """A context manager like ParquetFiles, for batches with rows of any partitions.

    The rows of a partition are buffered until they fill a row group, or until all buffered rows take more
    than WAITING_BYTES. At most MOST_OPEN files are open. Beyond that, the least recently written file is
    completed; later rows of its partition are written to a new file.
    """

    def __init__(self, lake_root: str, folder: str, schema: pa.Schema) -> None:
        self._lake_root, self._folder, self._schema = lake_root, folder, schema
        self._unsplit: list[pa.RecordBatch] = []
        self._unsplit_bytes = 0
        self._files: dict[str | None, ParquetFiles] = {}
        self._open: dict[str | None, ParquetFiles] = {}
        self._finished = False

    def __enter__(self) -> PartitionedFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unsplit = []
        for files in [] if self._finished else self._files.values():
            files.discard()

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a batch, whose partition column holds the partitions of its rows."""
        if self._unsplit_bytes + batch.nbytes > SPLIT_BYTES:
            self._split()
        self._unsplit.append(batch)
        self._unsplit_bytes += batch.nbytes
        if self._unsplit_bytes >= SPLIT_BYTES:
            self._split()

    def finish(self) -> list[WrittenFile]:
        """Write the buffered rows, close the files, and return all of them (empty without rows)."""
        self._split()
        written = [file for files in self._files.values() for file in files.finish()]
        self._finished = True
        return written

    def _split(self) -> None:
        if not self._unsplit:
            return
        rows = pa.Table.from_batches(self._unsplit, self._schema)
        self._unsplit, self._unsplit_bytes = [], 0
        # Combine the chunks once: otherwise `take` would combine them again for each partition.
        for batch in rows.combine_chunks().to_batches():
            for partition, part in _by_partition(batch):
                self._files_of(partition).write(part)
                self._keep_few_open(partition)
        waiting = sum(files.waiting_bytes for files in self._files.values())
        if waiting > WAITING_BYTES:
            self._write_out(waiting)

    def _files_of(self, partition: str | None) -> ParquetFiles:
        if partition not in self._files:
            values = {PARTITION: partition}
            self._files[partition] = ParquetFiles(self._lake_root, self._folder, self._schema, values)
        return self._files[partition]

    def _write_out(self, waiting: int) -> None:
        """Write the buffered rows of the largest partitions, until at most half of WAITING_BYTES is left.

        `waiting`: the bytes of the buffered rows of all partitions.
        """
        for partition, files in sorted(self._files.items(), key=lambda item: -item[1].waiting_bytes):
            if waiting <= WAITING_BYTES // 2:
                break
            waiting -= files.waiting_bytes
            files.write_waiting()
            self._keep_few_open(partition)

    def _keep_few_open(self, partition: str | None) -> None:
        """Complete the least recently written files until at most MOST_OPEN are open.

        `partition`: the partition that was written last.
        """
        files = self._files[partition]
        self._open.pop(partition, None)
        if files.is_open:
            self._open[partition] = files
        while len(self._open) > MOST_OPEN:
            longest_ago = next(iter(self._open))
            self._open.pop(longest_ago).close_file()


def _by_partition(rows: pa.RecordBatch) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    """Yield each partition with its rows, in their order.

    The rows are copied, so that keeping a few of them does not keep the whole batch in memory. A batch of one
    partition is yielded as it is.
    """
    column = rows.column(PARTITION).dictionary_encode(null_encoding="encode")
    codes = column.indices.to_numpy()
    names = column.dictionary.to_pylist()
    if len(names) <= 1:
        yield from ((name, rows) for name in names)
        return
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(names)))
    for name, start, end in zip(names, [0, *ends[:-1]], ends, strict=True):
        yield name, rows.take(pa.array(order[start:end]))


LakeFiles = ParquetFiles | PartitionedFiles


def partition_columns(schema: pa.Schema) -> list[str]:
    """Return the columns by which a table with this schema is partitioned."""
    return [PARTITION] if PARTITION in schema.names else []


def is_partitioned(table: DeltaTable) -> bool:
    """Return True if each file of the table must hold rows of one partition only."""
    return PARTITION in table.metadata().partition_columns


def data_files(lake_root: str, folder: str, schema: pa.Schema) -> LakeFiles:
    """Return a writer of rows with this schema to files in a folder, each of one partition if partitioned."""
    writes = PartitionedFiles if partition_columns(schema) else ParquetFiles
    return writes(lake_root, folder, schema)


def files_beside(uri: str, schema: pa.Schema) -> LakeFiles:
    """Return the same writer for the folder of an existing table at `uri`."""
    above, _, folder = uri.rstrip("/").rpartition("/")
    return data_files(above, folder, schema)
