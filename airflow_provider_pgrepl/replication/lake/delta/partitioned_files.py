"""Rows of a partitioned table into Parquet files of one partition each; memory and open files are bounded."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import ParquetFiles, WrittenFile
from airflow_provider_pgrepl.replication.settings.partition_by import PARTITION

SPLIT_BYTES = 32 << 20
"""So much is told apart at once: with thousands of partitions each time costs as many small copies."""
WAITING_BYTES = 128 << 20
"""So much waits, over all partitions, before the largest is written out."""
MOST_OPEN = 16


class PartitionedFiles:
    """As ParquetFiles, whose batches may be of any partitions; a context manager.

    Of each partition rows wait until they fill a row group, or until all that waits is too much. Of more
    files than may be open at once, those are closed that were written to longest ago, and what comes of
    their partitions later begins others.
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
        """Take a batch, whose partitions stand in it."""
        if self._unsplit_bytes + batch.nbytes > SPLIT_BYTES:
            self._split()
        self._unsplit.append(batch)
        self._unsplit_bytes += batch.nbytes
        if self._unsplit_bytes >= SPLIT_BYTES:
            self._split()

    def finish(self) -> list[WrittenFile]:
        """Write what waits, close the files, and list all of them (none when there were no rows)."""
        self._split()
        written = [file for files in self._files.values() for file in files.finish()]
        self._finished = True
        return written

    def _split(self) -> None:
        if not self._unsplit:
            return
        rows = pa.Table.from_batches(self._unsplit, self._schema)
        self._unsplit, self._unsplit_bytes = [], 0
        # One chunk: each piece that is taken of several would put all of them together.
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
        """The largest first, until half of what may wait is left."""
        for partition, files in sorted(self._files.items(), key=lambda item: -item[1].waiting_bytes):
            if waiting <= WAITING_BYTES // 2:
                break
            waiting -= files.waiting_bytes
            files.write_waiting()
            self._keep_few_open(partition)

    def _keep_few_open(self, partition: str | None) -> None:
        """`partition`: the one that was written to last."""
        files = self._files[partition]
        self._open.pop(partition, None)
        if files.is_open:
            self._open[partition] = files
        while len(self._open) > MOST_OPEN:
            longest_ago = next(iter(self._open))
            self._open.pop(longest_ago).close_file()


def _by_partition(rows: pa.RecordBatch) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    """The rows of each partition, in their order. They are copied: of what is kept of few rows nothing else
    may be held in memory."""
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
