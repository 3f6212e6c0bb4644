"""Rows of many partitions into files of one each: in order, with little memory and few files open at once."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_provider_pgrepl.replication.lake.delta import parquet_writer
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import (
    ParquetFiles,
    PartitionedFiles,
    WrittenFile,
)
from airflow_provider_pgrepl.replication.settings.tables import PARTITION

SCHEMA = pa.schema([("n", pa.int64()), (PARTITION, pa.string())])


def batch_of(numbers: range, partitions: int) -> pa.RecordBatch:
    texts = [f"d{n % partitions}" if n % partitions else None for n in numbers]
    return pa.record_batch([pa.array(numbers, pa.int64()), pa.array(texts, pa.string())], schema=SCHEMA)


def test_rows_of_many_partitions_are_held_back_and_make_one_file_each(tmp_path: Path) -> None:
    with PartitionedFiles(str(tmp_path), "t", SCHEMA) as files:
        for start in range(0, 20_000, 1_000):
            files.write(batch_of(range(start, start + 1_000), 300))
        written = files.finish()
    assert len(written) == len({file.partition_values[PARTITION] for file in written}) == 300
    assert sum(file.rows for file in written) == 20_000
    held = [n for file in written for n in pq.read_table(tmp_path / "t" / file.path)["n"].to_pylist()]
    assert sorted(held) == list(range(20_000))
    first = next(file for file in written if file.partition_values[PARTITION] is None)
    assert pq.read_table(tmp_path / "t" / first.path)["n"].to_pylist() == list(range(0, 20_000, 300))
    assert json.loads(first.stats_json)["maxValues"] == {"n": 19_800}


def test_few_files_are_open_at_once_and_little_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_writer, "SPLIT_BYTES", 20_000)
    monkeypatch.setattr(parquet_writer, "WAITING_BYTES", 40_000)
    monkeypatch.setattr(parquet_writer, "MOST_OPEN", 4)
    with PartitionedFiles(str(tmp_path), "t", SCHEMA) as files:
        for start in range(0, 40_000, 1_000):
            files.write(batch_of(range(start, start + 1_000), 50))
            assert sum(one.is_open for one in files._files.values()) <= 4
            assert sum(one.waiting_bytes for one in files._files.values()) <= 40_000
        written = files.finish()
    assert sum(file.rows for file in written) == 40_000
    held = [n for file in written for n in pq.read_table(tmp_path / "t" / file.path)["n"].to_pylist()]
    assert sorted(held) == list(range(40_000))


def test_waiting_partition_rows_hold_less_than_twice_their_counted_memory(tmp_path: Path) -> None:
    """A slice of a batch would hold all of it."""
    with PartitionedFiles(str(tmp_path), "t", SCHEMA) as files:
        files.write(batch_of(range(100_000), 2))
        files._split()
        for one in files._files.values():
            for waiting in one._waiting:
                assert waiting.get_total_buffer_size() < 2 * waiting.nbytes
        files.finish()


def test_a_failed_attempt_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), PartitionedFiles(str(tmp_path), "t", SCHEMA) as files:
        files.write(batch_of(range(1_000), 10))
        files._split()
        for one in files._files.values():
            one.write_waiting()
        raise RuntimeError
    assert list((tmp_path / "t").iterdir()) == []


def test_nothing_is_written_of_nothing(tmp_path: Path) -> None:
    with PartitionedFiles(str(tmp_path), "t", SCHEMA) as files:
        files.write(batch_of(range(0), 10))
        assert files.finish() == []


def test_failure_at_last_partition_file_deletes_completed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, done = ParquetFiles.finish, []

    def failing(self: ParquetFiles) -> list[WrittenFile]:
        if len(done) == 5:
            raise RuntimeError
        done.append(self)
        return finish(self)

    monkeypatch.setattr(ParquetFiles, "finish", failing)
    with pytest.raises(RuntimeError), PartitionedFiles(str(tmp_path), "t", SCHEMA) as files:
        files.write(batch_of(range(1_000), 10))
        files.finish()
    assert (len(done), list((tmp_path / "t").iterdir())) == (5, [])
