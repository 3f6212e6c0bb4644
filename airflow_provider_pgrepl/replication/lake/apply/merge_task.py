"""The merge of one table's changes (MergeJob), and shares of merges, which Spark runs as tasks in a limited
number of slots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.replication.changelog.reader import ChangelogFile
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.lake import is_object_store
from airflow_provider_pgrepl.replication.spark.executors import on_executor, result_of, slots_of
from airflow_provider_pgrepl.replication.spark.failures import spark_errors
from airflow_provider_pgrepl.trace import log_unexpected

from .table_merge import TableContext, TableResult, bring_forward

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

END = LSN(2**63 - 1)

SHARE_S = 0.5
"""Seconds after which a share starts no further merge. The remaining jobs are scheduled again."""
_IN_STORE, _SMALL_BYTES = 4, 16 << 20
"""Merges of a share that run concurrently if the lake is in an object store, and the limit for that: the
total bytes of changes in the share."""
_LONG_S = 1.0
_LEAST_S = 0.005
_SHORT_ONES_COME_S = 60.0
"""Seconds after the last short merge for which one slot is not given to long merges."""
log = logging.getLogger(__name__)
_MOST = 256
"""Maximum number of shares that run at the same time. The pool creates a thread only when a share needs
one."""


@dataclass(frozen=True)
class MergeJob:
    """The changelog files to apply to one table, in LSN order.

    `snapshot`: the position of the table's last copy. `bytes`: uncompressed values of the table's changes, or
    of whole files if the job was planned from the changelog's live files. Changes at or above `upto_lsn` are
    not applied. Every change of the table up to `reach_lsn` is in these files or already in the table. If
    `is_last`, the merge makes the table caught up with version `through` of the changelog. Otherwise more
    files follow.
    """

    work: TableContext
    snapshot: LSN
    through: int
    paths: tuple[str, ...]
    bytes: int
    upto_lsn: LSN = END
    reach_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    is_last: bool = True

    @property
    def oid(self) -> int:
        """The oid of the relation."""
        return self.work.relation.oid

    @property
    def is_planned(self) -> bool:
        """Return True if the files were selected from the changelog's live files, for a table that lags.
        Return False if they are new files for a table that had caught up."""
        return self.upto_lsn != END

    @classmethod
    def plan(
        cls,
        work: TableContext,
        snapshot: LSN,
        files: list[ChangelogFile],
        upto: tuple[int, LSN],
        limit: int,
    ) -> MergeJob:
        """Return a job with the first files that can hold changes of the table, up to about `limit` bytes of
        values.

        Files that may share a transaction are never split between jobs, so that the limit can be exceeded.
        `upto`: the version of the changelog, and the LSN below which that version is durable.
        """
        through, upto_lsn = upto
        wanted = [file for file in files if file.may_hold(work.relation.oid) and file.min_lsn <= upto_lsn]
        taken = take_bytes(wanted, limit)
        return cls(
            work,
            snapshot,
            through,
            tuple(file.path for file in taken),
            sum(file.value_bytes for file in taken),
            upto_lsn,
            # A file that extends beyond `upto_lsn` is read again later for the changes above it.
            min(max((file.max_lsn for file in taken), default=LSN(0)), LSN(upto_lsn - 1)),
            len(taken) == len(wanted),
        )

    def run(self) -> TableResult:
        """Merge the files into the table, in a Spark task. Errors are returned in the result."""
        started = time.monotonic()
        result = bring_forward(self.work, self.paths, self.upto_lsn)
        return replace(result, seconds=time.monotonic() - started)


Share = Sequence[MergeJob]
"""Merges that one task runs. If the lake is in an object store, small ones run concurrently."""


def take_bytes(files: list[ChangelogFile], limit: int) -> list[ChangelogFile]:
    """Return the first files that together hold at least `limit` bytes of values, or all files.

    Files that may share a transaction are not split: a file that begins at or below the highest LSN so far is
    always added.
    """
    taken: list[ChangelogFile] = []
    size, reach = 0, LSN(0)
    for file in files:
        if size >= limit and file.min_lsn > reach:
            break
        taken.append(file)
        size += file.value_bytes
        reach = max(reach, file.max_lsn)
    return taken


def run_share(jobs: Share) -> list[TableResult]:
    """Run the jobs of a share, and return their results. After `SHARE_S` seconds no further job is started.

    At least the first job is run. Small shares in an object store use several threads, and their results are
    then not in the order of the jobs.
    """
    started = time.monotonic()
    begun = iter(jobs)

    def run_some() -> list[TableResult]:
        results = []
        for job in begun:
            results.append(job.run())
            if time.monotonic() - started > SHARE_S:
                break
        return results

    threads = jobs_at_once(jobs[0].work.lake_root) if sum(job.bytes for job in jobs) <= _SMALL_BYTES else 1
    if min(threads, len(jobs)) == 1:
        return run_some()
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(run_some) for _ in range(min(threads, len(jobs)))]
        return [result for some in running for result in some.result()]


def jobs_at_once(lake_root: str) -> int:
    """Return how many small merges of one share run concurrently: more in an object store, where a merge
    spends most of its time waiting for requests."""
    return _IN_STORE if is_object_store(lake_root) else 1


def make_shares(jobs: Iterable[tuple[MergeJob, float]], most: int) -> list[list[MergeJob]]:
    """Distribute jobs to at most `most` shares with about the same total of expected seconds.

    Each job goes to the share that has the least so far. Jobs of a share keep their order.
    """
    shares: list[list[MergeJob]] = [[] for _ in range(most)]
    load = [0.0] * most
    for job, seconds in jobs:
        lightest = load.index(min(load))
        shares[lightest].append(job)
        load[lightest] += seconds + 0.001
    return [share for share in shares if share]


class MergeSlots:
    """The merges that are ready and those that run, in `slots` slots. `slots` may be changed at any time.

    Each slot runs one share of merges, and a share runs up to `at_once` merges concurrently. With more than
    one slot, each long merge has a slot of its own, and one slot is kept free of long merges while there are
    short ones.
    """

    def __init__(self, slots: int, at_once: int = 1) -> None:
        self.slots = slots
        self._at_once = at_once
        self._ready: list[MergeJob] = []
        self._running: list[Share] = []
        self._long: set[int] = set()
        self._short_at = -_SHORT_ONES_COME_S
        self._long_waits = False

    @property
    def free(self) -> int:
        """The number of slots in which no share runs."""
        return max(0, self.slots - len(self._running))

    @property
    def is_busy(self) -> bool:
        """Return True if a share is running."""
        return bool(self._running)

    @property
    def has_ready(self) -> bool:
        """Return True if a merge is waiting for a slot."""
        return bool(self._ready)

    def choose(self, tables: Iterable[int], expected_s: Callable[[int], float]) -> list[int]:
        """Return the tables, in the given order, whose merges fit into the free slots: short ones up to the
        available time, and at most one long one.

        The other tables keep waiting, and changes that arrive until their merge starts are merged with it.
        """
        time_s = SHARE_S * self.free * self._at_once
        may_be_long = self.free and not self._long_waits
        chosen = []
        for oid in tables:
            seconds = expected_s(oid)
            if seconds >= _LONG_S and may_be_long:
                chosen.append(oid)
                may_be_long = False
            elif seconds < _LONG_S and time_s > 0:
                chosen.append(oid)
                time_s -= max(seconds, _LEAST_S)
        return chosen

    def add(self, job: MergeJob) -> None:
        """Add a merge that is ready to run."""
        self._ready.append(job)

    def begin(self, expected_s: Callable[[MergeJob], float], now: float) -> list[Share]:
        """Return the shares to start now, and count them as running."""
        if not self.free or not self._ready:
            return []
        if self.slots == 1:
            shares: list[Share] = [self._ready]
            self._ready, self._long_waits = [], False
        else:
            shares = self._parted(expected_s, now)
        self._running += shares
        return shares

    def _parted(self, expected_s: Callable[[MergeJob], float], now: float) -> list[Share]:
        timed = [(job, expected_s(job)) for job in self._ready]
        long = [job for job, seconds in timed if seconds >= _LONG_S]
        short = [(job, seconds) for job, seconds in timed if seconds < _LONG_S]
        if short:
            self._short_at = now
        kept = int(now - self._short_at < _SHORT_ONES_COME_S)
        # If no share of short merges is running, reserve a free slot for one. Otherwise the ready short
        # merges can follow it in its slot.
        for_short = int(bool(short) and len(self._running) == len(self._long))
        room = max(0, min(self.free - for_short, self.slots - kept - len(self._long)))
        alone = [[job] for job in long[:room]]
        self._long |= {job.oid for job in long[:room]}
        left = self.free - len(alone)
        # A lagging table always has another merge ready. Its waiting merges must not stop `choose` from
        # choosing long merges of tables that have caught up.
        self._long_waits = any(not job.is_planned for job in long[room:])
        self._ready = [*long[room:], *(job for job, _ in short if not left)]
        return [*alone, *(make_shares(short, left) if left else [])]

    def end(self, share: Share, results: list[TableResult]) -> None:
        """Record that a share has ended. Its jobs without a result become ready again, before all others."""
        self._running = [other for other in self._running if other is not share]
        self._long -= {job.oid for job in share}
        done = {result.relation_id for result in results}
        self._ready = [*(job for job in share if job.oid not in done), *self._ready]


Done = Callable[[Share, list[TableResult], Exception | None], None]


class MergeTaskPool:
    """A thread pool that runs shares as Spark tasks.

    `done` is called in a thread of the pool when a share ends, with the share, the results of the jobs that
    ran, and the error if the Spark task failed (otherwise None).
    """

    def __init__(self, spark: SparkSession, done: Done) -> None:
        self._context = spark.sparkContext
        self._done = done
        self._threads = ThreadPoolExecutor(_MOST, thread_name_prefix="pgrepl-merge")

    @property
    def slots(self) -> int:
        """Return how many shares Spark can run at the same time, at least 1 and at most 256. Raises
        SparkError.

        Counted on each call, because a cluster adds and removes executors.
        """
        with spark_errors("counting executors"):
            return min(_MOST, max(1, slots_of(self._context)))

    def run(self, share: Share) -> None:
        """Submit a share to the pool, and return without waiting for it."""
        self._threads.submit(self._run, share)

    def close(self) -> None:
        """Wait until the threads of the pool have ended. Every share has to be finished before."""
        self._threads.shutdown()

    def _run(self, share: Share) -> None:
        results: list[TableResult] = []
        failed: Exception | None = None
        try:
            with spark_errors("applying changes"):
                task = on_executor(run_share)
                frames = self._context.parallelize([list(share)], 1).map(task).collect()
            results = result_of(frames[0])
        except Exception as error:  # noqa: BLE001 - the thread that waits for the share raises it
            log_unexpected(log, "applying changes", error)
            failed = error
        try:
            self._done(share, results, failed)
        except Exception as error:
            # The pool stores the exception in a future that is never read, so it is logged here.
            log_unexpected(log, "taking the results of a share", error)
            raise
