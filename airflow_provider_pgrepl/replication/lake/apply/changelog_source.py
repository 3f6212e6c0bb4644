"""The streaming source over the changelog. It yields work items, not rows.

The offset is the changelog's Delta version. A batch is a range of whole commits, so it never contains half a
source transaction. Each row that Spark sees is one work item: a relation and the files with its changes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from airflow_provider_pgrepl.replication.changelog.reader import Commit, read_commit
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.lake.apply.work_item import MARK, WorkItem
from airflow_provider_pgrepl.replication.settings.lake import is_object_store
from airflow_provider_pgrepl.replication.storage import open_storage

FORMAT = "pgrepl_changelog"
_BEFORE_ALL = -1
_POLL_S, _IDLE_POLL_S, _POLL_LIMIT_S = 0.02, 0.1, 1.0
_STORE_POLL_S, _STORE_IDLE_POLL_S = 0.1, 0.5
"""Seconds between polls if the changelog is in an object store, where each poll is a request that costs
money."""
_IDLE_AFTER_S = 5.0
_CHECK_INTERVAL_S = 10.0


class ChangelogSource(DataSource):
    """The data source of `spark.readStream.format("pgrepl_changelog")`. Options: uri, batch_bytes."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return "work string"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802, ARG002 - Spark's name
        options = self.options
        return ChangelogReader(options["uri"], int(options["batch_bytes"]))


class ChangelogReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Finds new commits by the names of the log files, which is cheap if there are none."""

    def __init__(self, uri: str, batch_bytes: int) -> None:
        self._uri = uri
        self._batch_bytes = batch_bytes
        in_store = is_object_store(uri)
        self._poll_s = _STORE_POLL_S if in_store else _POLL_S
        self._idle_poll_s = _STORE_IDLE_POLL_S if in_store else _IDLE_POLL_S
        self._last_version: int | None = None
        self._next_check = 0.0
        self._commit_at = 0.0
        self._commits: dict[int, Commit] = {}

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"version": _BEFORE_ALL}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._last_version = self._newest()

    def latestOffset(self, start: dict[str, int], limit: object) -> dict[str, int]:  # noqa: N802, ARG002
        """Return the offset after the next commits: as many as fit into a batch, at least one. Waits up to 1
        s for a commit.

        A start without a checkpoint begins at the newest version, because tables know their positions. So
        does one whose next commits have been deleted from the log.
        """
        version = start["version"]
        if version == _BEFORE_ALL:
            return {"version": self._newest()}
        deadline = time.monotonic() + _POLL_LIMIT_S
        while True:
            end = self._advance(version)
            if end == version and self._is_cut_off(version):
                return {"version": self._newest()}
            if end > version or self._last_version is not None or time.monotonic() >= deadline:
                return {"version": end}
            is_idle = time.monotonic() - self._commit_at > _IDLE_AFTER_S
            time.sleep(self._idle_poll_s if is_idle else self._poll_s)

    def _newest(self) -> int:
        return int(open_delta(self._uri).version())

    def _is_cut_off(self, version: int) -> bool:
        """Return True if the next commit can never be read: its log file was deleted, or the changelog was
        recreated.

        Checks at most every 10 s, unless a known commit is missing.
        """
        awaited = self._last_version is not None and version < self._last_version
        if not awaited and time.monotonic() < self._next_check:
            return False
        self._next_check = time.monotonic() + _CHECK_INTERVAL_S
        newest = self._newest()
        return newest < version or (newest > version and self._read(version + 1) is None)

    def _advance(self, version: int) -> int:
        size = 0
        while size < self._batch_bytes and (self._last_version is None or version < self._last_version):
            commit = self._read(version + 1)
            if commit is None:
                break
            version += 1
            size += commit.record.bytes if commit.record else 0
        return version

    def _read(self, version: int) -> Commit | None:
        if version not in self._commits:
            filesystem, root = open_storage(self._uri)
            try:
                self._commits[version] = read_commit(filesystem, root, version)
            except FileNotFoundError:
                return None
            self._commit_at = time.monotonic()
        return self._commits[version]

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """Return all work items as one partition. The applier's own tasks read and merge the files."""
        return [InputPartition([item.to_json() for item in self._items(start["version"], end["version"])])]

    def _items(self, start: int, end: int) -> list[WorkItem]:
        commits = self._read_all(start, end)
        if commits is None:
            # No table has caught up with the start of this batch, so every table is planned from the live
            # files.
            last = self._read(end)
            known_us = last.record.last_commit_us if last and last.record else 0
            return [WorkItem(MARK, _BEFORE_ALL, end, last_commit_us=known_us)]
        # Ignore markers: the process that wrote one may not have seen the newest commit.
        records = [commit.record for commit in commits if commit.record and commit.record.kind != "marker"]
        mark = WorkItem(MARK, start, end)
        if records:
            mark = WorkItem(
                MARK,
                start,
                end,
                epoch=records[-1].epoch,
                durable_lsn=max(r.durable_lsn for r in records if r.epoch == records[-1].epoch),
                last_commit_us=max(record.last_commit_us for record in records),
            )
        return [mark, *self._relation_items(commits, start, end)]

    def _read_all(self, start: int, end: int) -> list[Commit] | None:
        """Return the commits of a batch, or None if it has no start or if a commit is no longer in the
        log."""
        if not _BEFORE_ALL < start <= end:
            return None
        commits = []
        for version in range(start + 1, end + 1):
            commit = self._read(version)
            if commit is None:
                return None
            commits.append(commit)
        return commits

    def _relation_items(self, commits: list[Commit], start: int, end: int) -> Iterator[WorkItem]:
        relations = sorted({oid for commit in commits if commit.record for oid in commit.record.relations})
        for relation_id in relations:
            if relation_id == MARK:
                continue
            files = [
                file
                for commit in commits
                if commit.record and relation_id in commit.record.relations
                for file in commit.files
                if file.may_hold(relation_id)
            ]
            size = sum(file.value_bytes for file in files)
            yield WorkItem(relation_id, start, end, tuple(file.path for file in files), size)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        items: Any = partition.value
        yield pa.RecordBatch.from_pydict({"work": pa.array(items, pa.string())})

    def commit(self, end: dict[str, int]) -> None:
        """Forget the commits of the batch. No file is deleted: that is the task of the changelog's
        retention."""
        self._commits = {
            version: commit for version, commit in self._commits.items() if version > end["version"]
        }
