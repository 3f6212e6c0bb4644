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

from airflow_provider_pgrepl.replication.storage import durable
from airflow_provider_pgrepl.replication.storage.checkpoints import Checkpoints
from airflow_provider_pgrepl.replication.storage.delta_tables import open_delta
from airflow_provider_pgrepl.replication.storage.filesystem import (
    has_commit,
    open_storage,
    read_commit_actions,
)
from airflow_provider_pgrepl.replication.storage.put_commit import can_commit, put_version


class TakenOverError(Exception):
    """Another process has written the table under this app id, or has changed what it is."""


class AppLog:
    """As of a table that was just opened; `checkpoint_every`: so many versions.

    `version`: of the last commit by this process, at first that of the table; `sequence`: how often anybody
    has committed under the app id by then. Raises DeltaError for a table that demands more of its writers
    than we do.
    """

    def __init__(self, uri: str, table: DeltaTable, app: str, checkpoint_every: int) -> None:
        if not can_commit(table):
            raise DeltaError("the table demands more of its writers than this program does")
        self._uri, self._app = uri, app
        self.version = int(table.version())
        self.sequence = table.transaction_version(app) or 0
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
        before, sequence = self.version, self.sequence + 1
        properties = CommitProperties(
            custom_metadata=dict(told or {}), app_transactions=[Transaction(self._app, sequence), *apps]
        )
        version = self._put(operation, properties, list(actions))
        self._check_place(version, sequence)
        durable.flush_commits(self._uri, before, version, with_files=with_files)
        # Not before: who took over has written that number, and who continues us must not pass for them.
        self.version, self.sequence = version, sequence
        self._checkpoints.after(before, version)

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
        brings_rows = action.get("add", {}).get("dataChange", False)
        return is_same_app or brings_rows or bool({"metaData", "protocol"} & action.keys())

    def _check_place(self, version: int, sequence: int) -> None:
        """Of one that slept for hours the place may have been free because others had cleaned the log."""
        is_behind = not has_commit(self._uri, version - 1)
        if is_behind and open_delta(self._uri).transaction_version(self._app) != sequence:
            raise TakenOverError
