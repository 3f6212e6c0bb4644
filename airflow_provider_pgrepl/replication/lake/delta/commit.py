"""Commits that this package writes into a lake table's log.

Some it writes itself, because deltalake 1.6 cannot write deletion vectors. When deltalake sets a table
property, it declares features that the table does not use (variantType), so that other readers then reject
the table.

Fenced commits set a table's position and keep its declared bounds true. If one fails, this module finds the
settings of other programs on the table that prevent it, and how to remove them. It reads them from the table:
Delta's error messages are not meant for programs, and may hold values of rows.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Schema, TableFeatures, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import FencedError, LakeTableError, OvertakenError, PgReplError
from airflow_provider_pgrepl.replication.delta.log import (
    added_action,
    can_commit,
    commit_token,
    committing,
    metadata_action,
    put_version,
    write_checkpoint,
)
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.lake import is_object_store
from airflow_provider_pgrepl.replication.source.catalog.relations import Comments
from airflow_provider_pgrepl.replication.storage import (
    durable,
    is_storage_error,
    read_commit,
    storage_error,
    storage_errors,
)
from airflow_provider_pgrepl.trace import trace_of

from .live_files import COMMIT_METADATA, LiveFile, app_version, live_files
from .parquet_writer import WrittenFile, partition_columns
from .statistics import bounded_in_all, columns_found_bounded, declaration, declared_columns
from .table import FENCED_HINT, spark_identifier, spark_path

CHECKPOINT_EVERY, STORE_CHECKPOINT_EVERY = 100, 20
"""Versions from one checkpoint to the next; the first is deltalake's default for its own commits.

To open a table, each commit since the last checkpoint is read. In an object store each is one request.
"""
_WRITTEN = {
    *("appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns", "columnMapping"),
    *("timestampNtz", "deletionVectors", "v2Checkpoint", "variantType"),
}
"""Writer features that deltalake 1.6.6 supports (tested)."""
_IDENTITY = "identityColumns"
_IDENTITY_WRITER = 6
"""The lowest writer version, of tables without writer features, that requires identity columns."""
_DROPPED_AT_ONCE = ("rowTracking", "inCommitTimestamp", "domainMetadata")
"""Features that Spark drops in one statement, in the order in which to drop them: row tracking needs
domainMetadata. Dropping any other feature leaves checkpointProtection behind, or is impossible."""
_CONSTRAINT = "delta.constraints."
log = logging.getLogger(__name__)
_DAMAGE = {"Object at location": "one of its files is gone"}  # prose: ignore - text of an error of delta-rs
Result = TypeVar("Result")
# Delta does not define the keys of a column's metadata (PROTOCOL.md of github.com/delta-io/delta). Spark
# stores a column's comment under this key: org.apache.spark.sql.types.StructField.getComment.
_COMMENT = "comment"


class VersionTakenError(Exception):
    """Another process has committed since the handle was opened, so the planned actions may be outdated."""


def check_version(table: DeltaTable, read: int) -> None:
    """Raise VersionTakenError unless the handle is at the version `read`, or at the one after it.

    This package's commit of bounds may have added one version. A larger difference means that the handle also
    took in commits of others, which may have removed files.
    """
    if int(table.version()) not in (read, read + 1):
        raise VersionTakenError


def commit_actions(
    table: DeltaTable, operation: str, properties: CommitProperties, actions: Iterable[Mapping[str, Any]]
) -> None:
    """Commit as exactly the version after that of the handle, and move the handle to the new version.

    Flushes the commit to disk. Writes a checkpoint every CHECKPOINT_EVERY versions (in an object store:
    STORE_CHECKPOINT_EVERY). Raises VersionTakenError if that version exists; LakeError, LakeUnavailableError.
    """
    uri, version = table.table_uri, int(table.version()) + 1
    with storage_errors(uri):
        if not put_version(uri, version, operation, properties, actions):
            raise VersionTakenError
        durable.flush_commits(uri, version - 1, version, with_files=False)
    table.update_incremental()
    if version % (STORE_CHECKPOINT_EVERY if is_object_store(uri) else CHECKPOINT_EVERY) == 0:
        write_checkpoint(table)


def removed(file: LiveFile, *, changes_data: bool = True) -> dict[str, Any]:
    """Return the log's `remove` action for a file, with its vector if it has one."""
    vector = file.vector
    return {
        "remove": {
            "path": file.action["path"],
            "deletionTimestamp": int(time.time() * 1000),
            "dataChange": changes_data,
            "extendedFileMetadata": True,
            "partitionValues": file.action["partitionValues"],
            "size": file.size,
            **({} if vector is None else {"deletionVector": vector.to_action()}),
        }
    }


def written_bytes(uri: str, after: int, upto: int) -> int:
    """Return the bytes that the versions after `after`, up to and including `upto`, have written.

    Counts their commit files, new data files and vectors. Raises LakeError, LakeUnavailableError.
    """
    total = 0
    with storage_errors(uri):
        for version in range(after + 1, upto + 1):
            content = read_commit(uri, version) or b""
            total += len(content) + _bytes_of(json.loads(line) for line in content.splitlines() if line)
    return total


def _bytes_of(actions: Iterable[Mapping[str, Any]]) -> int:
    actions = list(actions)
    before = {action["remove"]["path"] for action in actions if "remove" in action}
    added = [LiveFile(action["add"]) for action in actions if "add" in action]
    # A file that gets another vector is added again, but not written again.
    data = sum(file.size for file in added if file.action["path"] not in before)
    ends: dict[str, int] = {}
    for file in added:
        if file.vector is not None and file.action["path"] in before and (path := file.vector.path):
            ends[path] = max(ends.get(path, 0), file.vector.end)
    return data + sum(ends.values())


@dataclass(frozen=True)
class BlockingSetting:
    """A setting on a table that prevents commits. `what`: its name, with an explanation where needed.

    `remedy`: the statement that removes it; empty, for a single setting, if only a resnapshot helps.
    """

    what: str
    remedy: str


def find_obstacle(table: DeltaTable, *, at_rows: bool) -> BlockingSetting | None:
    """Return the settings because of which a commit through `table` failed, as one obstacle, or None.

    `at_rows`: the commit failed while rows were written, so look for constraints that reject rows. Otherwise
    look for settings that reject every commit.
    """
    alter = f"ALTER TABLE delta.{spark_path(table.table_uri)}"
    if at_rows:
        found = list(_of_rows(table, alter)) or list(_mapped_columns(table))
    else:
        found = [*_of_features(table, alter), *_append_only(table, alter)]
    return _joined(table, found) if found else None


def find_fixed_columns(table: DeltaTable) -> BlockingSetting | None:
    """Return the setting that prevents changing or replacing the table's columns (column mapping), or None.

    deltalake does not check this when files are replaced, and leaves a table that no reader can open.
    """
    found = list(_mapped_columns(table))
    return _joined(table, found) if found else None


def _joined(table: DeltaTable, found: Sequence[BlockingSetting]) -> BlockingSetting:
    what = ", ".join(one.what for one in found)
    if not all(one.remedy for one in found):
        return BlockingSetting(
            what,
            f"move the folder {table.table_uri} away and keep it: it has the rows that only the lake has, and"
            f" with history: true the current versions; then {errors.RESNAPSHOT}",
        )
    return BlockingSetting(what, "; ".join([*(one.remedy for one in found), f"then {errors.RETRY}"]))


def _mapped_columns(table: DeltaTable) -> Iterator[BlockingSetting]:
    if table.metadata().configuration.get("delta.columnMapping.mode", "none").lower() != "none":
        yield BlockingSetting(
            "the property delta.columnMapping.mode, with which no column can be added or replaced", ""
        )


def _append_only(table: DeltaTable, alter: str) -> Iterator[BlockingSetting]:
    if table.metadata().configuration.get("delta.appendOnly", "false").lower() == "true":
        yield BlockingSetting(
            "the property delta.appendOnly, which forbids to change and delete rows",
            f"{alter} UNSET TBLPROPERTIES ('delta.appendOnly')",
        )


def _of_features(table: DeltaTable, alter: str) -> Iterator[BlockingSetting]:
    protocol = table.protocol()
    demanded = set(protocol.writer_features or ()) - _WRITTEN
    if protocol.writer_features is None and int(protocol.min_writer_version) >= _IDENTITY_WRITER:
        demanded.add(_IDENTITY)
    at_once = [name for name in _DROPPED_AT_ONCE if name in demanded]
    for name in at_once:
        yield BlockingSetting(f"the table feature {name}", f"{alter} DROP FEATURE {name}")
    for name in sorted(demanded - set(at_once)):
        yield BlockingSetting(f"the table feature {name}", "")


def _of_rows(table: DeltaTable, alter: str) -> Iterator[BlockingSetting]:
    for key in sorted(table.metadata().configuration):
        if key.startswith(_CONSTRAINT):
            name = key.removeprefix(_CONSTRAINT)
            yield BlockingSetting(
                f"the CHECK constraint {name}", f"{alter} DROP CONSTRAINT {spark_identifier(name)}"
            )
    for field in _fields(table):
        about, name = field["metadata"], field["name"]
        if "delta.generationExpression" in about:
            what = f"the generated column {name}"
        elif "delta.invariants" in about:
            what = f"the invariant of column {name}"
        elif not field["nullable"]:
            yield BlockingSetting(
                f"NOT NULL of column {name}", f"{alter} ALTER COLUMN {spark_identifier(name)} DROP NOT NULL"
            )
            continue
        else:
            continue
        yield BlockingSetting(what, "")


def _fields(table: DeltaTable) -> list[dict[str, Any]]:
    fields: list[dict[str, Any]] = json.loads(table.schema().to_json())["fields"]
    return fields


def commit_properties(
    app: str,
    position: LSN,
    kind: str,
    commit_ts: datetime | None = None,
    others: Mapping[str, int] | None = None,
) -> CommitProperties:
    """Return the properties of every commit: the position under the app ID, other app IDs, and metadata."""
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
    """Run `commit`, which commits once through `table`, and check that the position is then `position`.

    Raises FencedError if another process of this pipeline has written the table since the handle was opened,
    OvertakenError if another program has and left the position unchanged, LakeUnavailableError for an error
    of the storage. Raises LakeTableError for anything else; its hint names the setting that prevents the
    commit, if there is one.

    Delta's messages may hold values of rows, so they are not passed on. `known`: maps fragments of them to
    this package's message about a damaged table. `passing`: exception types that are not converted.
    """
    result = try_commit(table, commit, app, known, passing)
    if app_version(table, app) != position:
        raise FencedError(f"{table.table_uri}: another process has moved its position", FENCED_HINT)
    return result


def try_commit(
    table: DeltaTable,
    commit: Callable[[], Result],
    app: str = "",
    known: Mapping[str, str] | None = None,
    passing: tuple[type[Exception], ...] = (),
) -> Result:
    """Run `commit`, flush what it committed to disk, and return its result. Raises what `fenced` does."""
    before = int(table.version())
    try:
        result = commit()
        durable.flush_commits(table.table_uri, before, table.version())
        return result
    except Exception as error:  # deltalake raises plain ones too
        if isinstance(error, (PgReplError, *passing)):
            raise
        failed = error
    # Raise outside of the except block, so that Delta's exception does not become the error's context.
    raise _failure(table, app, before, failed, {**_DAMAGE, **(known or {})})


def _failure(
    table: DeltaTable, app: str, before: int, error: Exception, sentences: Mapping[str, str]
) -> PgReplError:
    """Return the error for a failed commit through a handle that was at the version `before`.

    `sentences`: messages about a damaged table, by fragments of Delta's messages.
    """
    uri = table.table_uri
    newest = _open_or_none(uri)
    if newest is not None and (int(newest.version()) != before or isinstance(error, VersionTakenError)):
        return overtaken(newest, app, before)
    if damage := next((ours for theirs, ours in sentences.items() if theirs in str(error)), ""):
        return LakeTableError(f"{uri}: {damage}")
    if is_storage_error(error):
        return storage_error(f"{uri}: nothing was committed", error)
    at_rows = type(error) is DeltaError
    obstacle = find_obstacle(table, at_rows=at_rows) if isinstance(error, DeltaError) else None
    if obstacle is not None:
        return _prevented(table, obstacle)
    failed = LakeTableError(f"{uri}: nothing was committed, Delta failed with {type(error).__name__}")
    failed.trace = trace_of(error)
    log.error("%s: nothing was committed: unexpected %s", uri, failed.trace)
    return failed


def _prevented(table: DeltaTable, obstacle: BlockingSetting) -> LakeTableError:
    what = f"nothing was committed, because another program has set {obstacle.what}"
    return LakeTableError(f"{table.table_uri}: {what}", obstacle.remedy)


def overtaken(newest: DeltaTable, app: str, before: int) -> PgReplError:
    """Return the error for a writer under `app` if the table has commits after the version `before`.

    FencedError if they changed the position or if that cannot be determined, else OvertakenError.
    """
    uri, version = newest.table_uri, int(newest.version())
    held = _open_or_none(uri, before)
    if held is None or version < before or app_version(held, app) != app_version(newest, app):
        return FencedError(f"{uri}: another process has written this table", FENCED_HINT)
    return OvertakenError(
        f"{uri}: another program has committed version {version} meanwhile",
        "nothing is lost, the changes are applied later; stop that program if this happens often",
    )


def _open_or_none(uri: str, version: int | None = None) -> DeltaTable | None:
    try:
        return open_delta(uri, version)
    except (DeltaError, OSError):
        return None


def commit_nothing(table: DeltaTable, app: str, position: LSN, properties: CommitProperties) -> None:
    """Commit the position without changing data. Raises what `fenced` does."""
    commit_files(table, app, position, (), properties)


def commit_files(
    table: DeltaTable, app: str, position: LSN, files: Sequence[WrittenFile], properties: CommitProperties
) -> None:
    """Append files and set the position, in one commit. Raises what `fenced` does."""
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
    """Replace all files and columns of the table, and set the position, in one commit.

    Commits of the protocol and of the declared bounds may come before and after it. Raises what `fenced`
    does.
    """
    if (obstacle := find_fixed_columns(table)) is not None:
        raise _prevented(table, obstacle)
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
    """Replace all files and columns of the table, and its partition columns, in one commit.

    deltalake's overwrite keeps the old partition columns without an error. Raises LakeTableError if the
    table's protocol requires more of writers than this package supports.
    """
    if not can_commit(table):
        raise LakeTableError(
            f"{table.table_uri}: its partitioning cannot be changed, because the table's protocol"
            " requires features that this package cannot write",
            f"set partition_by back; or move {table.table_uri} away and keep it (with history: true it has"
            f" the current versions), then {errors.RESNAPSHOT}",
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
    # Unlike the other methods that commit, this one does not move the handle to the new version.
    table.update_incremental()


def bounded_columns(table: DeltaTable, app: str) -> list[str]:
    """Return the columns that have bounds in all files of the table. Every new file has to have them, too.

    If an earlier version of this package created the table, they are not declared: then they are found in the
    log, and declared in a separate commit without data. Raises what `fenced` does.
    """
    declared = declared_columns(table)
    if declared is not None:
        return declared
    found = columns_found_bounded(table)
    _declare_bounds(table, app, found)
    return found


def narrow_bounds(table: DeltaTable, app: str, keeping: Collection[str]) -> list[str]:
    """Remove the columns that are not in `keeping` from the declared bounds, and return the remaining ones.

    Call this before adding files that lack bounds of some columns. Makes a separate commit without data if
    anything changes. Raises what `fenced` does.
    """
    declared = bounded_columns(table, app)
    kept = [name for name in declared if name in keeping]
    if kept != declared:
        _declare_bounds(table, app, kept)
    return kept


def _declare_bounds(table: DeltaTable, app: str, columns: Sequence[str]) -> None:
    """Declare the columns that have bounds in all files, in a commit without data.

    The commit repeats the position, if there is one, so that it fences concurrent writers of the table.
    """
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
    """Return the columns that have bounds in all of these files."""
    return bounded_in_all(schema, [file.stats_json for file in files])


def allow_timestamp_without_tz(table: DeltaTable, schema: pa.Schema) -> None:
    """Declare the table feature timestampNtz if `schema` needs it and the table lacks it.

    This is a separate commit without data, as an overwrite cannot declare the feature. Raises FencedError if
    another process commits at the same time.
    """
    needed = any(_has_timestamp_without_tz(field.type) for field in schema)
    if not needed or "timestampNtz" in (table.protocol().writer_features or []):
        return
    before = table.version()
    properties = CommitProperties(custom_metadata=commit_token())

    def add() -> None:
        with committing(table, properties):
            table.alter.add_feature(
                TableFeatures.TimestampWithoutTimezone,
                allow_protocol_versions_increase=True,
                commit_properties=properties,
            )

    try_commit(table, add)
    if table.version() != before + 1:
        raise FencedError(f"{table.table_uri}: another process has written this table", FENCED_HINT)


def _has_timestamp_without_tz(lake_type: pa.DataType) -> bool:
    if pa.types.is_nested(lake_type):
        fields = (lake_type.field(index) for index in range(lake_type.num_fields))
        return any(_has_timestamp_without_tz(field.type) for field in fields)
    return bool(pa.types.is_timestamp(lake_type) and lake_type.tz is None)


def commented(schema: pa.Schema, comments: Mapping[str, str]) -> pa.Schema:
    """Return the schema with comments of its columns, in the form that deltalake stores in the metadata."""
    about = {name: {_COMMENT: comment} for name, comment in comments.items()}
    return pa.schema([field.with_metadata(about.get(field.name, field.metadata)) for field in schema])


def commit_comments(table: DeltaTable, app: str, position: LSN, comments: Comments) -> None:
    """Set the comments of the table and its columns to exactly these, in a commit without data.

    Does nothing if they are set already. Logs a warning and does nothing if the table's protocol requires
    more of writers than this package supports. Raises what `fenced` does.
    """
    fields = [_with_comment(field, comments.columns.get(field.name)) for field in table.schema().fields]
    is_current = (table.metadata().description or "") == comments.table
    if is_current and fields == table.schema().fields:
        return
    if not can_commit(table):
        log.warning(
            "%s keeps its description, and what comments it has: its protocol demands more of"
            " writers than this program does",
            table.table_uri,
        )
        return
    action = metadata_action(table, {}, Schema(fields))
    action["metaData"].pop("description", None)
    action["metaData"] |= {"description": comments.table} if comments.table else {}
    properties = commit_properties(app, position, "comments")
    fenced(table, app, position, lambda: commit_actions(table, "SET COMMENTS", properties, [action]))


def _with_comment(field: Field, comment: str | None) -> Field:
    others = {key: value for key, value in field.metadata.items() if key != _COMMENT}
    wanted = {**others, _COMMENT: comment} if comment else others
    return field if wanted == field.metadata else Field(field.name, field.type, field.nullable, wanted)
