"""The log of a table to which one process at a time adds rows, under an app ID that counts its commits.

The writer knows the version of its last commit, and puts each commit as one of the next versions. The storage
accepts a version only once. If another process has put a version first, the writer reads that commit. If it
has the same app ID, or changes data, metadata or protocol, the writer stops. This keeps two writers apart,
regardless of locks, network failures and paused processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deltalake import CommitProperties, DeltaTable, Transaction

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.storage import durable
from airflow_provider_pgrepl.replication.storage.filesystem import (
    commit_mark,
    has_commit,
    open_storage,
    read_commit_actions,
)

from .log import Checkpoints, can_commit, put_version
from .table import open_delta


class FencedCommitError(Exception):
    """The error that another process has committed under this app ID, or has changed the table."""


class AppLog:
    """The log of a table with a single writer, created from the table just opened.

    `checkpoint_every`: the number of versions between checkpoints. `version`: that of this process's last
    commit, initially that of the table. `sequence`: the number of commits under the app ID by then, by any
    process. `knows_files`: True if the writer relies on its list of files, so that a commit which replaces
    files stops it. Raises LakeError if the table has requirements for writers that `can_commit` rejects,
    OSError.
    """

    def __init__(
        self, uri: str, table: DeltaTable, app: str, checkpoint_every: int, *, knows_files: bool = False
    ) -> None:
        if not can_commit(table):
            raise LakeError(
                f"{uri}: the table's protocol requires features that this package cannot write",
                "find the change in the table's history (DESCRIBE HISTORY), and undo it",
            )
        self._uri, self._app, self._knows_files = uri, app, knows_files
        self.version = int(table.version())
        self.sequence = table.transaction_version(app) or 0
        self._mark = commit_mark(uri, self.version)
        self._checkpoints = Checkpoints(uri, checkpoint_every)

    def commit(
        self,
        operation: str,
        actions: Iterable[Mapping[str, Any]],
        *,
        metadata: Mapping[str, str] | None = None,
        apps: Iterable[Transaction] = (),
        with_files: bool = True,
    ) -> None:
        """Commit, and flush the commit to disk, with all commits of other processes before it.

        `told`: metadata of the commit. `apps`: further app IDs. `with_files`: False if the added files are
        already on disk. Raises TakenOverError; LakeUnavailableError if another process has
        left an incomplete commit; DeltaError or OSError, after which the commit may exist.
        """
        self._check_last()
        before, sequence = self.version, self.sequence + 1
        properties = CommitProperties(
            custom_metadata=dict(metadata or {}), app_transactions=[Transaction(self._app, sequence), *apps]
        )
        version = self._put(operation, properties, list(actions))
        self._check_place(version, sequence)
        durable.flush_commits(self._uri, before, version, with_files=with_files)
        mark = commit_mark(self._uri, version)
        # Not before: if another writer took over, that sequence is its own, and a successor of this writer
        # must not continue from it.
        self.version, self.sequence, self._mark = version, sequence, mark
        self._checkpoints.after(before, version)

    def _check_last(self) -> None:
        """Raise TakenOverError unless this process's last commit is still in the log, or in a checkpoint.

        The table may have been restored to an earlier state, and then have got other commits.
        """
        found = commit_mark(self._uri, self.version)
        if found == self._mark:
            return
        # Maintenance deletes old commits that a checkpoint covers.
        table = None if found else open_delta(self._uri)
        if table is None or table.transaction_version(self._app) != self.sequence:
            raise FencedCommitError
        self.version = int(table.version())
        self._mark = commit_mark(self._uri, self.version)

    def _put(self, operation: str, properties: CommitProperties, actions: list[Mapping[str, Any]]) -> int:
        """Put the commit as the next free version, and return that version. Raises TakenOverError."""
        version = self.version + 1
        while not put_version(self._uri, version, operation, properties, actions):
            self._pass(version)
            version += 1
        return version

    def _pass(self, version: int) -> None:
        """Raise TakenOverError unless another process's commit is a marker or maintenance.

        Raises LakeUnavailableError if that commit is incomplete, OSError.
        """
        filesystem, root = open_storage(self._uri)
        try:
            others = read_commit_actions(filesystem, root, version)
        except ValueError as error:
            raise LakeUnavailableError(
                f"version {version} of the log of {self._uri} is incomplete",
                "run this again: another process may be writing that version. If the error persists, a crash"
                " has left the version incomplete: restart the replication app or, for the table of a"
                " publisher, the publisher, which sets it aside",
            ) from error
        if any(map(self._is_in_the_way, others)):
            raise FencedCommitError

    def _is_in_the_way(self, action: Mapping[str, Any]) -> bool:
        is_same_app = action.get("txn", {}).get("appId") == self._app
        files = [action[kind] for kind in ("add", "remove") if kind in action]
        changes_files = any(self._knows_files or file.get("dataChange", True) for file in files)
        return is_same_app or changes_files or bool({"metaData", "protocol"} & action.keys())

    def _check_place(self, version: int, sequence: int) -> None:
        """Raise TakenOverError if the version was free only because others had deleted old log entries.

        This can happen to a process that was paused for hours.
        """
        is_behind = not has_commit(self._uri, version - 1)
        if is_behind and open_delta(self._uri).transaction_version(self._app) != sequence:
            raise FencedCommitError
