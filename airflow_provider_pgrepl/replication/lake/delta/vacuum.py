"""Vacuum of a Delta table: the lifetimes of its files, and the deletion of files and log entries.

deltalake's own vacuum was measured and is not used. It takes 13 ms for each version to keep, of which there
may be thousands, supports no retention below an hour, and writes two commits each time. This one writes none.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from deltalake.exceptions import DeltaError
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.settings.tables import PARTITION
from airflow_provider_pgrepl.replication.state.progress import TableBytes
from airflow_provider_pgrepl.replication.storage import (
    delete_files,
    durable,
    has_commit,
    is_store,
    log_path,
    open_storage,
    raise_if_store_unavailable,
    read_commit_actions,
)

from .live_files import LiveFile, apps_in_checkpoint, commit_fingerprint, has_retention, live_files
from .ownership import (
    TRANSACTION_RETENTION,
    Owner,
    Ownership,
    is_link,
    is_written_name,
    read_ownership,
    table_files,
)
from .snapshot_commit import ForeignCommit, foreign_commit, is_snapshot
from .table import spark_path

log = logging.getLogger(__name__)

# This includes the checksum files that Hadoop writes next to files, as .00000000000000000007.json.crc
_LOG_ENTRY = re.compile(r"\.?(\d{20})\.(.+)")
_COMMIT, _CHECKPOINT = "json", "checkpoint.parquet"
_NOTHING_READ = -1
_DATA = ("parquet", "bin")
_PARTITION_FOLDER = f"{PARTITION}="


@dataclass(frozen=True)
class _Lifetime:
    """The lifetime of a removed file: the versions from `added` up to, not including, `removed`.

    `removed_ms`: the time of the removal by the writer's clock, in milliseconds since 1970. `size`: bytes.
    """

    added: int
    removed: int
    removed_ms: int
    size: int = 0

    def holds_any(self, versions: Sequence[int]) -> bool:
        """Return True if one of `versions`, which are in ascending order, needs the file."""
        index = bisect_left(versions, self.added)
        return index < len(versions) and versions[index] < self.removed


@dataclass(frozen=True)
class _LogEntry:
    version: int
    name: str
    kind: str
    written: datetime


class TableFiles:
    """The files of one Delta table, and their lifetimes, read from its log commit by commit.

    Keep the instance between uses: it reads only new commits then. All methods raise LakeTableError if the
    table cannot be read, LakeUnavailableError if the storage is unavailable.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._filesystem, self._root = open_storage(uri)
        self._version = _NOTHING_READ
        self._owner: Ownership | None = None
        self._live: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._removed: dict[str, _Lifetime] = {}
        self._vector_of: dict[str, str] = {}
        self._written = 0
        self._fingerprint = ""
        self.foreign: ForeignCommit | None = None
        """The newest commit of another program since the last snapshot, as of the last read of the log."""
        self.measured = TableBytes(0, 0, 0)
        """The result of the last `measure`."""

    def reason_to_leave(self, pipeline_name: str) -> str | None:
        """Return why nothing may be deleted here; None if the log shows that the pipeline writes the table.

        Reads the ownership again if the table was replaced or reverted. Raises LakeTableError if the owner
        cannot be determined and the folder is not a symbolic link.
        """
        if self._owner is None or not self._is_as_left():
            self._owner = read_ownership(self._uri, pipeline_name)
        if self._owner.owner is Owner.UNKNOWN and not is_link(self._uri):
            raise LakeTableError(f"{self._uri} is kept as it is: {self._owner.reason}")
        return None if self._owner.owner is Owner.PIPELINE else self._owner.reason

    @property
    def is_marked(self) -> bool:
        """True if the log names the table's path in the lake, as of the last `reason_to_leave`."""
        return self._owner is not None and self._owner.is_marked

    def measure(self) -> TableBytes:
        """Return the bytes that the table takes now. Looks for newer commits, and reads them."""
        with _readable(self._uri):
            if not self._is_as_left() or has_commit(self._uri, self._version + 1):
                self._follow()
        kept = sum(life.size for life in self._removed.values())
        self.measured = TableBytes(sum(self._sizes.values()), kept, self._written)
        return self.measured

    def bytes_of(self, versions: Collection[int], before: datetime) -> int:
        """Return the bytes of files removed before `before` that one of these versions needs.

        As of the last read of the log.
        """
        in_order, since_ms = sorted(versions), before.timestamp() * 1000
        return sum(
            life.size
            for life in self._removed.values()
            if life.removed_ms < since_ms and life.holds_any(in_order)
        )

    def bytes_since(self, moment: datetime) -> int:
        """Return the bytes of files removed at `moment` or later, as of the last read of the log."""
        since_ms = moment.timestamp() * 1000
        return sum(life.size for life in self._removed.values() if life.removed_ms >= since_ms)

    def vacuum(
        self,
        kept: Collection[int],
        now: datetime,
        *,
        grace: timedelta,
        orphan_age: timedelta,
        unread_after: int | None = None,
    ) -> int:
        """Delete files that neither a kept version nor the newest one needs, and return their number.

        A removed file is kept for `grace`: for readers that opened the newest version before, and for a
        version that is to be kept but is not in `kept` yet. A removal is as old as its `deletionTimestamp` or
        its commit file, whichever is younger.

        A file that no commit has named may be a writer's unfinished work, and is kept until it is
        `orphan_age` old. It is never deleted if its name is not one that only this package gives.

        :param kept: the versions whose files are kept
        :param unread_after: for a table that is read commit by commit: files that this version or a later one
            has are kept
        """
        with _readable(self._uri):
            self._follow()
            versions = sorted(kept)
            unread = self._version if unread_after is None else unread_after
            logged = {one.version: one.written for one in self._log_entries() if one.kind == _COMMIT}

            def is_over(path: str, written: datetime) -> bool:
                life = self._removed.get(path)
                if life is None:
                    return written < now - orphan_age and is_written_name(path)
                removed_early = (
                    life.removed_ms < (now - grace).timestamp() * 1000
                    and logged.get(life.removed, written) <= now - grace
                )
                return removed_early and life.removed <= unread and not life.holds_any(versions)

            present = dict(self._present())
            doomed = [path for path, at in present.items() if path not in self._live and is_over(path, at)]
            left = present.keys() - doomed
            if doomed:
                durable.flush_newest(self._uri)
            self._delete(doomed)
            self._delete_folders(_folders(doomed) - _folders(left))
            self._removed = {path: life for path, life in self._removed.items() if path in left}
        return len(doomed)

    def clean_log(self, needed: int | None, now: datetime, *, age: timedelta) -> int:
        """Delete log entries that no version from `needed` (None: the newest) on needs; return their number.

        Deletes only entries before a checkpoint at or before that version, and only those older than `age`.
        """
        with _readable(self._uri):
            self._follow()
            entries = sorted(self._log_entries(), key=lambda entry: entry.version)
            first = self._version if needed is None else min(needed, self._version)
            base = max((version for version in _checkpoints(entries) if version <= first), default=0)
            base = self._before_expired_apps(base)
            doomed = [entry for entry in entries if entry.version < base and entry.written < now - age]
            if doomed:
                durable.flush_checkpoint(self._uri, base)
            # Oldest first: if this is interrupted, the remaining log has no gap.
            self._delete(f"{durable.LOG_FOLDER}/{entry.name}" for entry in doomed)
        return len(doomed)

    def _before_expired_apps(self, base: int) -> int:
        """Return `base`, or 0 if commits before it have app IDs that the checkpoint of `base` lacks.

        These can be positions of this pipeline. They are lost from checkpoints if another program has set
        `TRANSACTION_RETENTION`; a warning then names the remedy.
        """
        table = open_delta(self._uri)
        if not base or not has_retention(table):
            return base
        held = apps_in_checkpoint(self._uri, base)
        commits = (entry.version for entry in self._log_entries() if entry.kind == _COMMIT)
        for version in (version for version in commits if version < base):
            for action in read_commit_actions(self._filesystem, self._root, version):
                if "txn" in action and action["txn"]["appId"] not in held:
                    log.warning(
                        "%s: its log is not cleaned, because %s lets the positions in it expire. Remove the"
                        " property: ALTER TABLE delta.%s UNSET TBLPROPERTIES ('%s')",
                        *(self._uri, TRANSACTION_RETENTION, spark_path(self._uri), TRANSACTION_RETENTION),
                    )
                    return 0
        return base

    def checkpoint(self, every: int) -> bool:
        """Write a checkpoint if the newest one is at least `every` versions old, and return True if it did.

        Processes that commit write checkpoints as well. This writes those that they left out.
        """
        with _readable(self._uri):
            table = open_delta(self._uri)
            newest = max(_checkpoints(self._log_entries()), default=0)
            due = int(table.version()) - newest >= every
            if due:
                table.create_checkpoint()
                durable.flush_checkpoint(self._uri, int(table.version()))
        return due

    def _follow(self) -> None:
        """Read the commits since the last read, or start again if the table was replaced or reverted."""
        newest, written = int(open_delta(self._uri).version()), self._written
        if not self._is_as_left():
            self._begin(newest)
        try:
            self._read_up_to(newest)
        except FileNotFoundError:
            # The log was cleaned past the last version that was read.
            self._begin(newest)
            self._read_up_to(newest)
        self._written = max(written, self._written)
        self._fingerprint = commit_fingerprint(self._uri, self._version)

    def _is_as_left(self) -> bool:
        """Return True if the commit that was read last is still the same.

        If the folder was restored from a copy, removed files may be in use again, even if later commits have
        raised the version past that of the commit.
        """
        return (
            self._version != _NOTHING_READ
            and commit_fingerprint(self._uri, self._version) == self._fingerprint
        )

    def _begin(self, newest: int) -> None:
        """Start at the oldest version that can still be read. Its files count as added in version 0."""
        self._live, self._sizes, self._removed, self._vector_of, self._written = {}, {}, {}, {}, 0
        self.foreign = None
        entries = list(self._log_entries())
        commits = {entry.version for entry in entries if entry.kind == _COMMIT}
        oldest = newest
        while oldest - 1 in commits:
            oldest -= 1
        if oldest == 0:
            self._version = _NOTHING_READ
            return
        usable = [version for version in _checkpoints(entries) if oldest - 1 <= version <= newest]
        self._version = min(usable, default=newest)
        for file in live_files(open_delta(self._uri, self._version)).values():
            self._add(0, file)
        self._written = 0

    def _read_up_to(self, newest: int) -> None:
        for version in range(self._version + 1, newest + 1):
            # One commit removes and adds a file that gets another vector, and its actions have no order.
            actions = read_commit_actions(self._filesystem, self._root, version)
            before = None if is_snapshot(actions) else self.foreign
            self.foreign = foreign_commit(version, actions) or before
            for action in actions:
                if "remove" in action:
                    self._remove(version, action["remove"])
            for action in actions:
                if "add" in action:
                    self._add(version, LiveFile(action["add"]))
            self._version = version

    def _add(self, version: int, file: LiveFile) -> None:
        self._begins(version, file.path, file.size)
        if file.vector is not None and (vector := file.vector.path) is not None:
            self._vector_of[file.path] = vector
            self._begins(version, vector, max(file.vector.end, self._sizes.get(vector, 0)))

    def _begins(self, version: int, path: str, size: int) -> None:
        before = self._removed.pop(path, None)
        self._live.setdefault(path, before.added if before else version)
        self._written += 0 if before else size - self._sizes.get(path, 0)
        self._sizes[path] = size

    def _remove(self, version: int, action: dict[str, Any]) -> None:
        path, at = unquote(action["path"]), action.get("deletionTimestamp") or 0
        self._ends(version, path, at, action.get("size") or 0)
        vector = self._vector_of.pop(path, None)
        # A file of vectors is in use until no data file has a vector in it.
        if vector is not None and vector not in self._vector_of.values():
            self._ends(version, vector, at, 0)

    def _ends(self, version: int, path: str, at: int, size: int) -> None:
        added, size = self._live.pop(path, 0), self._sizes.pop(path, size)
        self._removed[path] = _Lifetime(added, version, at, size)

    def _present(self) -> Iterator[tuple[str, datetime]]:
        """Yield the path below the folder, and the modification time, of each data file and file of vectors.

        Leaves out the log, hidden files and folders, and symbolic links. The folders in which other programs
        write the files of a partitioned table look hidden, but are included.
        """
        if not is_store(self._filesystem):
            for path in table_files(self._filesystem, self._root):
                file, top = Path(self._root, path), path.partition("/")[0]
                hidden = top.startswith(("_", ".")) and not top.startswith(_PARTITION_FOLDER)
                if file.suffix[1:] in _DATA and not hidden and not file.is_symlink():
                    with suppress(FileNotFoundError):
                        yield path, datetime.fromtimestamp(file.stat().st_mtime, UTC)
            return
        for top in self._filesystem.get_file_info(fs.FileSelector(self._root)):
            if top.base_name.startswith(("_", ".")) and not top.base_name.startswith(_PARTITION_FOLDER):
                continue
            below = [top]
            if top.type == fs.FileType.Directory:
                below = self._filesystem.get_file_info(fs.FileSelector(top.path, recursive=True))
            for info in below:
                if info.type == fs.FileType.File and info.extension in _DATA:
                    yield info.path.removeprefix(f"{self._root}/"), info.mtime

    def _log_entries(self) -> Iterator[_LogEntry]:
        for info in self._filesystem.get_file_info(fs.FileSelector(log_path(self._root))):
            match = _LOG_ENTRY.fullmatch(info.base_name)
            if match and info.type == fs.FileType.File:
                yield _LogEntry(int(match[1]), info.base_name, match[2], info.mtime)

    def _delete(self, paths: Iterable[str]) -> None:
        delete_files(self._filesystem, [f"{self._root}/{path}" for path in paths])

    def _delete_folders(self, folders: Iterable[str]) -> None:
        """Delete folders of former partitions that are empty. Does nothing in an object store."""
        for folder in () if is_store(self._filesystem) else folders:
            with suppress(OSError):
                Path(self._root, folder).rmdir()


def _checkpoints(entries: Iterable[_LogEntry]) -> list[int]:
    return [entry.version for entry in entries if entry.kind == _CHECKPOINT]


def _folders(paths: Iterable[str]) -> set[str]:
    return {path.rpartition("/")[0] for path in paths} - {""}


@contextmanager
def _readable(uri: str) -> Iterator[None]:
    try:
        yield
    except (DeltaError, OSError) as error:
        raise_if_store_unavailable(f"the files of {uri} cannot be maintained", error)
        raise LakeTableError(f"the files of {uri} cannot be maintained: {type(error).__name__}") from error
