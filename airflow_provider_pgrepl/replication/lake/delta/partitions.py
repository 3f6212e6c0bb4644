"""How a lake table is partitioned: by no column, or by our own of that name, which its data files have too.

Polars takes a partition's value from the file, or from a folder's name; all others take it from the log. So
the column is in our files, and these lie in no folders.
"""

from __future__ import annotations

import pyarrow as pa
from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import ParquetFiles
from airflow_provider_pgrepl.replication.lake.delta.partitioned_files import PartitionedFiles
from airflow_provider_pgrepl.replication.settings.partition_by import PARTITION

LakeFiles = ParquetFiles | PartitionedFiles


def partition_columns(schema: pa.Schema) -> list[str]:
    """By which columns a table with this schema is to be partitioned."""
    return [PARTITION] if PARTITION in schema.names else []


def is_partitioned(table: DeltaTable) -> bool:
    """Whether each of its files is to hold rows of one partition."""
    return PARTITION in table.metadata().partition_columns


def data_files(lake_root: str, folder: str, schema: pa.Schema) -> LakeFiles:
    """What writes the rows of a table with this schema into files, of one partition each."""
    writes = PartitionedFiles if partition_columns(schema) else ParquetFiles
    return writes(lake_root, folder, schema)


def files_beside(uri: str, schema: pa.Schema) -> LakeFiles:
    """The same for a table that is there, by its URI."""
    above, _, folder = uri.rstrip("/").rpartition("/")
    return data_files(above, folder, schema)
