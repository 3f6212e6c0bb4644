"""Batches of new changelog commits, as work items: files by relation, not rows.

A batch is a range of whole commits, from one Delta version of the changelog to another. So it never contains
half a source transaction.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from airflow_provider_pgrepl.replication.changelog.reader import Commit, read_commit
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.lake.apply.work_item import MARK, WorkItem
from airflow_provider_pgrepl.replication.settings.lake import is_object_store
from airflow_provider_pgrepl.replication.storage import delta_errors, open_storage

_BEFORE_ALL = -1
_POLL_S, _IDLE_POLL_S = 0.02, 0.1
_STORE_POLL_S, _STORE_IDLE_POLL_S = 0.1, 0.5
"""Seconds between polls if the changelog is in an object store, where each poll is a request that costs
money."""
_IDLE_AFTER_S = 5.0
_CHECK_INTERVAL_S = 10.0


class ChangelogBatches:
    """Finds new commits by the names of the log files, which is cheap if there are none.

    The first batch has no start and ends at the newest version, because tables know their positions. So does
    a batch whose commits have been deleted from the log.
    """

    def __init__(self, uri: str, batch_bytes: int) -> None:
        self._uri = uri
        self._batch_bytes = batch_bytes
        in_store = is_object_store(uri)
        self._poll_s = _STORE_POLL_S if in_store else _POLL_S
        self._idle_poll_s = _STORE_IDLE_POLL_S if in_store else _IDLE_POLL_S
        self._version = _BEFORE_ALL
        self._last_version: int | None = None
        self._next_check = 0.0
        self._commit_at = 0.0
        self._commits: dict[int, Commit] = {}

    @property
    def poll_s(self) -> float:
        """The seconds to wait before the next call of `next` if the last one has found nothing."""
        is_idle = time.monotonic() - self._commit_at > _IDLE_AFTER_S
        return self._idle_poll_s if is_idle else self._poll_s

    def end_at_newest(self) -> None:
        """Give no more commits than the changelog has now.

        Raises LakeUnavailableError, DeltaError.
        """
        with delta_errors("the changelog cannot be read"):
            self._last_version = self._newest()

    def next(self) -> list[WorkItem]:
        """Return the next batch: as many commits as fit into `batch_bytes`, at least one. Returns an empty
        list if there is no new commit.

        Raises LakeUnavailableError, DeltaError.
        """
        with delta_errors("the changelog cannot be read"):
            end = self._end_of_next()
            return [] if end == self._version else self._items(self._version, end)

    def advance(self, version: int) -> None:
        """Begin the next batch after `version`, the end of a batch that was taken.

        No file is deleted: that is the task of the changelog's retention.
        """
        self._version = version
        self._commits = {later: commit for later, commit in self._commits.items() if later > version}

    def _end_of_next(self) -> int:
        if self._version == _BEFORE_ALL:
            return self._newest()
        end = self._advance(self._version)
        return self._newest() if end == self._version and self._is_cut_off(end) else end

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
        wanted = (commit.record.wanted_lsn for commit in commits if commit.record)
        mark = replace(mark, wanted_lsn=max(wanted, default=0))
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
