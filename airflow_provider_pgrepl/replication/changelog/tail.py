"""ChangelogTail: what a reader that is at the changelog's end keeps of it, commit by commit.

delta-rs keeps some 45 kB of each commit in memory. Who only goes on from a place needs the files after it,
and what transactions say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.changelog.layout import (
    DURABLE_APP,
    EPOCH_APP,
    EpochRecord,
    floor_app,
)
from airflow_provider_pgrepl.replication.changelog.reader import (
    ChangelogFile,
    file_of_action,
    live_files,
    read_epoch_number,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch


@dataclass
class ChangelogTail:
    """The changelog as of a version. `files`: of one epoch, by path; those that end before some place may be
    missing."""

    version: int
    description: str
    epoch: Epoch
    files: dict[str, ChangelogFile]
    _transactions: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, table: DeltaTable, epoch: Epoch, above_lsn: LSN) -> ChangelogTail:
        """Of an open changelog, with those files of an epoch that can hold changes above an LSN."""
        apps = [DURABLE_APP, EPOCH_APP]
        apps += [floor_app(number) for number in range(1, read_epoch_number(table) + 1)]
        versions = {app: table.transaction_version(app) for app in apps}
        return cls(
            table.version(),
            table.metadata().description,
            epoch,
            {file.path: file for file in live_files(table, epoch, above_lsn)},
            {app: version for app, version in versions.items() if version is not None},
        )

    @property
    def record(self) -> EpochRecord:
        """The epoch that the changelog is in. Raises ChangelogError."""
        return EpochRecord.from_json(self.description)

    def transaction_version(self, app_id: str) -> int | None:
        """As DeltaTable has it, of the app ids of a changelog."""
        return self._transactions.get(app_id)

    def files_above(self, lsn: LSN) -> list[ChangelogFile]:
        """Those that can hold changes above an LSN, by their first; all others are forgotten."""
        self.files = {path: file for path, file in self.files.items() if file.max_lsn > lsn}
        return sorted(self.files.values(), key=lambda file: file.min_lsn)

    def take(self, actions: Iterable[dict[str, Any]]) -> None:
        """The next commit's. Raises KeyError, TypeError, ValueError when it is not one of a changelog."""
        for action in actions:
            if "add" in action:
                self._add(action["add"])
            elif "remove" in action:
                self.files.pop(action["remove"]["path"], None)
            elif "txn" in action:
                self._transactions[action["txn"]["appId"]] = action["txn"]["version"]
            elif "metaData" in action:
                self.description = action["metaData"]["description"]
        self.version += 1

    def _add(self, add: dict[str, Any]) -> None:
        if json.loads(add["stats"])["minValues"]["epoch"] == self.epoch:
            file = file_of_action(add)
            self.files[file.path] = file
