"""One range of a source table, copied at a snapshot into Parquet files of its lake table."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from datetime import datetime
from typing import Any

import pyarrow as pa

from airflow_provider_pgrepl.replication import values
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import WrittenFile
from airflow_provider_pgrepl.replication.lake.delta.partitions import data_files
from airflow_provider_pgrepl.replication.lake.snapshot.csv import OddValueError, read_csv
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableChoices
from airflow_provider_pgrepl.replication.source.copy.copy_stream import open_copy
from airflow_provider_pgrepl.replication.source.copy.ranges import CopyRange

__all__ = ["WrittenFile", "read_csv", "write_files", "write_range"]


def write_range(
    dsn: str,
    snapshot: str,
    copy_range: CopyRange,
    relation: Relation,
    choices: TableChoices,
    lake_root: str,
    position: LSN,
    exported_at: datetime,
) -> list[WrittenFile]:
    """Copy one range; every row carries the snapshot's position and time in the bookkeeping columns.

    Reads the range again, more carefully, when its values need that. A failed attempt leaves no file.
    Raises SourceError, ValueRangeError or LakeError; none of them carries a value.
    """

    def attempt(*, as_text: bool) -> list[WrittenFile]:
        batches = _copy(dsn, snapshot, copy_range, relation, choices, as_text=as_text)
        # Closed here, so that the server's COPY ends before this returns or tries again.
        with closing(batches):
            return write_files(batches, relation, choices, lake_root, position, exported_at)

    with suppress(OddValueError):
        return attempt(as_text=False)
    return attempt(as_text=True)


def _copy(
    dsn: str,
    snapshot: str,
    copy_range: CopyRange,
    relation: Relation,
    choices: TableChoices,
    *,
    as_text: bool,
) -> Generator[pa.RecordBatch, None, None]:
    """The range's rows. Ends only after the COPY did well: its failure comes up before a file is complete."""
    with open_copy(dsn, snapshot, copy_range) as stream:
        yield from read_csv(stream, relation, choices, as_text=as_text)


def write_files(
    batches: Iterator[pa.RecordBatch],
    relation: Relation,
    choices: TableChoices,
    lake_root: str,
    position: LSN,
    exported_at: datetime,
) -> list[WrittenFile]:
    """Write all batches (the relation's columns) and list the files, of which none stays if this raises."""
    schema = values.lake_schema(relation, choices)
    constants = {
        values.DELETED: pa.scalar(False, pa.bool_()),
        values.COMMIT_LSN: pa.scalar(int(position), pa.int64()),
        values.COMMIT_TS: pa.scalar(exported_at, pa.timestamp("us", "UTC")),
    }
    marks = [constants[name] for name in schema.names if name in constants]
    partitions = values.partitioning(relation, choices)
    with data_files(lake_root, relation.table.path, schema) as files:
        for batch in batches:
            files.write(_marked(batch, marks, partitions, schema))
        return files.finish()


def _marked(
    batch: pa.RecordBatch, marks: list[Any], partitions: values.Partitioning | None, schema: pa.Schema
) -> pa.RecordBatch:
    columns = [*batch.columns, *(pa.repeat(mark, batch.num_rows) for mark in marks)]
    if partitions is not None:
        columns.append(partitions.texts(batch.column(schema.get_field_index(partitions.typed.name))))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
