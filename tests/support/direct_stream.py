"""A streaming query without Spark: the changelog's source is asked by a thread of the test's process.

Spark starts Python processes for each query, which cost seconds, and asks them the same in the same order.
The applier cannot tell the difference: it is given batches. Its merges are tasks of the tests' session.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pyspark.sql.types import StructType

from airflow_provider_pgrepl.replication.lake.apply.changelog_source import FORMAT, ChangelogSource

Batches = Callable[[Any, int], None]


class DirectStreams:
    """A replacement for `spark.readStream`. Keeps an offset for each checkpoint, as Spark does."""

    def __init__(self) -> None:
        self.offsets: dict[str, dict[str, int]] = {}

    def format(self, name: str) -> _Stream:
        assert name == FORMAT
        return _Stream(self.offsets)


class _Stream:
    """A stream reader, data frame and stream writer in one class."""

    def __init__(self, offsets: dict[str, dict[str, int]]) -> None:
        self._offsets = offsets
        self._options: dict[str, str] = {}
        self._available_now = False

    def option(self, name: str, value: str) -> _Stream:
        self._options[name] = value
        return self

    def load(self) -> _Stream:
        return self

    @property
    def writeStream(self) -> _Stream:  # noqa: N802 - Spark's name
        return self

    def foreachBatch(self, take: Batches) -> _Stream:  # noqa: N802 - Spark's name
        self._take = take
        return self

    def trigger(self, *, availableNow: bool = False, processingTime: str = "") -> _Stream:  # noqa: N803 - Spark's
        assert availableNow or processingTime
        self._available_now = availableNow
        return self

    def start(self) -> DirectQuery:
        return DirectQuery(self._options, self._offsets, self._take, available_now=self._available_now)


class DirectQuery:
    """A query that has been started; its batches come one after another, as Spark's do."""

    def __init__(
        self,
        options: dict[str, str],
        offsets: dict[str, dict[str, int]],
        take: Batches,
        *,
        available_now: bool,
    ) -> None:
        self._reader: Any = ChangelogSource(options).streamReader(StructType())
        self._offsets, self._checkpoint = offsets, options["checkpointLocation"]
        self._take = take
        self._available_now = available_now
        self._stopping = threading.Event()
        self._giving = threading.Lock()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="direct stream", daemon=True)
        self._thread.start()

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        return self._thread.is_alive() and not self._stopping.is_set()

    def exception(self) -> Exception | None:
        return self._failure

    def stop(self) -> None:
        """Stop the query, and wait until the batch that is being processed has ended."""
        self._stopping.set()
        with self._giving:
            pass

    def _run(self) -> None:
        try:
            if self._available_now:
                self._reader.prepareForTriggerAvailableNow()
            number = 0
            while not self._stopping.is_set():
                if self._next_batch(number):
                    number += 1
                elif self._available_now:
                    return
        except Exception as error:  # as Spark, which reports it only on request
            self._failure = error

    def _next_batch(self, number: int) -> bool:
        """Process the next batch. Returns False if there are no new changes."""
        # Before its first batch Spark has no offset, and asks the source for the initial one.
        start = self._offsets.get(self._checkpoint) or self._reader.initialOffset()
        end = self._reader.latestOffset(start, None)
        if end == start:
            return False
        rows = [
            SimpleNamespace(work=work)
            for partition in self._reader.partitions(start, end)
            for batch in self._reader.read(partition)
            for work in batch.column("work").to_pylist()
        ]
        with self._giving:
            if not self._stopping.is_set():
                self._take(SimpleNamespace(collect=lambda: rows), number)
                self._offsets[self._checkpoint] = end
                self._reader.commit(end)
        return True
