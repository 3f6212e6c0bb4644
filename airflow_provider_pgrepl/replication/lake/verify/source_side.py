"""The source's side of a comparison: Spark tasks that read and reduce ranges of a table at a snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow_provider_pgrepl.replication.lake.snapshot.csv import CsvTypeError, read_csv
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import RangeOutcome, RangeTasks, outcome_of
from airflow_provider_pgrepl.replication.lake.verify.row_pick import Job
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange, open_copy
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import TableSnapshotHolder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_RANGES_AT_ONCE = 32
"""The ranges whose results the driver holds at the same time."""


@dataclass(frozen=True)
class SourceReading:
    """The reading of one table's ranges, as it is sent to the tasks."""

    dsn: str
    snapshot: str
    relation: Relation
    options: TableOptions
    collection: Job

    def copy(self, number: int, copy_range: CopyRange) -> RangeOutcome:
        return outcome_of(number, f"comparing {self.relation.table}", lambda: self._collect(copy_range))

    def under(self, snapshot: str) -> SourceReading:
        return replace(self, snapshot=snapshot)

    def _collect(self, copy_range: CopyRange) -> Any:
        with suppress(CsvTypeError):
            return self._attempt(copy_range, as_text=False)
        return self._attempt(copy_range, as_text=True)

    def _attempt(self, copy_range: CopyRange, *, as_text: bool) -> Any:
        collector = self.collection.begin()
        with open_copy(self.dsn, self.snapshot, copy_range) as stream:
            batches = read_csv(stream, self.relation, self.options, as_text=as_text)
            with closing(batches):  # type: ignore[type-var]
                for batch in batches:
                    collector.add(batch)
        return collector.result


@dataclass(frozen=True)
class SourceSide:
    """A table of the source at the snapshot of its keeper.

    `relation`: without the columns that are not copied. `sessions`: how many ranges are read at once.
    `reading`: the class by which tasks read a range.
    """

    spark: SparkSession
    dsn: str
    keeper: TableSnapshotHolder
    relation: Relation
    options: TableOptions
    ranges: Sequence[CopyRange]
    sessions: int
    reading: type[SourceReading] = SourceReading

    def collect(self, collection: Job) -> Any:
        """Return what the collection finds in the table. Raises as `RangeCopies.run`."""
        return collection.merge(self._results(collection))

    def _results(self, collection: Job) -> Iterator[Any]:
        reading = self.reading(self.dsn, self.keeper.snapshot, self.relation, self.options, collection)
        for first in range(0, len(self.ranges), _RANGES_AT_ONCE):
            tasks = RangeTasks(self.spark, reading.under(self.keeper.snapshot), self.keeper, self.sessions)
            yield from tasks.results(self.ranges[first : first + _RANGES_AT_ONCE])
