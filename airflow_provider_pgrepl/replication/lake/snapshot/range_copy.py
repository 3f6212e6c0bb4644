"""Copies the ranges of one table in Spark tasks. Failed ranges are copied again, and finished ones are
kept."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.accumulators import AccumulatorParam
from pyspark.errors import PySparkException

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication import values
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import (
    WrittenFile,
    data_files,
    delete_uncommitted,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.source.copy.copy_stream import (
    CopyRange,
    checked_together,
    open_copy,
    unchanged,
)
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import TableSnapshotHolder
from airflow_provider_pgrepl.replication.spark.executors import IncompatibleHost, on_executor, result_of
from airflow_provider_pgrepl.replication.spark.failures import (
    is_of_workers,
    spark_error,
    text_of,
    trace_in_words,
    what_executors_lack,
)
from airflow_provider_pgrepl.trace import log_unexpected, trace_of

from .csv import CsvTypeError, read_csv
from .kept_ranges import KeptRanges

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


__all__ = ["WrittenFile", "read_csv", "write_files", "write_range"]
log = logging.getLogger(__name__)
_PAUSES_S = (0.5, 5.0, 15.0)
"""Seconds to wait before each further attempt at the ranges that failed. Their number limits the attempts."""


def write_range(
    dsn: str,
    snapshot: str,
    copy_range: CopyRange,
    relation: Relation,
    options: TableOptions,
    lake_root: str,
    position: LSN,
    exported_at: datetime,
) -> list[WrittenFile]:
    """Copy one range, and return its files. Every row has the snapshot's position and time in the bookkeeping
    columns.

    If pyarrow's CSV reader cannot convert a value, the range is read again as text. A failed attempt leaves
    no file. Raises SourceError, ValueRangeError or LakeError. None of them contains a value.
    """

    def attempt(*, as_text: bool) -> list[WrittenFile]:
        batches = _copy(dsn, snapshot, copy_range, relation, options, as_text=as_text)
        # Close it here, so that the server's COPY ends before this returns or tries again.
        with closing(batches):
            return write_files(batches, relation, options, lake_root, position, exported_at)

    with suppress(CsvTypeError):
        return attempt(as_text=False)
    return attempt(as_text=True)


def _copy(
    dsn: str,
    snapshot: str,
    copy_range: CopyRange,
    relation: Relation,
    options: TableOptions,
    *,
    as_text: bool,
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the range's rows. Ends only after COPY succeeded: an error of COPY is raised before a file is
    complete."""
    with open_copy(dsn, snapshot, copy_range) as stream:
        yield from read_csv(stream, relation, options, as_text=as_text)


def write_files(
    batches: Iterator[pa.RecordBatch],
    relation: Relation,
    options: TableOptions,
    lake_root: str,
    position: LSN,
    exported_at: datetime,
) -> list[WrittenFile]:
    """Write all batches, which have the relation's columns, and return the files. If this raises, no file
    remains."""
    schema = values.lake_schema(relation, options)
    constants = {
        values.DELETED: pa.scalar(False, pa.bool_()),
        values.COMMIT_LSN: pa.scalar(int(position), pa.int64()),
        values.COMMIT_TS: pa.scalar(exported_at, pa.timestamp("us", "UTC")),
    }
    marks = [constants[name] for name in schema.names if name in constants]
    partitions = values.partitioning(relation, options)
    with data_files(lake_root, relation.table.path, schema) as files:
        for batch in batches:
            files.write(_marked(batch, marks, partitions, schema))
        return files.finish()


def _marked(
    batch: pa.RecordBatch, marks: list[Any], partitions: values.Partitioning | None, schema: pa.Schema
) -> pa.RecordBatch:
    columns = [*batch.columns, *(pa.repeat(mark, batch.num_rows) for mark in marks)]
    if partitions is not None:
        columns.append(partitions.texts(batch.column(schema.get_field_index(partitions.typed.name))))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@dataclass(frozen=True)
class CopyJob:
    """One table's part of the snapshot, as it is sent to the tasks."""

    dsn: str
    snapshot: str
    relation: Relation
    options: TableOptions
    lake_root: str
    position: LSN
    exported_at: datetime

    def copy(self, number: int, copy_range: CopyRange) -> RangeOutcome:
        """Copy a range."""

        def work() -> list[WrittenFile]:
            return write_range(
                self.dsn,
                self.snapshot,
                copy_range,
                self.relation,
                self.options,
                self.lake_root,
                self.position,
                self.exported_at,
            )

        return outcome_of(number, f"copying {self.relation.table}", work)

    def under(self, snapshot: str) -> CopyJob:
        return replace(self, snapshot=snapshot)


def outcome_of(number: int, doing: str, work: Callable[[], Any]) -> RangeOutcome:
    """Do the work of a task, and return its result or its error as an outcome."""
    try:
        return RangeOutcome(number, work())
    except errors.PgReplError as error:
        kind = error.__class__.__name__
        return RangeOutcome(number, None, kind, error.message, error.hint, error.trace)
    except Exception as error:  # noqa: BLE001 - it goes into the outcome, without its text
        # The message may contain values of rows, so only the class and the frames are reported.
        log_unexpected(log, doing, error)
        message = f"unexpected {error.__class__.__name__}"
        return RangeOutcome(number, None, "TableError", message, trace=trace_of(error))


@dataclass(frozen=True)
class RangeOutcome:
    """The outcome of a task: its result, or the error as data, so that no value is sent in a traceback.

    `result`: of a copy, the files; None if those of an earlier copy are kept.

    `trace`: classes and frames of an unexpected exception behind the error, otherwise empty.
    """

    number: int
    result: Any = None
    error_kind: str = ""
    message: str = ""
    hint: str = ""
    trace: str = ""

    @property
    def error(self) -> errors.PgReplError | None:
        if not self.error_kind:
            return None
        kind: type[errors.PgReplError] = getattr(errors, self.error_kind)
        error = kind(self.message, self.hint)
        error.trace = self.trace
        return error


_Answers = list[RangeOutcome | IncompatibleHost]


class _Gathered(AccumulatorParam[_Answers]):
    """Sends the outcome of each task to the driver when the task ends, so that it is kept if another task
    crashes.

    `arrived`: called in the driver with outcomes that arrive. It must not raise.
    """

    def __init__(self, arrived: Callable[[_Answers], None] | None = None) -> None:
        self._arrived = arrived

    def __reduce__(self) -> tuple[type[_Gathered], tuple[()]]:
        return _Gathered, ()

    def zero(self, value: _Answers) -> _Answers:  # noqa: ARG002 - Spark's
        return []

    def addInPlace(self, value1: _Answers, value2: _Answers) -> _Answers:  # noqa: N802 - Spark's name
        if self._arrived is not None:
            self._arrived(value2)
        return value1 + value2


class RangeJob(Protocol):
    """Something that a task does with each range of a table at a snapshot."""

    @property
    def relation(self) -> Relation: ...

    def copy(self, number: int, copy_range: CopyRange) -> RangeOutcome:
        """Copy one range, and return its result or error."""

    def under(self, snapshot: str) -> Self:
        """Return the job under another name of the snapshot."""


Job = TypeVar("Job", bound=RangeJob)


class RangeTasks(Generic[Job]):
    """The tasks of one table's ranges under one keeper. At most `sessions` of them run at the same time.

    `finished`: called with number and result of each finished range when its task ends, in another thread. It
    must not raise.
    """

    after_crash: ClassVar[str] = "run the command again"
    """The last step of the hint for tasks that have crashed."""

    def __init__(
        self,
        spark: SparkSession,
        job: Job,
        keeper: TableSnapshotHolder,
        sessions: int,
        finished: Callable[[int, Any], None] = lambda _number, _result: None,
    ) -> None:
        self._spark = spark
        self._job = job
        self._keeper = keeper
        self._sessions = sessions
        self._finished = finished

    def results(self, ranges: Sequence[CopyRange]) -> list[Any]:
        """Run the job for all ranges, and return its results in their order. Raises as `RangeCopies.run`."""
        done: dict[int, RangeOutcome] = {}
        self._run(ranges, done)
        return [done[number].result for number in sorted(done)]

    def _run(self, ranges: Sequence[CopyRange], done: dict[int, RangeOutcome]) -> None:
        pauses = iter(_PAUSES_S)
        while True:
            left = {number: part for number, part in enumerate(ranges) if number not in done}
            error = self._try(left, done) if left else None
            if error is None:
                break
            self._keeper.check()
            if error.retry is errors.Retry.NEVER and not isinstance(error, _CrashedError):
                raise error
            if self._keeper.renew():
                self._job = self._job.under(self._keeper.snapshot)
                continue
            pause = next(pauses, None)
            if pause is None:
                raise _picklable(error)
            log.warning(
                "%s: %d of %d ranges are copied and kept; the others, as one failed (%s), are copied again"
                " under the same snapshot in %g s",
                self._job.relation.table,
                len(done),
                len(ranges),
                error.message,
                pause,
            )
            time.sleep(pause)
        self._keeper.check()

    def _tasks(self, ranges: int) -> int:
        """Return the number of tasks. An outcome arrives when its task ends, so that a kill loses what the
        running tasks have copied: a task for each range loses the least.

        On a cluster, whose number of cores may grow, only the number of tasks limits that of sessions.
        """
        context = self._spark.sparkContext
        is_local = re.fullmatch(r"local(\[.*\])?", str(context.master)) is not None
        has_few_cores = is_local and context.defaultParallelism <= self._sessions
        return ranges if has_few_cores else min(ranges, self._sessions)

    def _try(self, left: Mapping[int, CopyRange], done: dict[int, RangeOutcome]) -> errors.PgReplError | None:
        """Copy the ranges that are left, and add the finished ones to `done`. Return the error of one that
        failed, or None."""
        context = self._spark.sparkContext
        gathered = context.accumulator([], _Gathered(self._arrived))
        copy = on_executor(self._job.copy)
        crash: errors.PgReplError | None = None
        table = self._job.relation.table
        try:
            context.parallelize(list(left.items()), self._tasks(len(left))).foreach(
                lambda part: gathered.add([copy(*part)])
            )
        except (Py4JJavaError, PySparkException) as error:
            # The message may contain values of rows. If the Spark context was stopped, raise: this is not an
            # error of the table.
            if context._jsc is None or context._jsc.sc().isStopped():
                raise
            trace = text_of(error)
            crash = (
                spark_error(f"copying {table}", trace)
                if is_of_workers(trace) or what_executors_lack(trace)
                else _crashed(table, trace, self.after_crash)
            )
        failed: list[errors.PgReplError] = []
        for outcome in map(result_of, gathered.value):
            if outcome.error is None:
                done[outcome.number] = outcome
            else:
                failed.append(outcome.error)
        # An error that no retry can resolve comes first: it decides whether to try again.
        failed.sort(key=lambda error: error.retry is not errors.Retry.NEVER)
        return failed[0] if failed else crash

    def _arrived(self, answers: _Answers) -> None:
        for outcome in answers:
            if isinstance(outcome, RangeOutcome) and outcome.error is None:
                self._finished(outcome.number, outcome.result)


class RangeCopies(RangeTasks[CopyJob]):
    """The copies of one table's ranges into files. A crash leaves the table errored."""

    after_crash = errors.RESNAPSHOT

    def run(self, ranges: Sequence[CopyRange], kept: KeptRanges | None = None) -> list[WrittenFile]:
        """Copy all ranges, and return their files. Failed ranges are copied again under the same snapshot,
        and finished ones are kept.

        Ranges that ended because the keeper lent its lock to a statement are copied again without a pause.
        Raises the error of a range if a retry cannot help, or if the retries have failed. Raises
        TableSnapshotError if the keeper gave up the table or is lost, even if all ranges are copied. Raises
        TableError if the tasks crash in every attempt. If this raises, the ranges are recorded in `kept`, or
        their files are deleted if that is not possible.
        """
        done = {number: RangeOutcome(number) for number in self._find_unchanged(ranges)}
        try:
            self._run(ranges, done)
        except BaseException:
            files = [file for outcome in done.values() for file in outcome.result or ()]
            if kept is None:
                delete_uncommitted(self._job.lake_root, self._job.relation.table.path, files)
            else:
                kept.leave(files)
            raise
        return [file for number in sorted(done) for file in _files(ranges[number], done[number].result, kept)]

    def _find_unchanged(self, ranges: Sequence[CopyRange]) -> set[int]:
        """Return the numbers of the ranges that an earlier copy has read, and whose rows are the same.

        The server counts the rows of many ranges with one statement, and sends two numbers for each. A task
        and a connection for each range take several times as long as that.
        """
        numbers = {id(one): number for number, one in enumerate(ranges)}
        left, found = checked_together(ranges, self._sessions), set[int]()
        while left:
            failed = []
            with ThreadPoolExecutor(self._sessions, "pgrepl-unchanged") as threads:
                for group, same in zip(left, threads.map(self._unchanged, left), strict=True):
                    failed += [group] if same is None else []
                    for number in sorted(numbers[id(one)] for one in same or ()):
                        found.add(number)
                        self._finished(number, None)
            if not failed or not self._keeper.renew():
                break
            # The keeper has lent its lock to a statement.
            self._job = self._job.under(self._keeper.snapshot)
            left = failed
        return found

    def _unchanged(self, group: Sequence[CopyRange]) -> list[CopyRange] | None:
        """Return the ranges that are unchanged; None if the check fails or takes too long. They are copied
        then, which reports an error that lasts."""
        with suppress(errors.SourceError):
            return unchanged(self._job.dsn, self._job.snapshot, group)
        return None


def _files(
    part: CopyRange, written: Sequence[WrittenFile] | None, kept: KeptRanges | None
) -> Sequence[WrittenFile]:
    """Return the files of a range: `written`, or those that are kept from an earlier copy."""
    if written is not None:
        return written
    assert kept is not None
    assert part.copied is not None
    return kept.files(part.copied)


class _CrashedError(errors.TableError):
    """Tasks that crashed without returning a result."""


def _crashed(table: TableName, trace: str, then: str) -> _CrashedError:
    error = _CrashedError(
        f"{table}: Spark tasks that copy it have crashed",
        "read the logs of Spark's executors. If memory ran out, set a smaller snapshot_range_bytes. Then"
        f" {errors.named(then, table)}",
    )
    error.trace = trace_in_words(trace)
    log.warning("%s:\n%s", error.message, error.trace)
    return error


def _picklable(error: errors.PgReplError) -> errors.PgReplError:
    if not isinstance(error, _CrashedError):
        return error
    sent = errors.TableError(error.message, error.hint)
    sent.trace = error.trace
    return sent
