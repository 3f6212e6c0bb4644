"""The commit of a snapshot, which creates a lake table or replaces all of its rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import DeltaError

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import (
    FencedError,
    LakeChangedError,
    LakeError,
    LakeTableError,
    OvertakenError,
)
from airflow_provider_pgrepl.replication.delta.table import create_delta, has_delta
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.quantities import show_list
from airflow_provider_pgrepl.replication.settings.lake import is_object_store
from airflow_provider_pgrepl.replication.storage import (
    is_storage_error,
    open_storage,
    read_commit_actions,
    storage_error,
    storage_errors,
)

from .commit import STORE_CHECKPOINT_EVERY, bounded, commit_properties, replace_files
from .live_files import COMMIT_METADATA, app_version, settle_log
from .ownership import ADOPTED_APP, check_replaceable, table_marks
from .parquet_writer import WrittenFile, partition_columns
from .statistics import declaration
from .table import (
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

log = logging.getLogger(__name__)

RESYNC = "resync"
"""The kind of a commit after which a table has the rows of a snapshot, in its earlier files where it can."""
ADOPTION = "adoption"
"""The kind of the commit with which a table that another program has written becomes this pipeline's."""
SNAPSHOT_KINDS = ("snapshot", RESYNC, ADOPTION)
"""The kinds of the commits after which a table has the rows of a snapshot."""
_NAMED = 5
_ATTEMPTS = 3
# Consistent points need old log entries, which Delta would delete. Maintenance cleans the log instead.
_TABLE_PROPERTIES = {"delta.enableExpiredLogCleanup": "false"}
_STORE_PROPERTIES = {"delta.checkpointInterval": str(STORE_CHECKPOINT_EVERY)}
"""For deltalake's commits. This package's own commits use the same number."""


def table_properties(uri: str) -> dict[str, str]:
    """Return the properties that every lake table gets, except the declared bounds."""
    return {**_TABLE_PROPERTIES, **(_STORE_PROPERTIES if is_object_store(uri) else {})}


@dataclass(frozen=True)
class ForeignCommit:
    """A commit of another program that changed data."""

    version: int
    operation: str


@dataclass(frozen=True)
class Writers:
    """The commits by which other programs changed a table's data, as far back as the log goes.

    `foreign`: those since the last snapshot or adoption; newest first. `is_complete`: the log
    reaches back to that snapshot, or to the first version asked for.
    """

    foreign: tuple[ForeignCommit, ...] = ()
    is_complete: bool = True

    @property
    def versions(self) -> str:
        """The versions that other programs committed, as text, oldest first, at most five of them named."""
        return show_list([str(commit.version) for commit in reversed(self.foreign)], _NAMED)


def check_writers(table: DeltaTable, name: TableName, since: int | None) -> None:
    """Raise LakeChangedError if another program changed data after the version `since` (None: ever)."""
    uri, newest = table.table_uri, int(table.version())
    if not (found := read_writers(uri, newest, since).foreign):
        return
    writers = read_writers(uri, newest)
    raise LakeChangedError(
        f"{name}: version {found[0].version} of the lake table was not written by this pipeline"
        f" (operation {found[0].operation})",
        f"stop every other writer of this lake. To keep the rows that it wrote (versions {writers.versions}),"
        f" copy the table out of the lake. A new copy replaces them, and version {newest} can be read until"
        f" maintenance deletes its files. Then {errors.resnapshot(name)}",
    )


def warn_of_foreign_rows(table: DeltaTable) -> None:
    """Log a warning with the versions of other programs whose rows a snapshot is about to replace, if any."""
    newest = int(table.version())
    if (writers := read_writers(table.table_uri, newest)).foreign:
        log.warning(
            "%s: the snapshot replaces rows that another program wrote (versions %s). Version %d can be read"
            " until maintenance deletes its files",
            *(table.table_uri, writers.versions, newest),
        )


def warn_of_rows_of_lake(uri: str, table: TableName, settings: Collection[str]) -> None:
    """Log a warning that a snapshot is about to replace rows that only the lake has.

    Logs nothing for a new table. `settings`: those by which the lake keeps rows that the source has deleted.
    """
    if settings and has_delta(uri):
        log.warning(
            "%s: the snapshot replaces the rows that only the lake has (%s). Version %d can be read until"
            " maintenance deletes its files",
            *(table, ", ".join(settings), int(open_table(uri).version())),
        )


def read_writers(uri: str, newest: int, since: int | None = None) -> Writers:
    """Return the commits by which other programs changed a table after the version `since` (None: any).

    Reads back from `newest` to the last snapshot, or to the first log entry that maintenance has kept.
    """
    foreign: list[ForeignCommit] = []
    for version in range(newest, -1 if since is None else since, -1):
        actions = _read(uri, version)
        if actions is None:
            return Writers(tuple(foreign), is_complete=False)
        if is_snapshot(actions):
            break
        if (found := foreign_commit(version, actions)) is not None:
            foreign.append(found)
    return Writers(tuple(foreign))


def foreign_commit(version: int, actions: Sequence[dict[str, Any]]) -> ForeignCommit | None:
    """Return a ForeignCommit if another program made this commit and it changed data, else None.

    Commits that change no data (compaction, vacuum, properties) are allowed to any program.
    """
    about = _info(actions)
    if _kind(about) is None and any(map(_changes_data, actions)):
        return ForeignCommit(version, str(about.get("operation", "unknown operation")))
    return None


def is_snapshot(actions: Sequence[dict[str, Any]]) -> bool:
    """Return True if these are the actions of a commit of this package after which no row is another
    program's: a snapshot's, which replaces all rows, or an adoption's, which has compared them."""
    return _kind(_info(actions)) in ("snapshot", ADOPTION)


def _info(actions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next((action["commitInfo"] for action in actions if "commitInfo" in action), {})


def _read(uri: str, version: int) -> list[dict[str, Any]] | None:
    """Return the actions of a commit; None if its log file does not exist."""
    filesystem, root = open_storage(uri)
    with storage_errors(uri, "read"):
        try:
            return read_commit_actions(filesystem, root, version)
        except FileNotFoundError:
            return None


def _kind(info: dict[str, Any]) -> str | None:
    """Return the kind in this package's metadata of a commit; None for a commit of another program."""
    about = info.get(COMMIT_METADATA)
    if not isinstance(about, str):
        return None
    try:
        return str(json.loads(about)["kind"])
    except (ValueError, KeyError, TypeError):
        return None


def _changes_data(action: dict[str, Any]) -> bool:
    return any(action[kind].get("dataChange", True) for kind in ("add", "remove") if kind in action)


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
    """Make the table consist of exactly `files`, in one commit, and return its version.

    The commit also records the time of the snapshot's export and the relation version of its rows. Creates
    the table, or replaces all rows and columns of an existing one. If another program commits at the same
    time, the replacement is tried up to 3 times.

    Raises LakeTableError for a Delta table that is not this pipeline's. Raises FencedError if the table has a
    later epoch or a position after `position`, or if another process of this pipeline writes it at the same
    time.
    """
    app = app_id(pipeline_name, epoch)
    older = earlier_apps(pipeline_name, epoch)
    others = snapshot_marks(uri, pipeline_name, epoch, exported_at, relation_version)
    properties = commit_properties(app, position, "snapshot", exported_at, others)
    check_replaceable(uri, pipeline_name)
    # Set torn commits aside, so that a table damaged by a crash of the host can be replaced as well.
    settle_log(uri, pipeline_name)
    if not has_delta(uri):
        return create_table(uri, schema, files, properties)
    for left in reversed(range(_ATTEMPTS)):
        table = open_table(uri)
        check_ours(table, app, older, position)
        if app_version(table, ADOPTED_APP):
            # No file of another program is left.
            properties = commit_properties(app, position, "snapshot", exported_at, {**others, ADOPTED_APP: 0})
        warn_of_foreign_rows(table)
        try:
            replace_files(table, app, position, files, schema, properties)
            break
        except OvertakenError:
            # Try again: the files replace all rows, so commits of another program in between do not matter.
            if not left:
                raise
    return int(table.version())


def snapshot_marks(
    uri: str,
    pipeline_name: str,
    epoch: Epoch,
    exported_at: datetime | None = None,
    relation_version: int | None = None,
) -> dict[str, int]:
    """Return the app IDs, except the position, of a commit after which a table has the rows of a snapshot.

    They close the earlier epochs. Raises LakeUnavailableError.
    """
    marks = {**dict.fromkeys(earlier_apps(pipeline_name, epoch), CLOSED), **table_marks(uri)}
    if relation_version is not None:
        marks |= {RELATION_APP: relation_version, BEFORE_APP: relation_version}
    if exported_at is not None:
        marks[EXPORTED_APP] = round(exported_at.timestamp() * 1_000_000)
    return marks


def create_table(
    uri: str, schema: pa.Schema, files: Sequence[WrittenFile], properties: CommitProperties
) -> int:
    """Create a lake table with its first commit, and return its version, 0.

    Raises FencedError if another process has created the table, LakeUnavailableError, LakeError.
    """
    bounds = declaration(bounded(files, schema))
    failed, unavailable = "", None
    try:
        create_delta(
            uri,
            schema,
            {**table_properties(uri), **bounds},
            properties,
            files=[file.add_action() for file in files],
            partition_by=partition_columns(schema),
        )
    except (DeltaError, OSError) as error:
        failed = type(error).__name__
        if is_storage_error(error) and not isinstance(error, PermissionError):
            unavailable = storage_error(f"cannot create the lake table {uri}", error)
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
    """Raise an error unless a snapshot at `position` may replace the table.

    Raises LakeTableError if no commit of the table has the app ID `app` or one of `older`. Raises FencedError
    if the table has a later epoch, or a position after `position`.
    """
    current = read_position(table, app)
    if current is None and all(app_version(table, old) is None for old in older):
        raise LakeTableError(
            f"{table.table_uri} is a Delta table that this pipeline has not written",
            "give the pipeline a lake root of its own, or move that table away",
        )
    if current is not None and current > position:
        raise FencedError(
            f"{table.table_uri} is at {current}, beyond this snapshot's {position}: a newer one was taken",
            FENCED_HINT,
        )
