"""The commit of a snapshot: a lake table is created, or replaced as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import DeltaError

from airflow_provider_pgrepl.errors import FencedError, LakeError, OvertakenError
from airflow_provider_pgrepl.replication.delta.table import create_delta, has_delta
from airflow_provider_pgrepl.replication.lake.delta.commit import STORE_CHECKPOINT_EVERY
from airflow_provider_pgrepl.replication.lake.delta.commit_files import settle_log
from airflow_provider_pgrepl.replication.lake.delta.declared_bounds import declaration
from airflow_provider_pgrepl.replication.lake.delta.fenced_commit import (
    bounded,
    commit_properties,
    replace_files,
)
from airflow_provider_pgrepl.replication.lake.delta.foreign_writes import warn_of_foreign_rows
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.ownership import check_replaceable
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import WrittenFile
from airflow_provider_pgrepl.replication.lake.delta.partitions import partition_columns
from airflow_provider_pgrepl.replication.lake.delta.table import (
    BEFORE_APP,
    CLOSED,
    EXPORTED_APP,
    FENCED_HINT,
    RELATION_APP,
    app_id,
    earlier_apps,
    open_table,
    read_position,
)
from airflow_provider_pgrepl.replication.lake.delta.table_marks import table_marks
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.lake import is_object_store
from airflow_provider_pgrepl.replication.storage import is_refusal, refusal

_ATTEMPTS = 3

# Delta knows nothing of consistent points, which need old log entries: maintenance sees to the log.
_TABLE_PROPERTIES = {"delta.enableExpiredLogCleanup": "false"}
_STORE_PROPERTIES = {"delta.checkpointInterval": str(STORE_CHECKPOINT_EVERY)}
"""For commits that deltalake makes; those of our own heed the number, too."""


def commit_snapshot(
    uri: str,
    schema: pa.Schema,
    files: Sequence[WrittenFile],
    position: LSN,
    pipeline_name: str,
    epoch: Epoch,
    exported_at: datetime | None = None,
    relation_version: int | None = None,
) -> int:
    """Make the table consist of exactly `files`, in one commit, and say its version.

    The commit also says when the snapshot was exported and of which relation version its rows are.

    Creates the table, or replaces whatever an earlier snapshot and its changes left there, its columns
    included. Raises LakeError for a Delta table that is not this pipeline's, FencedError when it holds a
    later epoch, a position beyond `position`, or is written by another process meanwhile.
    """
    app = app_id(pipeline_name, epoch)
    older = earlier_apps(pipeline_name, epoch)
    others = {**dict.fromkeys(older, CLOSED), **table_marks(uri)}
    if relation_version is not None:
        others |= {RELATION_APP: relation_version, BEFORE_APP: relation_version}
    if exported_at is not None:
        others[EXPORTED_APP] = round(exported_at.timestamp() * 1_000_000)
    properties = commit_properties(app, position, "snapshot", exported_at, others)
    check_replaceable(uri, pipeline_name)
    # One that a crash of the machine tore is replaced like any other.
    settle_log(uri, pipeline_name)
    if not has_delta(uri):
        return create_table(uri, schema, files, properties)
    for left in reversed(range(_ATTEMPTS)):
        table = open_table(uri)
        check_ours(table, app, older, position)
        warn_of_foreign_rows(table)
        try:
            replace_files(table, app, position, files, schema, properties)
            break
        except OvertakenError:
            # The files replace all that there is, whatever another program has made of it meanwhile.
            if not left:
                raise
    return int(table.version())


def create_table(
    uri: str, schema: pa.Schema, files: Sequence[WrittenFile], properties: CommitProperties
) -> int:
    """Create a lake table by its first commit.

    Raises FencedError when somebody else did, LakeUnavailableError, LakeError.
    """
    bounds = declaration(bounded(files, schema))
    failed, unavailable = "", None
    try:
        create_delta(
            uri,
            schema,
            {**_TABLE_PROPERTIES, **(_STORE_PROPERTIES if is_object_store(uri) else {}), **bounds},
            properties,
            files=[file.add_action() for file in files],
            partition_by=partition_columns(schema),
        )
    except (DeltaError, OSError) as error:
        failed = type(error).__name__
        if is_refusal(error) and not isinstance(error, PermissionError):
            unavailable = refusal(f"cannot create the lake table {uri}", error)
    if failed and has_delta(uri):
        raise FencedError(f"{uri}: another process has created this table", FENCED_HINT)
    if unavailable is not None:
        raise unavailable
    if failed:
        raise LakeError(
            f"cannot create the lake table {uri}: {failed}", "check that the process may write there"
        )
    return 0


def check_ours(table: DeltaTable, app: str, older: Sequence[str], position: LSN) -> None:
    """Raises LakeError for a table that none of the app ids has written, FencedError for one that is in a
    later epoch or beyond the position."""
    current = read_position(table, app)
    if current is None and all(app_version(table, old) is None for old in older):
        raise LakeError(
            f"{table.table_uri} is a Delta table that this pipeline has not written",
            "give the pipeline a lake root of its own, or move that table away",
        )
    if current is not None and current > position:
        raise FencedError(
            f"{table.table_uri} is at {current}, beyond this snapshot's {position}: a newer one was taken",
            FENCED_HINT,
        )
