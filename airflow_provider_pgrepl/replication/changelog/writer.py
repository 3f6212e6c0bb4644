"""Writer of the changelog: first part files, then one commit that adds them.

The writer commits under the receiver's app ID. The fence of another writer, a commit under the same app ID,
makes the next commit of the earlier writer fail with FencedError.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from airflow_provider_pgrepl.errors import ChangelogError, FencedError, LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.delta import recovery
from airflow_provider_pgrepl.replication.delta.log import (
    added_action,
    commit_token,
    committing,
    flush_landed,
    metadata_action,
)
from airflow_provider_pgrepl.replication.delta.single_writer_log import AppLog, FencedCommitError
from airflow_provider_pgrepl.replication.delta.table import create_delta
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.storage import (
    Output,
    delete_files,
    durable,
    is_storage_error,
    make_folders,
    open_storage,
    raise_if_store_unavailable,
    storage_error,
)

from .layout import (
    AT_REST_APP,
    DURABLE_APP,
    EPOCH_APP,
    LAKE_APP,
    METADATA_KEY,
    PARTITION,
    PUBLISHED_APP,
    RECEIVER_APP,
    ROW_SCHEMA,
    SHARED_APP,
    TABLE_SCHEMA,
    TORN_DOWN_APP,
    UPKEEP_APP,
    CommitRecord,
    EpochRecord,
    hour_of,
)
from .reader import open_changelog, read_sequence, read_token

_ROW_GROUP_ROWS = 65_536
_SMALL_GROUP_ROWS = 1_024
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NOT_OURS = (PermissionError, NotADirectoryError, FileExistsError)
# There are up to 86,400 commits a day. Opening the table reads all commits since the last checkpoint, in a
# store with one GET each. A checkpoint costs a rewrite of the file list.
_CHECKPOINT_EVERY = 200
_TABLE_PROPERTIES = {
    "delta.checkpointInterval": str(_CHECKPOINT_EVERY),
    "delta.logRetentionDuration": "interval 30 days",
    "delta.enableExpiredLogCleanup": "false",
    # The columns for which each part has bounds: readers take a missing bound for "no row matches".
    "delta.dataSkippingStatsColumns": "epoch,commit_lsn,relation_id,commit_ts",
}


@dataclass(frozen=True)
class Fence:
    """The facts about the source that a fence records: the token that it also stores, and its timeline."""

    token: int
    timeline: int


CheckSource = Callable[[int, EpochRecord, LSN], Fence]
"""Returns the content of the fence, given the changelog's token, epoch record and durable LSN."""


@dataclass(frozen=True)
class Part:
    """A changelog file that is written, and not yet part of a commit."""

    path: str
    size: int
    value_bytes: int
    rows: int
    stats: str
    relations: frozenset[int]
    hour: str

    def add_action(self, *, changes_data: bool = True) -> AddAction:
        """Return the `add` action for the file. `changes_data`: False if its rows are not new."""
        now = int(time.time() * 1000)
        return AddAction(self.path, self.size, {PARTITION: self.hour}, now, changes_data, self.stats)


class PartFolder:
    """The writer of part files, in one folder for each hour below the changelog's root."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._filesystem, self._root = open_storage(uri)
        self._folders: set[str] = set()

    def write(self, rows: pa.Table, hour: str | None = None) -> Part:
        """Write rows (ROW_SCHEMA, in stream order) as one Parquet file, sorted by relation.

        The file is on disk when this returns. `hour`: the partition, which is the hour in which the rows were
        received; default: the current hour. Raises OSError.
        """
        rows, relations, bounds = _sort_by_relation(rows)
        hour = hour or hour_of(datetime.now(UTC))
        # The name holds the size of the values: readers bound their memory by it, and a compressed file does
        # not show it.
        path = f"{hour}/{uuid.uuid4().hex}-{rows.nbytes}.parquet"
        self._make_folder(hour)
        try:
            size = self._write(path, rows, bounds)
        except OSError:
            # Delete a partly written file: disk space may be short.
            with suppress(OSError):
                delete_files(self._filesystem, [f"{self._root}/{path}"])
            raise
        return Part(path, size, rows.nbytes, rows.num_rows, _stats(rows), frozenset(relations), hour)

    def discard(self, parts: Iterable[Part]) -> None:
        """Delete parts that will not be committed. Storage errors are ignored."""
        with suppress(OSError):
            delete_files(self._filesystem, [f"{self._root}/{part.path}" for part in parts])

    def _write(self, path: str, rows: pa.Table, bounds: list[int]) -> int:
        """Write and flush a file, and return its size in bytes."""
        with Output(self._filesystem, f"{self._root}/{path}", rows.nbytes) as file:
            with pq.ParquetWriter(
                file.stream,
                ROW_SCHEMA,
                compression="zstd",
                compression_level=1,
                use_dictionary=["epoch", "relation_id", "relation_version", "op"],
                write_statistics=["epoch", "commit_lsn", "commit_ts", "relation_id", "op"],
            ) as writer:
                for start, stop in _row_groups(bounds):
                    writer.write_table(rows.slice(start, stop - start), row_group_size=_ROW_GROUP_ROWS)
            size = file.tell()
        durable.flush_files(self._uri, [path])
        return size

    def _make_folder(self, hour: str) -> None:
        if hour not in self._folders:
            make_folders(self._filesystem, f"{self._root}/{hour}")
            self._folders.add(hour)


def _sort_by_relation(rows: pa.Table) -> tuple[pa.Table, list[int], list[int]]:
    """Return the rows sorted by relation, in stream order within each; the relations; and their bounds.

    The bounds are the first row of each relation, and the number of rows.
    """
    ids = rows["relation_id"].to_numpy()
    order = np.argsort(ids, kind="stable")
    if not np.array_equal(order, np.arange(len(order))):
        rows, ids = rows.take(pa.array(order)), ids[order]
    relations, starts = np.unique(ids, return_index=True)
    return rows, relations.tolist(), [*starts.tolist(), rows.num_rows]


def _row_groups(bounds: list[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of each row group: one relation each; adjacent tiny relations share a group."""
    groups, start = [], 0
    for index, stop in enumerate(bounds[1:], 1):
        following = bounds[index + 1] - stop if index + 1 < len(bounds) else _SMALL_GROUP_ROWS
        if stop - start >= _SMALL_GROUP_ROWS or following >= _SMALL_GROUP_ROWS:
            groups.append((start, stop))
            start = stop
    return groups


def _stats(rows: pa.Table) -> str:
    ranges: dict[str, Any] = {
        name: pc.min_max(rows[name]).as_py() for name in ("epoch", "commit_lsn", "relation_id")
    }
    least = {name: bounds["min"] for name, bounds in ranges.items()}
    most = {name: bounds["max"] for name, bounds in ranges.items()}
    times = pc.min_max(rows["commit_ts"].cast(pa.int64())).as_py()
    if times["min"] is not None:
        shown = _shown_time(times["min"]), _shown_time(-(-times["max"] // 1000) * 1000)
        if None not in shown:
            least["commit_ts"], most["commit_ts"] = shown
    nulls = {**dict.fromkeys(ranges, 0), "commit_ts": rows["commit_ts"].null_count}
    return json.dumps(
        {"numRecords": rows.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}
    )


def _shown_time(microseconds: int) -> str | None:
    """Return a timestamp rounded down to milliseconds, the precision of some readers, as ISO 8601.

    Returns None for a year that cannot be represented.
    """
    try:
        moment = _EPOCH + timedelta(milliseconds=microseconds // 1000)
    except OverflowError:
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def create_changelog(uri: str, record: EpochRecord, token: int = 0, former_lake: str = "") -> None:
    """Create the changelog with its first epoch, in one commit.

    `token`: that of the source, 0 if it has none. `former_lake`: the ID of a lost changelog to which the
    tables in the lake belong. Raises LakeUnavailableError if the storage is full or unreachable, LakeError
    if the changelog cannot be created at this location.
    """
    try:
        create_delta(
            uri,
            TABLE_SCHEMA,
            _TABLE_PROPERTIES,
            _epoch_properties(record, 1, token, former_lake),
            partition_by=[PARTITION],
            description=record.to_json(),
        )
    except (DeltaError, OSError) as error:
        if is_storage_error(error) and not isinstance(error, _NOT_OURS):
            raise storage_error(f"the changelog cannot be created under {uri}", error) from error
        raise LakeError(
            f"the changelog cannot be created under {uri}: {error.__class__.__name__}",
            "check that the lake path exists, is writable and is not used by something else",
        ) from error


def begin_epoch(uri: str, record: EpochRecord, token: int = 0) -> None:
    """Start a new epoch in an existing changelog, in one commit that also fences any running receiver.

    `token`: that of the source, 0 if it has none. Raises ChangelogError, FencedError, LakeUnavailableError.
    """
    table = open_changelog(uri)
    sequence = (table.transaction_version(RECEIVER_APP) or 0) + 1
    try:
        properties = _epoch_properties(record, sequence, token)
        with committing(table, properties):
            table.alter.set_table_description(record.to_json(), commit_properties=properties)
        durable.flush_newest(uri, int(table.version()))
    except CommitFailedError as error:
        raise FencedError(
            "the changelog was written by another process while a new epoch began", "run the command again"
        ) from error
    except (DeltaError, OSError) as error:
        raise _unwritable(error) from error


def describe(uri: str, record: EpochRecord) -> None:
    """Replace the record of the current epoch by a more complete one. A running receiver is fenced.

    Raises ChangelogError, FencedError, LakeUnavailableError.
    """
    table = open_changelog(uri)
    try:
        table.alter.set_table_description(record.to_json())
        durable.flush_newest(uri, int(table.version()))
    except CommitFailedError as error:
        raise FencedError(
            "another process wrote to the changelog while its record was completed", "run the command again"
        ) from error
    except (DeltaError, OSError) as error:
        raise _unwritable(error) from error


def _epoch_properties(
    record: EpochRecord, sequence: int, token: int, former_lake: str = ""
) -> CommitProperties:
    commit = CommitRecord("epoch", record.epoch, record.consistent_point)
    return CommitProperties(
        custom_metadata={**commit.to_metadata(), **commit_token()},
        app_transactions=[
            Transaction(RECEIVER_APP, sequence),
            Transaction(SHARED_APP, token),
            *([Transaction(f"{LAKE_APP}{former_lake}", 1)] if former_lake else []),
            Transaction(AT_REST_APP, sequence),
            *_apps(commit, 0),
        ],
    )


def _apps(commit: CommitRecord, published: int) -> list[Transaction]:
    return [
        Transaction(EPOCH_APP, commit.epoch),
        Transaction(PUBLISHED_APP, published),
        # Keep this transaction last: its presence shows that a commit is complete.
        Transaction(DURABLE_APP, commit.durable_lsn),
    ]


def mark(uri: str, marks: Mapping[str, int] | None = None, *, wanted_lsn: LSN | None = None) -> None:
    """Commit a marker without data, so that the version increases and the applier checks its tables again.

    `marks`: versions of app IDs that the commit sets. `wanted_lsn`: the receiver is to make the changelog
    durable past this LSN without delay, also if the source is idle. If commits of a receiver increase the
    version first, nothing is committed, and no error is raised. Raises ChangelogError, LakeUnavailableError.
    """
    table = open_changelog(uri)
    version = int(table.version())
    try:
        _commit_marker(table, [Transaction(*one) for one in (marks or {}).items()], wanted_lsn)
    except CommitFailedError as error:
        if int(open_changelog(uri).version()) <= version:
            raise _unwritable(error) from error
    except (DeltaError, OSError) as error:
        raise _unwritable(error) from error


def mark_torn_down(uri: str) -> None:
    """Record that a teardown ends the epoch, whose source may then lack the slot, the token and the state.

    The next commit of a receiver makes the record obsolete. Raises ChangelogError, LakeUnavailableError.
    """
    table = open_changelog(uri)
    try:
        _commit_marker(table, [Transaction(TORN_DOWN_APP, read_sequence(table))])
    except (DeltaError, OSError) as error:
        raise _unwritable(error) from error


def _commit_marker(
    table: DeltaTable, apps: list[Transaction] | None = None, wanted_lsn: LSN | None = None
) -> None:
    commit = CommitRecord(
        "marker",
        Epoch(table.transaction_version(EPOCH_APP) or 0),
        LSN(table.transaction_version(DURABLE_APP) or 0),
        wanted_lsn=wanted_lsn or LSN(0),
    )
    properties = CommitProperties(
        custom_metadata={**commit.to_metadata(), **commit_token()}, app_transactions=apps
    )
    table.create_write_transaction(
        [], mode="append", schema=table.schema(), partition_by=[PARTITION], commit_properties=properties
    )
    # Also flush commits that an earlier writer may have left: later only the newest commits are flushed.
    flush_landed(table, properties)


def find_torn_changelog(uri: str) -> recovery.LogDamage:
    """Return the commits and checkpoints that were not completely on disk when the host stopped.

    Their changes are not lost: the slot still has them. Raises LakeError, LakeUnavailableError.
    """
    return recovery.find_torn(uri, RECEIVER_APP, _is_whole)


def _is_whole(actions: recovery.Actions) -> bool:
    """Return True if a commit is complete: a receiver's commit ends with the durable LSN.

    Markers, and commits without this package's metadata, count as complete.
    """
    about: dict[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    if METADATA_KEY not in about:
        return True
    commit = CommitRecord.from_json(about[METADATA_KEY])
    apps = {action["txn"]["appId"]: action["txn"]["version"] for action in actions if "txn" in action}
    return commit.kind == "marker" or apps.get(DURABLE_APP) == commit.durable_lsn


class ChangelogWriter:
    """The only writer of the changelog. Opening it commits a fence.

    After that, `durable_lsn` is the LSN up to which the changelog holds every change.

    `after`: the `sequence` of the writer that this one continues. `check_source`: called with the changelog's
    token, record and durable LSN; checks that the source continues them, and returns what the fence records.

    Raises ChangelogError if there is no changelog, FencedError if another writer took over or committed since
    `after`, LakeUnavailableError for a storage error, and the errors of `check_source`.
    """

    def __init__(self, uri: str, after: int | None = None, check_source: CheckSource | None = None) -> None:
        self._uri = uri
        table = open_changelog(uri)
        self._parts = PartFolder(uri)
        self.epoch_record = EpochRecord.from_json(table.metadata().description)
        try:
            self._log = AppLog(uri, table, RECEIVER_APP, _CHECKPOINT_EVERY)
        except OSError as error:
            raise _unwritable(error) from error
        if after is not None and self.sequence != after:
            raise _fenced()
        self.durable_lsn = LSN(table.transaction_version(DURABLE_APP) or 0)
        self.published = table.transaction_version(PUBLISHED_APP) or 0
        """A hash of everything that decides what is published, recorded with each commit; 0 if unknown."""
        self.token = read_token(table)
        """The token of the last fence or renewal; 0 if the source has none."""
        # These are of the opened version: the fence fails if another receiver has committed since.
        before, record = self.token, self.epoch_record
        found = Fence(before, record.timeline)
        if check_source is not None:
            found = check_source(before, record, self.durable_lsn)
        self._flush_earlier()
        apps = [Transaction(SHARED_APP, found.token)] if found.token != before else []
        self._commit(self._follow(table, found), CommitRecord("fence", self.epoch, self.durable_lsn), apps)
        self.token = found.token

    @property
    def epoch(self) -> Epoch:
        return self.epoch_record.epoch

    @property
    def sequence(self) -> int:
        """The number of commits by receivers and by starts of epochs, as of this writer's last commit."""
        return self._log.sequence

    @property
    def version(self) -> int:
        """The Delta version of this writer's last commit."""
        return self._log.version

    def _follow(self, table: DeltaTable, found: Fence) -> list[dict[str, Any]]:
        """Return the actions that record another timeline of the source, in the same commit as the fence.

        The next changes come from that timeline, so that the durable LSN must not advance before.
        """
        if found.timeline == self.epoch_record.timeline:
            return []
        self.epoch_record = replace(self.epoch_record, timeline=found.timeline)
        # The source may have lost the last changes of its catalog, so compare what is published again.
        self.published = 0
        return [metadata_action(table, {}, description=self.epoch_record.to_json())]

    def write_part(self, rows: pa.Table) -> Part:
        """Write rows (ROW_SCHEMA, in stream order) as one Parquet file, sorted by relation.

        The file is on disk when this returns. Raises LakeUnavailableError.
        """
        try:
            return self._parts.write(rows)
        except OSError as error:
            raise _unwritable(error) from error

    def append(
        self,
        parts: Sequence[Part],
        *,
        durable_lsn: LSN,
        first_lsn: LSN,
        last_lsn: LSN,
        last_commit_us: int,
        kind: Literal["data", "gap"] = "data",
    ) -> None:
        """Make whole transactions, or the gap of a skipped one, durable: add all parts in one commit.

        Raises FencedError or LakeUnavailableError.
        """
        relations = frozenset[int]().union(*(part.relations for part in parts))
        commit = CommitRecord(
            kind,
            self.epoch,
            durable_lsn,
            first_lsn,
            last_lsn,
            last_commit_us,
            tuple(sorted(relations)),
            sum(part.value_bytes for part in parts),
            sum(part.rows for part in parts),
        )
        self._commit([added_action(part.add_action()) for part in parts], commit)

    def append_between(self, rows: pa.Table) -> None:
        """Commit rows that belong to no transaction, at the durable LSN, before the next transactions.

        Raises FencedError or LakeUnavailableError.
        """
        place = self.durable_lsn
        self.append(
            [self.write_part(rows)], durable_lsn=place, first_lsn=place, last_lsn=place, last_commit_us=0
        )

    def record_keepalive(self, lsn: LSN) -> None:
        """Set the durable LSN to `lsn` in a commit without data: no published change was committed up to it.

        Raises FencedError or LakeUnavailableError.
        """
        self._commit([], CommitRecord("keepalive", self.epoch, lsn))

    def give_sign_of_life(self, token: int, lsn: LSN) -> None:
        """Commit without data, so that other processes see that this writer is running.

        `token`: a new token, which the source stores next to the last one, or the last one again. `lsn`: as
        in `record_keepalive`, or the durable LSN. Raises FencedError or LakeUnavailableError.
        """
        apps = [Transaction(SHARED_APP, token)] if token != self.token else []
        self._commit([], CommitRecord("keepalive", self.epoch, lsn), apps)
        self.token = token

    def rest(self) -> None:
        """Record, as the last commit, that this writer ends. Raises FencedError or LakeUnavailableError."""
        commit = CommitRecord("keepalive", self.epoch, self.durable_lsn)
        self._commit([], commit, [Transaction(AT_REST_APP, self.sequence + 1)])

    def _flush_earlier(self) -> None:
        """Flush the commits of an earlier writer that died before flushing them: they count from now on."""
        try:
            durable.flush_newest(self._uri)
        except OSError as error:
            raise _unwritable(error) from error

    def _commit(
        self, actions: list[dict[str, Any]], commit: CommitRecord, more_apps: Iterable[Transaction] = ()
    ) -> None:
        # The durable LSN comes last.
        apps = [*more_apps, *_apps(commit, self.published)]
        try:
            # The parts are already on disk.
            self._log.commit("WRITE", actions, metadata=commit.to_metadata(), apps=apps, with_files=False)
        except FencedCommitError:
            raise _fenced() from None
        except (DeltaError, OSError) as error:
            raise _unwritable(error) from error
        self.durable_lsn = commit.durable_lsn


def _fenced() -> FencedError:
    return FencedError("another receiver took over the changelog; this one stops")


def _unwritable(error: Exception) -> LakeUnavailableError:
    return storage_error("the changelog cannot be written", error)


def removal(path: str, size: int, hour: str) -> RemoveAction:
    """Return the `remove` action for a file of an hour. The file itself is kept until a vacuum."""
    # Set dataChange to false. deltalake rejects an append through a handle that is older than a commit that
    # changes data; the receiver would take that rejection for a fence and exit.
    return RemoveAction(path, False, int(time.time() * 1000), size, {PARTITION: hour})


def replace_files(
    table: DeltaTable,
    removes: Sequence[RemoveAction],
    parts: Sequence[Part] = (),
    *,
    metadata: Mapping[str, str],
    apps: Sequence[Transaction] = (),
) -> bool:
    """Remove files from the table and add others, in one commit that is on disk when this returns.

    `told`: the commit's metadata. `apps`: app transactions in addition to UPKEEP_APP, by which Delta rejects
    the commit if another maintenance commit came first: two commits that replace the same file would
    duplicate its rows.

    Updates `table` to the newest version. Returns True if no other maintenance commit has followed. Raises
    ChangelogError, LakeUnavailableError; the commit may nevertheless exist.
    """
    sequence = (table.transaction_version(UPKEEP_APP) or 0) + 1
    try:
        properties = CommitProperties(
            custom_metadata={**metadata, **commit_token()},
            app_transactions=[Transaction(UPKEEP_APP, sequence), *apps],
        )
        with committing(table, properties):
            table.create_write_transaction(
                [*removes, *(part.add_action(changes_data=False) for part in parts)],
                mode="append",
                schema=table.schema(),
                partition_by=[PARTITION],
                commit_properties=properties,
            )
        flush_landed(table, properties)
        table.update_incremental()
    except CommitFailedError as error:
        raise LakeUnavailableError(
            "another process changed the changelog's list of files at the same time",
            "nothing was changed; the next maintenance run continues",
        ) from error
    except (DeltaError, OSError) as error:
        raise_if_store_unavailable("the changelog's list of files cannot be changed", error)
        raise ChangelogError(
            f"the changelog's list of files cannot be changed: {type(error).__name__}"
        ) from error
    return bool(table.transaction_version(UPKEEP_APP) == sequence)
