"""Rows into Parquet files of one lake table, which some Delta commit then adds."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.lake.delta.statistics import (
    columns_with_statistics,
    delta_statistics,
)
from airflow_provider_pgrepl.replication.storage import (
    Output,
    delete_files,
    durable,
    make_folders,
    open_storage,
    storage_errors,
)
from airflow_provider_pgrepl.trace import log_unexpected

log = logging.getLogger(__name__)

FILE_BYTES = 128 << 20
ROW_GROUP_ROWS = 256 << 10
ROW_GROUP_BYTES = 64 << 20
_WRITE_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    # A column with few values keeps its dictionary; one with many gives it up before it costs time.
    "dictionary_pagesize_limit": 128 << 10,
    "store_decimal_as_integer": True,
    "store_schema": False,
}


@dataclass(frozen=True)
class WrittenFile:
    """A complete Parquet file: its path under the table's root and what a Delta `add` action says of it."""

    path: str
    size: int
    rows: int
    stats_json: str
    partition_values: Mapping[str, str | None] = field(default_factory=dict, hash=False)

    def add_action(self, *, changes_data: bool = True) -> AddAction:
        """The log's line for a file that comes."""
        return AddAction(
            path=self.path,
            size=self.size,
            partition_values=dict(self.partition_values),
            modification_time=int(time.time() * 1000),
            data_change=changes_data,
            stats=self.stats_json,
        )


class ParquetFiles:
    """Writes batches to files of about FILE_BYTES in a folder; a context manager.

    `finish` completes and lists the files. Leaving the block without it removes all that were written.
    `partition_values`: of all rows. Raises LakeError.
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
        """Take a batch; small ones wait until they fill a row group."""
        self._waiting.append(batch)
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        if self._waiting_rows >= ROW_GROUP_ROWS or self._waiting_bytes >= ROW_GROUP_BYTES:
            self._write_row_group()

    @property
    def waiting_bytes(self) -> int:
        """Of the rows that wait in memory."""
        return self._waiting_bytes

    @property
    def is_open(self) -> bool:
        """Whether a file is begun, and not complete."""
        return self._writer is not None

    def write_waiting(self) -> None:
        """Write what waits, however little it is."""
        if self._waiting_rows:
            self._write_row_group()

    def finish(self) -> list[WrittenFile]:
        """Write what waits, close the last file, and list all of them (none when there were no rows)."""
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
        """Complete the file that is begun, if any; what comes later begins another."""
        if self._writer is None or self._sink is None:
            return
        with storage_errors(self._place):
            self._writer.close()
            size = self._sink.tell()
            self._sink.close()
            # Here, because whoever commits it may be on another host.
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
        """Remove every file; what cannot be removed is an orphan that no commit names, for vacuum to take."""
        self._waiting = []
        # Whatever they say: an unfinished file has no metadata that a writer could hand over.
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
    """Delete files that were written here and that no commit names.

    What cannot be deleted is logged, and left to maintenance.
    """
    try:
        filesystem, root = open_storage(lake_root)
        delete_files(filesystem, [f"{root}/{folder}/{file.path}" for file in files])
    except (OSError, PgReplError) as error:
        log.warning("%s: files of a copy that was given up stay until maintenance: %s", folder, error)
