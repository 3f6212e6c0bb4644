"""Row groups stay small, also if a transaction brings many rows at once: a reader holds a whole one."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_provider_pgrepl.replication.lake.delta import parquet_writer
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import ParquetFiles


def test_large_batch_is_split_into_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_writer, "ROW_GROUP_BYTES", 1000)
    rows = pa.table({"id": pa.array(range(1000), pa.int64())})
    with ParquetFiles(str(tmp_path), "t", rows.schema) as files:
        for batch in rows.to_batches():
            files.write(batch)
        [written] = files.finish()
    found = pq.ParquetFile(tmp_path / "t" / written.path)
    groups = [found.metadata.row_group(number).num_rows for number in range(found.metadata.num_row_groups)]
    assert max(groups) <= 250
    assert found.read().equals(rows)
