"""Commits of a lake table: fenced, with the position and the bounds that go along."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TypeVar

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, TableFeatures, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction

from airflow_provider_pgrepl.errors import (
    FencedError,
    LakeTableError,
    LakeUnavailableError,
    PgReplError,
)
from airflow_provider_pgrepl.replication.lake.delta.commit_files import COMMIT_METADATA
from airflow_provider_pgrepl.replication.lake.delta.declared_bounds import (
    columns_found_bounded,
    declaration,
    declared_columns,
)
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version, live_files
from airflow_provider_pgrepl.replication.lake.delta.log_entry import (
    VersionTakenError,
    commit_actions,
    removed,
)
from airflow_provider_pgrepl.replication.lake.delta.parquet_files import WrittenFile
from airflow_provider_pgrepl.replication.lake.delta.partitions import partition_columns
from airflow_provider_pgrepl.replication.lake.delta.statistics import bounded_in_all
from airflow_provider_pgrepl.replication.lake.delta.table import (
    FENCED_HINT,
)
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.storage import (
    added_action,
    can_commit,
    commit_token,
    committing,
    delta_errors,
    durable,
    is_refusal,
    metadata_action,
    open_delta,
    refusal,
    storage_errors,
)
from airflow_provider_pgrepl.trace import trace_of

log = logging.getLogger(__name__)

_FILE_GONE = "Object at location"

Result = TypeVar("Result")


def commit_properties(
    app: str,
    position: LSN,
    kind: str,
    commit_ts: datetime | None = None,
    others: Mapping[str, int] | None = None,
) -> CommitProperties:
    """What every commit carries: the position under the app id, other app ids, and our metadata."""
    about = {"kind": kind, "position": int(position), "commit_ts": commit_ts and commit_ts.isoformat()}
    return CommitProperties(
        app_transactions=[
            Transaction(app, position),
            *(Transaction(*other) for other in (others or {}).items()),
        ],
        custom_metadata={COMMIT_METADATA: json.dumps(about), **commit_token()},
    )


def fenced(
    table: DeltaTable,
    app: str,
    position: LSN | None,
    commit: Callable[[], Result],
    known: Mapping[str, str] | None = None,
    passing: tuple[type[Exception], ...] = (),
) -> Result:
    """Run `commit`, which commits once through `table` and is to leave it at `position`.

    Raises FencedError when another process has written the table since the handle was opened,
    LakeUnavailableError when the storage refuses, LakeTableError for anything else. Delta's own messages may
    hold values of rows, so none is passed on; `known` gives our sentence about a damaged table for a fragment
    of such a message. What is `passing` is left to the caller.
    """
    before = table.version()
    refused, trace, damage, moved = "", "", "", False
    unavailable: LakeUnavailableError | None = None
    try:
        result = commit()
        durable.flush_commits(table.table_uri, before, table.version())
    except Exception as error:  # deltalake raises plain ones too
        if isinstance(error, (PgReplError, *passing)):
            raise
        refused, trace = type(error).__name__, trace_of(error)
        sentences = {_FILE_GONE: "one of its files is gone", **(known or {})}
        damage = next((ours for theirs, ours in sentences.items() if theirs in str(error)), "")
        if is_refusal(error):
            unavailable = refusal(f"{table.table_uri}: nothing was committed", error)
        moved = isinstance(error, CommitFailedError | VersionTakenError) or _newest_version(table) not in (
            before,
            None,
        )
    # Raised out here, so that Delta's exception does not hang on ours as its context.
    if moved:
        raise FencedError(f"{table.table_uri}: another process has written this table", FENCED_HINT)
    if damage:
        raise LakeTableError(f"{table.table_uri}: {damage}")
    if unavailable is not None:
        raise unavailable
    if refused:
        failed = LakeTableError(f"{table.table_uri}: nothing was committed, Delta failed with {refused}")
        failed.trace = trace
        log.error("%s: nothing was committed: unexpected %s", table.table_uri, trace)
        raise failed
    if app_version(table, app) != position:
        raise FencedError(f"{table.table_uri}: another process has moved its position", FENCED_HINT)
    return result


def _newest_version(table: DeltaTable) -> int | None:
    try:
        return int(open_delta(table.table_uri).version())
    except (DeltaError, OSError):
        return None


def commit_nothing(table: DeltaTable, app: str, position: LSN, properties: CommitProperties) -> None:
    """Move the position without touching data. Raises FencedError."""
    commit_files(table, app, position, (), properties)


def commit_files(
    table: DeltaTable, app: str, position: LSN, files: Sequence[WrittenFile], properties: CommitProperties
) -> None:
    """Append the rows of files and move the position, in one commit. Raises what `fenced` does."""
    adds = [file.add_action() for file in files]
    narrow_bounds(table, app, bounded(files, pa.schema(table.schema().to_arrow())))
    fenced(table, app, position, lambda: _add_files(table, adds, "append", table.schema(), properties))


def replace_files(
    table: DeltaTable,
    app: str,
    position: LSN,
    files: Sequence[WrittenFile],
    schema: pa.Schema,
    properties: CommitProperties,
) -> None:
    """Have the table consist of exactly these files, with these columns. Raises what `fenced` does."""
    adds = [file.add_action() for file in files]
    with_bounds = bounded(files, schema)
    allow_timestamp_without_tz(table, schema)
    narrow_bounds(table, app, with_bounds)
    delta_schema = Schema.from_arrow(schema)
    if table.metadata().partition_columns == partition_columns(schema):
        replace = partial(_add_files, table, adds, "overwrite", delta_schema, properties)
    else:
        replace = partial(_repartition, table, adds, schema, properties)
    fenced(table, app, position, replace)
    if declared_columns(table) != with_bounds:
        _declare_bounds(table, app, with_bounds)


def _repartition(
    table: DeltaTable, adds: Sequence[AddAction], schema: pa.Schema, properties: CommitProperties
) -> None:
    """deltalake's overwrite leaves a table partitioned as it was, and says nothing."""
    if not can_commit(table):
        raise LakeTableError(
            f"{table.table_uri}: how it is partitioned cannot be changed, since its protocol demands more of"
            " writers than this program does",
            "move the table's folder away; the next snapshot makes it anew",
        )
    metadata = metadata_action(table, {}, Schema.from_arrow(schema), partition_columns(schema))
    gone = (removed(file) for file in live_files(table).values())
    commit_actions(table, "WRITE", properties, [metadata, *gone, *map(added_action, adds)])


def _add_files(
    table: DeltaTable, adds: list[AddAction], mode: str, schema: Schema, properties: CommitProperties
) -> None:
    by = table.metadata().partition_columns or None
    with committing(table, properties):
        table.create_write_transaction(adds, mode, schema, partition_by=by, commit_properties=properties)
    # Unlike the other ways to commit, this one leaves the handle where it was.
    table.update_incremental()


def bounded_columns(table: DeltaTable, app: str) -> list[str]:
    """The columns of which all files of the table have bounds; whoever writes it has to write these.

    A table that an earlier version of this program made does not say it, and is made to, in a commit of its
    own without data. Raises what `fenced` does.
    """
    declared = declared_columns(table)
    if declared is not None:
        return declared
    found = columns_found_bounded(table)
    _declare_bounds(table, app, found)
    return found


def narrow_bounds(table: DeltaTable, app: str, keeping: Collection[str]) -> list[str]:
    """Before files without bounds of some columns come: no other columns than `keeping` are said to have any.

    Returns those that are. A commit of its own, without data, if anything changes. Raises what `fenced` does.
    """
    declared = bounded_columns(table, app)
    kept = [name for name in declared if name in keeping]
    if kept != declared:
        _declare_bounds(table, app, kept)
    return kept


def _declare_bounds(table: DeltaTable, app: str, columns: Sequence[str]) -> None:
    """The position, if there is one yet, goes along: who writes the table at the same time is refused."""
    version = app_version(table, app)
    position = None if version is None else LSN(version)
    about = json.dumps({"kind": "bounds", "position": position, "commit_ts": None})
    properties = CommitProperties(
        app_transactions=[] if position is None else [Transaction(app, position)],
        custom_metadata={COMMIT_METADATA: about, **commit_token()},
    )
    fenced(table, app, position, lambda: _set_properties(table, declaration(columns), properties))


def _set_properties(table: DeltaTable, wanted: Mapping[str, str], properties: CommitProperties) -> None:
    if not can_commit(table):
        with committing(table, properties):
            table.alter.set_table_properties(dict(wanted), commit_properties=properties)
        return
    commit_actions(table, "SET TBLPROPERTIES", properties, [metadata_action(table, wanted)])


def bounded(files: Sequence[WrittenFile], schema: pa.Schema) -> list[str]:
    """The columns of which all of these files have bounds."""
    return bounded_in_all(schema, [file.stats_json for file in files])


def allow_timestamp_without_tz(table: DeltaTable, schema: pa.Schema) -> None:
    """Declare the feature in a commit of its own, without data: an overwrite cannot."""
    needed = any(_has_timestamp_without_tz(field.type) for field in schema)
    if not needed or "timestampNtz" in (table.protocol().writer_features or []):
        return
    before = table.version()
    properties = CommitProperties(custom_metadata=commit_token())
    with delta_errors(f"{table.table_uri}: nothing was committed"), committing(table, properties):
        table.alter.add_feature(
            TableFeatures.TimestampWithoutTimezone,
            allow_protocol_versions_increase=True,
            commit_properties=properties,
        )
    if table.version() != before + 1:
        raise FencedError(f"{table.table_uri}: another process has written this table", FENCED_HINT)
    with storage_errors(table.table_uri):
        durable.flush_commits(table.table_uri, before, before + 1)


def _has_timestamp_without_tz(lake_type: pa.DataType) -> bool:
    if pa.types.is_nested(lake_type):
        fields = (lake_type.field(index) for index in range(lake_type.num_fields))
        return any(_has_timestamp_without_tz(field.type) for field in fields)
    return bool(pa.types.is_timestamp(lake_type) and lake_type.tz is None)
