"""One lake table: its position, its fence, the snapshot's commit, small-file hygiene.

All writers of a table use one Delta app id, `<pipeline>:<epoch>`, and write it with the version that is the
table's position. A writer reads the position and commits through one handle which it never refreshes in
between: Delta then refuses the commit if anybody has written that id meanwhile. An epoch's first commit
also closes the ids of the epochs before it, at CLOSED, so that their writers are refused for good.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import TypeVar

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, TableFeatures, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, create_table_with_add_actions

from airflow_provider_pgrepl.errors import (
    FencedError,
    LakeError,
    LakeTableError,
    LakeUnavailableError,
    PgReplError,
)
from airflow_provider_pgrepl.replication.lake.delta.commit_files import COMMIT_METADATA, settle_log
from airflow_provider_pgrepl.replication.lake.delta.declared_bounds import (
    columns_found_bounded,
    declaration,
    declared_columns,
)
from airflow_provider_pgrepl.replication.lake.delta.parquet_files import WrittenFile
from airflow_provider_pgrepl.replication.lake.delta.statistics import bounded_in_all
from airflow_provider_pgrepl.replication.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.storage import (
    delta_errors,
    durable,
    is_refusal,
    make_folder,
    refusal,
    storage_errors,
)

# Delta knows nothing of consistent points, which need old log entries: maintenance sees to the log.
_TABLE_PROPERTIES = {"delta.enableExpiredLogCleanup": "false"}

CLOSED = 2**63 - 1
"""The version under which the app id of an epoch that is over stands in a table."""

RELATION_APP = "pgrepl-relation"
"""Delta app id whose version is that of the relation for which the table is built."""
BEFORE_APP = "pgrepl-relation-before"
"""Delta app id whose version is that of the relation in which the changes above the position begin.

It is another one than RELATION_APP's while the table has evolved for a transaction that is not in it yet:
what the transaction changed before its DDL is still of the older relation.
"""
EXPORTED_APP = "pgrepl-exported-us"
"""Delta app id whose version is when the copied snapshot was exported: microseconds since 1970."""


Result = TypeVar("Result")

_FILE_GONE = "Object at location"
_FENCED_HINT = "this process must end; start it again only if no other one replicates this pipeline"


def app_id(pipeline_name: str, epoch: Epoch) -> str:
    """The Delta app id under which everything of one pipeline and epoch is written."""
    return f"{pipeline_name}:{epoch}"


def open_table(uri: str) -> DeltaTable:
    """The table's newest version. Raises LakeTableError when there is none."""
    try:
        return DeltaTable(uri)
    except TableNotFoundError:
        raise LakeTableError(f"there is no lake table at {uri}") from None
    except (DeltaError, OSError) as error:
        raise LakeTableError(f"cannot open the lake table at {uri}: {type(error).__name__}") from error


def read_position(table: DeltaTable, app: str) -> LSN | None:
    """The LSN up to which every transaction is in the table; None when this epoch never wrote it.

    Raises FencedError when the epoch is over: a later one has written the table.
    """
    version = table.transaction_version(app)
    if version == CLOSED:
        raise FencedError(f"{table.table_uri}: a later epoch than that of {app} has written it", _FENCED_HINT)
    return None if version is None else LSN(version)


def earlier_apps(pipeline_name: str, epoch: Epoch) -> list[str]:
    """The app ids of all epochs before this one, oldest first."""
    return [app_id(pipeline_name, Epoch(number)) for number in range(1, epoch)]


def epoch_of(app: str) -> Epoch:
    """The epoch that an app id is of."""
    return Epoch(int(app.rpartition(":")[2]))


def relation_marks(table: DeltaTable, version: int) -> dict[str, int]:
    """App ids of a commit after which the table, and the changes above its position, are of one relation."""
    known = table.transaction_version(BEFORE_APP)
    return {RELATION_APP: version, **({} if known in (None, version) else {BEFORE_APP: version})}


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
        custom_metadata={COMMIT_METADATA: json.dumps(about)},
    )


def fenced(
    table: DeltaTable,
    app: str,
    position: LSN | None,
    commit: Callable[[], Result],
    known: Mapping[str, str] | None = None,
) -> Result:
    """Run `commit`, which commits once through `table` and is to leave it at `position`.

    Raises FencedError when another process has written the table since the handle was opened,
    LakeUnavailableError when the storage refuses, LakeTableError for anything else. Delta's own
    messages may hold values of rows, so none is passed on; `known` gives our sentence about a damaged
    table for a fragment of such a message.
    """
    before = table.version()
    refused, damage, moved = "", "", False
    unavailable: LakeUnavailableError | None = None
    try:
        result = commit()
        durable.flush_commits(table.table_uri, before, table.version())
    except PgReplError:
        raise
    except Exception as error:  # deltalake raises plain ones too
        refused = type(error).__name__
        sentences = {_FILE_GONE: "one of its files is gone", **(known or {})}
        damage = next((ours for theirs, ours in sentences.items() if theirs in str(error)), "")
        if is_refusal(error):
            unavailable = refusal(f"{table.table_uri}: nothing was committed", error)
        moved = isinstance(error, CommitFailedError) or _newest_version(table) not in (before, None)
    # Raised out here, so that Delta's exception does not hang on ours as its context.
    if moved:
        raise FencedError(f"{table.table_uri}: another process has written this table", _FENCED_HINT)
    if damage:
        raise LakeTableError(f"{table.table_uri}: {damage}")
    if unavailable is not None:
        raise unavailable
    if refused:
        raise LakeTableError(f"{table.table_uri}: nothing was committed, Delta failed with {refused}")
    if table.transaction_version(app) != position:
        raise FencedError(f"{table.table_uri}: another process has moved its position", _FENCED_HINT)
    return result


def _newest_version(table: DeltaTable) -> int | None:
    try:
        return int(DeltaTable(table.table_uri).version())
    except (DeltaError, OSError):
        return None


def commit_nothing(table: DeltaTable, app: str, position: LSN, properties: CommitProperties) -> None:
    """Move the position without touching data. Raises FencedError."""
    commit_files(table, app, position, (), properties)


def commit_files(
    table: DeltaTable, app: str, position: LSN, files: Sequence[WrittenFile], properties: CommitProperties
) -> None:
    """Append the rows of files and move the position, in one commit. Raises what `fenced` does."""
    adds = [_add_action(file) for file in files]
    narrow_bounds(table, app, _bounded(files, pa.schema(table.schema().to_arrow())))
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
    adds = [_add_action(file) for file in files]
    bounded = _bounded(files, schema)
    allow_timestamp_without_tz(table, schema)
    narrow_bounds(table, app, bounded)
    delta_schema = Schema.from_arrow(schema)
    fenced(table, app, position, lambda: _add_files(table, adds, "overwrite", delta_schema, properties))
    if declared_columns(table) != bounded:
        _declare_bounds(table, app, bounded)


def _add_files(
    table: DeltaTable, adds: list[AddAction], mode: str, schema: Schema, properties: CommitProperties
) -> None:
    table.create_write_transaction(adds, mode, schema, commit_properties=properties)
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
    position = table.transaction_version(app)
    about = json.dumps({"kind": "bounds", "position": position, "commit_ts": None})
    properties = CommitProperties(
        app_transactions=[] if position is None else [Transaction(app, position)],
        custom_metadata={COMMIT_METADATA: about},
    )
    set_properties = table.alter.set_table_properties
    fenced(table, app, position, lambda: set_properties(declaration(columns), commit_properties=properties))


def _bounded(files: Sequence[WrittenFile], schema: pa.Schema) -> list[str]:
    return bounded_in_all(schema, [file.stats_json for file in files])


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
    others = dict.fromkeys(older, CLOSED)
    if relation_version is not None:
        others |= {RELATION_APP: relation_version, BEFORE_APP: relation_version}
    if exported_at is not None:
        others[EXPORTED_APP] = round(exported_at.timestamp() * 1_000_000)
    properties = commit_properties(app, position, "snapshot", exported_at, others)
    # One that a crash of the machine tore is replaced like any other.
    settle_log(uri)
    if not DeltaTable.is_deltatable(uri):
        return create_table(uri, schema, files, properties)
    table = open_table(uri)
    check_ours(table, app, older, position)
    replace_files(table, app, position, files, schema, properties)
    return int(table.version())


def create_table(
    uri: str, schema: pa.Schema, files: Sequence[WrittenFile], properties: CommitProperties
) -> int:
    """Create a lake table by its first commit.

    Raises FencedError when somebody else did, LakeUnavailableError, LakeError.
    """
    bounds = declaration(_bounded(files, schema))
    failed, unavailable = "", None
    try:
        make_folder(uri)
        create_table_with_add_actions(
            uri,
            Schema.from_arrow(schema),
            [_add_action(file) for file in files],
            mode="error",
            configuration=_TABLE_PROPERTIES | bounds,
            commit_properties=properties,
        )
        durable.flush_commits(uri, -1, 0)
    except (DeltaError, OSError) as error:
        failed = type(error).__name__
        if is_refusal(error) and not isinstance(error, PermissionError):
            unavailable = refusal(f"cannot create the lake table {uri}", error)
    if failed and DeltaTable.is_deltatable(uri):
        raise FencedError(f"{uri}: another process has created this table", _FENCED_HINT)
    if unavailable is not None:
        raise unavailable
    if failed:
        raise LakeError(f"cannot create the lake table {uri}: {failed}", "may the process write there?")
    return 0


def check_ours(table: DeltaTable, app: str, older: Sequence[str], position: LSN) -> None:
    """Raises LakeError for a table that none of the app ids has written, FencedError for one that is in a
    later epoch or beyond the position."""
    current = read_position(table, app)
    if current is None and all(table.transaction_version(old) is None for old in older):
        raise LakeError(
            f"{table.table_uri} is a Delta table that this pipeline has not written",
            "give the pipeline a lake root of its own, or move that table away",
        )
    if current is not None and current > position:
        raise FencedError(
            f"{table.table_uri} is at {current}, beyond this snapshot's {position}: a newer one was taken",
            _FENCED_HINT,
        )


def allow_timestamp_without_tz(table: DeltaTable, schema: pa.Schema) -> None:
    """Declare the feature in a commit of its own, without data: an overwrite cannot."""
    needed = any(_has_timestamp_without_tz(field.type) for field in schema)
    if not needed or "timestampNtz" in (table.protocol().writer_features or []):
        return
    before = table.version()
    with delta_errors(f"{table.table_uri}: nothing was committed"):
        table.alter.add_feature(TableFeatures.TimestampWithoutTimezone, allow_protocol_versions_increase=True)
    if table.version() != before + 1:
        raise FencedError(f"{table.table_uri}: another process has written this table", _FENCED_HINT)
    with storage_errors(table.table_uri):
        durable.flush_commits(table.table_uri, before, before + 1)


def _has_timestamp_without_tz(lake_type: pa.DataType) -> bool:
    if pa.types.is_nested(lake_type):
        fields = (lake_type.field(index) for index in range(lake_type.num_fields))
        return any(_has_timestamp_without_tz(field.type) for field in fields)
    return bool(pa.types.is_timestamp(lake_type) and lake_type.tz is None)


def _add_action(file: WrittenFile) -> AddAction:
    return AddAction(
        path=file.path,
        size=file.size,
        partition_values={},
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=file.stats_json,
    )
