"""Opening, creating and reading Delta tables with the credentials and the fsync that their storage needs.

The whole package opens Delta tables through this module.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, QueryBuilder, Schema, write_deltalake
from deltalake.exceptions import TableNotFoundError
from deltalake.transaction import AddAction, create_table_with_add_actions

from airflow_provider_pgrepl.replication.runtime.host import check_once
from airflow_provider_pgrepl.replication.settings.lake import is_object_store
from airflow_provider_pgrepl.replication.storage import durable
from airflow_provider_pgrepl.replication.storage.errors import is_storage_error, storage_error
from airflow_provider_pgrepl.replication.storage.filesystem import Output, make_folder, open_storage
from airflow_provider_pgrepl.replication.storage.stores import store_options


def open_delta(uri: str, version: int | None = None) -> DeltaTable:
    """Open the newest version of a table, or the given one.

    Raises TableNotFoundError if there is no table, DeltaError, OSError, ToolError if deltalake is too old.
    """
    check_once()
    return DeltaTable(uri, version=version, storage_options=store_options(uri))


def has_delta(uri: str) -> bool:
    """Return True if there is a Delta table. Raises DeltaError, OSError."""
    if not is_object_store(uri):
        return bool(DeltaTable.is_deltatable(uri))
    # is_deltatable would block all Python threads until the store has answered.
    with suppress(TableNotFoundError):
        open_delta(uri)
        return True
    return False


def create_delta(
    uri: str,
    schema: pa.Schema,
    configuration: Mapping[str, str | None],
    properties: CommitProperties | None = None,
    *,
    files: Sequence[AddAction] = (),
    partition_by: Sequence[str] = (),
    description: str | None = None,
) -> None:
    """Create a table in one commit, with files that are already written, and flush it to disk.

    Raises DeltaError, also if a table exists already; OSError.
    """
    make_folder(uri)
    create_table_with_add_actions(
        uri,
        Schema.from_arrow(schema),
        list(files),
        mode="error",
        partition_by=list(partition_by),
        description=description,
        configuration=dict(configuration),
        commit_properties=properties,
        storage_options=store_options(uri),
    )
    durable.flush_commits(uri, -1, 0)


def write_file(uri: str, rows: pa.Table, bounds: Mapping[str, Any] | None = None) -> AddAction:
    """Write rows as a file of an unpartitioned table, and return the action that adds it.

    `bounds`: its statistics in addition to the number of rows. Raises OSError.
    """
    filesystem, root = open_storage(uri)
    name = f"part-{uuid.uuid4()}.parquet"
    with Output(filesystem, f"{root}/{name}", rows.nbytes) as file:
        pq.write_table(rows, file.stream)
        size = file.tell()
    told = json.dumps({"numRecords": len(rows), **(bounds or {})})
    return AddAction(name, size, {}, int(time.time() * 1000), True, told)


def append_delta(uri: str, rows: pa.Table, table: DeltaTable | None = None) -> None:
    """Append rows to a table, and flush them to disk. Creates the table, and columns that it lacks.

    `table`: the open table, which is then at the new version. Raises DeltaError, OSError.
    """
    if table is None:
        make_folder(uri)
    write_deltalake(
        table or uri, rows, mode="append", schema_mode="merge", storage_options=store_options(uri)
    )
    durable.flush_newest(uri, int((table or open_delta(uri)).version()))


def query_delta(table: DeltaTable, sql: str) -> pa.Table:
    """Run a DataFusion query on an open table, which the query names `it`, and return the result.

    Raises LakeUnavailableError for a storage error. Other errors are plain exceptions, whose texts may hold
    values of rows.
    """
    try:
        # Do not use read_all(): it holds the GIL, and would block other threads for minutes while requests to
        # the store are retried.
        return pa.table(QueryBuilder().register("it", table).execute(sql))
    except Exception as error:
        if not is_storage_error(error):
            raise
        failed = storage_error("the lake cannot be read", error)
    raise failed
