"""The streaming source over the changelog: it yields work, not rows.

The offset is the changelog's Delta version. A batch is a range of whole commits, and so never holds half a
source transaction. Each row that Spark sees is one work item: a relation and the files that hold its changes.
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
"""Of an object store, where each look is a request that is paid for."""
_IDLE_AFTER_S = 5.0
_CHECK_INTERVAL_S = 10.0


class ChangelogSource(DataSource):
    """`spark.readStream.format("pgrepl_changelog")`; options: uri, batch_bytes."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return "work string"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802, ARG002 - Spark's name
        options = self.options
        return ChangelogReader(options["uri"], int(options["batch_bytes"]))


class ChangelogReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Finds new commits by the log files' names, which costs next to nothing when there are none."""

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
        """As many commits as fit into a batch, at least one; waits a moment when there is none.

        A start without a checkpoint needs no old commits, because tables know their position; nor does one
        whose commits are gone.
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
        """Whether the next commit can never be read: its log file is gone, or the changelog was made anew."""
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
        """All work items in one: what they name is read, and merged, by tasks of the applier's own."""
        return [InputPartition([item.to_json() for item in self._items(start["version"], end["version"])])]

    def _items(self, start: int, end: int) -> list[WorkItem]:
        commits = self._read_all(start, end)
        if commits is None:
            # Nobody is level with the start of such a batch, so every table looks at the live files.
            last = self._read(end)
            known_us = last.record.last_commit_us if last and last.record else 0
            return [WorkItem(MARK, _BEFORE_ALL, end, last_commit_us=known_us)]
        # A marker tells nothing: who wrote it may not have seen the newest commit yet.
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
        """The commits of a batch; None when it begins nowhere, or not all of them are there any more."""
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
        """Forget what the batch used; the changelog's own retention decides what goes."""
        self._commits = {
            version: commit for version, commit in self._commits.items() if version > end["version"]
        }
