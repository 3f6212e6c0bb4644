"""MergeJob: the merge of one table's changes; and shares of them, each of which Spark runs as one task."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.replication.changelog.reader import ChangelogFile
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableResult, TableWork, bring_forward
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.lake import is_object_store
from airflow_provider_pgrepl.replication.spark.executors import on_executor, result_of, slots_of
from airflow_provider_pgrepl.replication.spark.failures import spark_errors
from airflow_provider_pgrepl.trace import log_unexpected

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


END = LSN(2**63 - 1)

SHARE_S = 0.5
"""So long a share begins with one more table. What is left of it then does not wait for those before."""
_IN_STORE, _SMALL_BYTES = 4, 16 << 20
"""So many merges of a share run beside each other in a store, if their changes together are no more bytes."""
log = logging.getLogger(__name__)
_MOST = 256
"""Shares at once; a thread is made when one is wanted, and waits for its share."""


@dataclass(frozen=True)
class MergeJob:
    """The files that bring a table forward, in LSN order, with which it has caught up with the changelog at
    version `through`, unless there are more of them (`is_last`); taken at which snapshot; bytes of values.

    `reach_lsn`: all up to it is in them, or in the table already.
    """

    work: TableWork
    snapshot: LSN
    through: int
    paths: tuple[str, ...]
    bytes: int
    upto_lsn: LSN = END
    reach_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    is_last: bool = True

    @property
    def oid(self) -> int:
        """The relation's."""
        return self.work.relation.oid

    @property
    def is_planned(self) -> bool:
        """Whether its files are what the changelog holds, and not what has come since the table caught up."""
        return self.upto_lsn != END

    @classmethod
    def plan(
        cls,
        work: TableWork,
        snapshot: LSN,
        files: list[ChangelogFile],
        upto: tuple[int, LSN],
        limit: int,
    ) -> MergeJob:
        """At most `limit` bytes of values, but never parting files that may share a transaction.

        `upto`: the version of the changelog, and up to what it is durable there.
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
            # Of a file that goes on behind the end, what is there has to be looked for again.
            min(max((file.max_lsn for file in taken), default=LSN(0)), LSN(upto_lsn - 1)),
            len(taken) == len(wanted),
        )

    def run(self) -> TableResult:
        """What a Spark task does; errors come back as part of the result."""
        started = time.monotonic()
        result = bring_forward(self.work, self.paths, self.upto_lsn)
        return replace(result, seconds=time.monotonic() - started)


Share = Sequence[MergeJob]
"""Merges that one task does, small ones of a lake in a store some beside each other."""


def take_bytes(files: list[ChangelogFile], limit: int) -> list[ChangelogFile]:
    """The first files up to a size, never parting files that may share a transaction."""
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
    """The results of the first jobs of a share: of one at least, and of no more once they have taken long."""
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
    """How many small merges of one share run beside each other: in a store they wait most of their time."""
    return _IN_STORE if is_object_store(lake_root) else 1


def make_shares(jobs: Iterable[tuple[MergeJob, float]], most: int) -> list[list[MergeJob]]:
    """Jobs, each with the seconds that it is expected to take, in at most so many shares of about the same
    length; in each in the order in which they came."""
    shares: list[list[MergeJob]] = [[] for _ in range(most)]
    load = [0.0] * most
    for job, seconds in jobs:
        lightest = load.index(min(load))
        shares[lightest].append(job)
        load[lightest] += seconds + 0.001
    return [share for share in shares if share]


Done = Callable[[Share, list[TableResult], Exception | None], None]


class ShareRunner:
    """`done` is called, in a thread of its own, with each share, the results of its first jobs, and what has
    failed if Spark did."""

    def __init__(self, spark: SparkSession, done: Done) -> None:
        self._context = spark.sparkContext
        self._done = done
        self._threads = ThreadPoolExecutor(_MOST, thread_name_prefix="pgrepl-merge")

    @property
    def slots(self) -> int:
        """How many shares Spark runs at once: on a cluster executors come and go. Raises SparkError.

        One task more is left for the streaming query: however long merges take, it has to hear what has come.
        """
        with spark_errors("counting executors"):
            return min(_MOST, max(1, slots_of(self._context) - 1))

    def run(self, share: Share) -> None:
        """Returns at once."""
        self._threads.submit(self._run, share)

    def close(self) -> None:
        """Wait for the threads, whose shares have ended."""
        self._threads.shutdown()

    def _run(self, share: Share) -> None:
        results: list[TableResult] = []
        failed: Exception | None = None
        try:
            with spark_errors("applying changes"):
                task = on_executor(run_share)
                frames = self._context.parallelize([list(share)], 1).map(task).collect()
            results = result_of(frames[0])
        except Exception as error:  # noqa: BLE001 - whoever waits for the share raises it
            log_unexpected(log, "applying changes", error)
            failed = error
        try:
            self._done(share, results, failed)
        except Exception as error:
            # The pool keeps it, and nobody asks the pool.
            log_unexpected(log, "taking the results of a share", error)
            raise
