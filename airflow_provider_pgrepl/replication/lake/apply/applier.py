"""The applier: applies changelog commits to the lake tables, each at its own pace, and writes consistent
points.

A table's position in the lake is authoritative. What the applier remembers only avoids reads. A table that it
does not know to have caught up (after a start, a snapshot or a fixed error) catches up from the changelog's
live files. The other tables continue meanwhile.

One thread reads new commits as batches, and another one distributes their changes to merges, which are
Spark's tasks. So neither a table nor the reading waits for the merge of another table.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA, EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import Commit, read_commit
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.lake.merge.collapse import collapse
from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.runtime.compiled_loops import ensure_compiled
from airflow_provider_pgrepl.replication.settings.lake import is_object_store
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.spark.failures import spark_errors
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.storage import delta_errors, open_storage
from airflow_provider_pgrepl.trace import log_unexpected

from .merge_scheduler import MergeScheduler
from .work_item import MARK, ApplierProgress, BatchEnd, WorkItem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_BEFORE_ALL = -1
_POLL_S, _IDLE_POLL_S = 0.02, 0.1
_STORE_POLL_S, _STORE_IDLE_POLL_S = 0.1, 0.5
"""Seconds between polls if the changelog is in an object store, where each poll is a request that costs
money."""
_IDLE_AFTER_S = 5.0
_CHECK_INTERVAL_S = 10.0


def warm_up(spark: SparkSession) -> None:
    """Run one merge in each Python worker that may run merges. Raises SparkError.

    The compiled functions are compiled before, so that Spark's worker daemon finds them.
    """
    ensure_compiled()
    tasks = max(1, spark.sparkContext.defaultParallelism)
    with spark_errors("starting Spark's Python workers"):
        spark.sparkContext.parallelize(range(tasks), tasks).foreach(lambda _number: merge_a_row())


def merge_a_row() -> None:
    """Merge one row, so that this process loads the modules and compiled functions of a merge."""
    relation = Relation(
        0, TableName("none", "none"), (Column("key", 1, oids.INT4, -1, "integer", is_key=True),)
    )
    change = {"commit_lsn": 1, "ordinal": 0, "relation_id": 0, "op": "I", "new": ["1"]}
    collapse(pa.Table.from_pylist([change], schema=ROW_SCHEMA), relation)


class Applier:
    """Reads batches and runs merges. `error`: the exception that ended both, None while they run."""

    def __init__(
        self,
        spark: SparkSession,
        pipeline: Pipeline,
        state_db: StateDatabase,
        record: EpochRecord,
        progress: ApplierProgress | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._record = record
        self._uri = changelog_uri(pipeline.lake_root)
        self.progress = progress or ApplierProgress()
        self.error: Exception | None = None
        self._changed = threading.Condition(threading.RLock())
        self._rounds = MergeScheduler(spark, pipeline, state_db, record, self.progress, self._changed)
        self._until_settled = False
        self._holders = 0
        self._batches = ChangelogBatches(self._uri, pipeline.batch_bytes)
        self._has_to_end = threading.Event()
        self._thread: threading.Thread | None = None
        self._reader: threading.Thread | None = None

    def start(self, *, available_now: bool = False) -> None:
        """Start applying changes: until `stop`, or with `available_now` only those in the changelog now."""
        self._until_settled = available_now
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pgrepl-applier", daemon=True)
            self._thread.start()
        self._reader = threading.Thread(
            target=self._read, kwargs={"available_now": available_now}, name="pgrepl-batches", daemon=True
        )
        self._reader.start()

    @property
    def is_reading(self) -> bool:
        """False once everything that `start` had to apply is applied, or the applier has ended or failed."""
        return self._reader is not None and self._reader.is_alive()

    def needed_above(self) -> LSN | None:
        """Return the lowest LSN above which a table needs changes from the changelog. None while a table is
        being copied.

        Returns 0 if the position of a table cannot be read: it may need every change. Returns the highest LSN
        if all tables are errored or removed.
        """
        return self._rounds.needed_above()

    def versions_for_points(self) -> dict[str, set[int]]:
        """Return the versions that a later consistent point may name, by path below the lake root.

        Maintenance must keep their files: a point is written only when the slowest table has merged up to it.
        Any thread may call this.
        """
        return self._rounds.versions_for_points()

    def stop(self, timeout_s: float | None = None) -> None:
        """Start no more merges, and wait up to `timeout_s` seconds (None: without limit) until the running
        ones have ended."""
        self._has_to_end.set()
        if self._changed.acquire(timeout=-1 if timeout_s is None else timeout_s):
            self._changed.notify_all()
            self._changed.release()
        if self._thread is not None:
            self._thread.join(timeout_s)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Run the block while no merge is running. Merges of changes that are received meanwhile start after
        it.

        Waits for running merges first, or until the applier has failed.
        """
        with self._changed:
            self._holders += 1
            self._changed.wait_for(lambda: self.error is not None or not self._rounds.is_running)
        try:
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._changed.notify_all()

    def _read(self, *, available_now: bool) -> None:
        """Take batches until the applier is stopped or fails, or with `available_now` until those in the
        changelog now are applied."""
        try:
            if available_now:
                self._batches.end_at_newest()
            while not self._has_ended:
                began = time.monotonic()
                if items := self._batches.next():
                    self._add(items)
                    self._batches.advance(items[0].to_version)
                    self._has_to_end.wait(began + self._pipeline.trigger_interval_s - time.monotonic())
                elif available_now:
                    return
                else:
                    self._has_to_end.wait(self._batches.poll_s)
        except Exception as error:  # noqa: BLE001 - the thread that supervises raises it
            if self._has_to_end.is_set():
                return
            log_unexpected(log, "reading the changelog", error)
            with self._changed:
                self.error = self.error or error
                self._changed.notify_all()

    def _add(self, items: list[WorkItem]) -> None:
        mark = self._settle_mark(next(item for item in items if item.relation_id == MARK))
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or not self._holders)
            if self._has_ended:
                return
            changes = [item for item in items if item.relation_id != MARK]
            if mark.epoch < self._record.epoch:
                # The snapshot of this epoch contains the changes of earlier epochs, and their LSNs cannot be
                # compared with its LSNs.
                mark, changes = replace(mark, durable_lsn=1, last_commit_us=0, wanted_lsn=0), []
            self.progress.wanted_lsn = max(self.progress.wanted_lsn, LSN(mark.wanted_lsn))
            self._rounds.add(BatchEnd.of(mark), mark.from_version, changes)
            self.progress.batches += 1
            self._changed.notify_all()
            if self._until_settled:
                self._changed.wait_for(lambda: self._has_ended or self._rounds.is_settled)

    @property
    def _has_ended(self) -> bool:
        return self._has_to_end.is_set() or self.error is not None

    def _settle_mark(self, mark: WorkItem) -> WorkItem:
        """Return the batch's own item, completed from the changelog if the commits did not record its epoch.

        The first batch is always completed. Raises FencedError if the changelog has a newer epoch than this
        process applies.
        """
        if self.progress.batches == 0 or not mark.epoch:
            with delta_errors("the changelog cannot be read"):
                mark = mark.as_recorded(self._uri)
        if mark.epoch > self._record.epoch:
            raise errors.FencedError(
                f"epoch {mark.epoch} of the changelog began, this process applies epoch {self._record.epoch}"
            )
        return replace(mark, durable_lsn=max(mark.durable_lsn, self.progress.applied_lsn + 1))

    def _run(self) -> None:
        """Run rounds until the applier is stopped or fails: distribute received batches, and take finished
        merges."""
        with self._changed:
            try:
                while self.error is None and (not self._has_to_end.is_set() or self._rounds.is_running):
                    may_begin = not (self._holders or self._has_to_end.is_set())
                    self._rounds.step(may_begin=may_begin, hurries=self._until_settled)
                    self._changed.notify_all()
                    if not self._rounds.has_news:
                        self._changed.wait(self._rounds.rest_s)
            except Exception as error:  # noqa: BLE001 - the thread that supervises raises it
                log_unexpected(log, "applying changes", error)
                self.error = self.error or error
            self._changed.notify_all()
        self._rounds.close()


class ChangelogBatches:
    """Batches of new changelog commits, as work items: files by relation, not rows.

    A batch is a range of whole commits, from one Delta version of the changelog to another. So it never
    contains half a source transaction. New commits are found by the names of the log files, which is cheap if
    there are none.

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
