"""AppLog: the log of a table whose rows one process at a time brings, under an app id that counts commits.

Who commits knows the version of its last commit, and puts each as one of those that follow: the store takes a
version from one only. Of each that somebody else was first to put, it reads what it is. One under the same
app id, or of another shape, is where it ends: that is what keeps two writers apart, whatever locks, networks
and paused processes do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.delta.checkpoints import Checkpoints
from airflow_provider_pgrepl.replication.delta.log import can_commit, put_version
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.storage import durable
from airflow_provider_pgrepl.replication.storage.filesystem import (
    commit_mark,
    has_commit,
    open_storage,
    read_commit_actions,
)


class TakenOverError(Exception):
    """Another process has written the table under this app id, or has changed what it is."""


class AppLog:
    """As of a table that was just opened; `checkpoint_every`: so many versions.

    `version`: of the last commit by this process, at first that of the table; `sequence`: how often anybody
    has committed under the app id by then. `knows_files`: whether the writer goes by the files that it has
    put, so that nobody may replace them. Raises LakeError for a table that demands more of its writers than
    we do, OSError.
    """

    def __init__(
        self, uri: str, table: DeltaTable, app: str, checkpoint_every: int, *, knows_files: bool = False
    ) -> None:
        if not can_commit(table):
            raise LakeError(
                f"{uri}: this table demands more of its writers than this program does",
                "see in its history what somebody has changed, and undo that",
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
        told: Mapping[str, str] | None = None,
        apps: Iterable[Transaction] = (),
        with_files: bool = True,
    ) -> None:
        """Commit, and have it on the disk, with all that others committed before it.

        `told`: metadata of the commit; `apps`: further app ids; `with_files`: whether the files that it adds
        have to be flushed, too. Raises TakenOverError; DeltaError and OSError, after which the commit may be
        there.
        """
        self._check_last()
        before, sequence = self.version, self.sequence + 1
        properties = CommitProperties(
            custom_metadata=dict(told or {}), app_transactions=[Transaction(self._app, sequence), *apps]
        )
        version = self._put(operation, properties, list(actions))
        self._check_place(version, sequence)
        durable.flush_commits(self._uri, before, version, with_files=with_files)
        mark = commit_mark(self._uri, version)
        # Not before: who took over has written that number, and who continues us must not pass for them.
        self.version, self.sequence, self._mark = version, sequence, mark
        self._checkpoints.after(before, version)

    def _check_last(self) -> None:
        """Raise TakenOverError unless the table is as this process left it, but for what came behind: it may
        have been put back to an earlier state, and grown again."""
        found = commit_mark(self._uri, self.version)
        if found == self._mark:
            return
        # Maintenance takes away what is in a checkpoint, once it is old.
        table = None if found else open_delta(self._uri)
        if table is None or table.transaction_version(self._app) != self.sequence:
            raise TakenOverError
        self.version = int(table.version())
        self._mark = commit_mark(self._uri, self.version)

    def _put(self, operation: str, properties: CommitProperties, actions: list[Mapping[str, Any]]) -> int:
        """The version that it has become."""
        version = self.version + 1
        while not put_version(self._uri, version, operation, properties, actions):
            self._pass(version)
            version += 1
        return version

    def _pass(self, version: int) -> None:
        """Raise TakenOverError unless somebody else's commit may stand before ours: a marker, or upkeep."""
        filesystem, root = open_storage(self._uri)
        try:
            others = read_commit_actions(filesystem, root, version)
        except ValueError as error:
            raise DeltaError(f"version {version} of the log is not whole") from error
        if any(map(self._is_in_the_way, others)):
            raise TakenOverError

    def _is_in_the_way(self, action: Mapping[str, Any]) -> bool:
        is_same_app = action.get("txn", {}).get("appId") == self._app
        files = [action[kind] for kind in ("add", "remove") if kind in action]
        changes_files = any(self._knows_files or file.get("dataChange", True) for file in files)
        return is_same_app or changes_files or bool({"metaData", "protocol"} & action.keys())

    def _check_place(self, version: int, sequence: int) -> None:
        """Of one that slept for hours the place may have been free because others had cleaned the log."""
        is_behind = not has_commit(self._uri, version - 1)
        if is_behind and open_delta(self._uri).transaction_version(self._app) != sequence:
            raise TakenOverError
