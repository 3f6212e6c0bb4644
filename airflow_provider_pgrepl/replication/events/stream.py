"""Reading of a pipeline's changes in Python, one by one and in order, without a broker.

async for change in stream("/lake/shop", ["public.orders"], after=last_id):
    print(change.op, change.table, change.data)
    last_id = change.id
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from airflow_provider_pgrepl.replication.events.formats.json_text import to_json
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

from .changes import Change
from .position import After, EventPosition
from .reader import ChangeReader


def stream(
    lake: str | Path | Pipeline,
    tables: Collection[str] | None = None,
    *,
    after: After = None,
    follow: bool = True,
    poll_s: float = 0.5,
) -> ChangeStream:
    """Return the changes of a pipeline's tables, each once and in commit order.

    `lake`: the lake root, or the Pipeline, whose column types then apply. Without `tables`, all tables are
    read.

    `after`: the position to start from:

    - the id of the last change that was read;
    - a consistent point: starts after the changes that the lake tables contain at it;
    - an LSN of the newest epoch (a number, or text such as `0/16B3748`): starts after the transaction that
      committed there. If the changelog has not reached that LSN yet, a warning is logged;
    - a datetime with a time zone: starts with the first transaction that committed later by the source's
      clock, or with the next one;
    - None: starts with the oldest retained change of the newest epoch.

    With `follow`, the iterator waits for new changes and polls every `poll_s` seconds; otherwise it ends.

    Iterating raises ChangelogError if changes after `after` are gone, or if a new epoch has begun: no
    changelog holds the changes between two epochs, only the lake does. It raises GapError before a skipped
    transaction, ValueRangeError before a change with a value that its Python type cannot hold, and
    ConfigError and LakeUnavailableError. The hints say how to continue.
    """
    return ChangeStream(lake, tables, after, follow=follow, poll_s=poll_s)


class ChangeStream:
    """An iterator of changes for `for` and `async for`.

    Waiting for the next change can be canceled, for example by a time limit, and resumed without losing
    changes.
    """

    def __init__(
        self,
        lake: str | Path | Pipeline,
        tables: Collection[str] | None,
        after: After,
        *,
        follow: bool,
        poll_s: float,
    ) -> None:
        self._begin: Callable[[], ChangeReader] = lambda: ChangeReader(lake, tables, after=after)
        self._follow, self._poll_s = follow, poll_s
        self._reader: ChangeReader | None = None
        self._waiting: deque[Change] = deque()
        self._last: EventPosition | None = None
        self._filling: asyncio.Future[bool] | None = None

    @property
    def position(self) -> EventPosition | None:
        """Return the position after the last change returned, or after later changes that did not match.

        Its text can be passed as `after`. Store it from time to time for tables that rarely change: the id of
        their last change may become older than the retained changes. None before the first change was
        requested.
        """
        return self._last

    def __iter__(self) -> Iterator[Change]:
        while True:
            while self._waiting:
                yield self._given()
            if not self._fill() and not self._waiting:
                if not self._follow:
                    return
                time.sleep(self._poll_s)

    def _given(self) -> Change:
        change = self._waiting.popleft()
        self._last = change.position
        return change

    def __aiter__(self) -> ChangeStream:
        return self

    async def __anext__(self) -> Change:
        while not self._waiting:
            # A canceled caller leaves a thread that continues to read. Its changes go to the next caller.
            if self._filling is None:
                self._filling = asyncio.ensure_future(asyncio.to_thread(self._fill))
            try:
                is_more = await asyncio.shield(self._filling)
            finally:
                if self._filling.done():
                    self._filling = None
            if not is_more and not self._waiting:
                if not self._follow:
                    raise StopAsyncIteration
                await asyncio.sleep(self._poll_s)
        return self._given()

    def _fill(self) -> bool:
        """Read the next changes into the buffer. Return True if there was anything to read."""
        if self._reader is None:
            self._reader = self._begin()
        changes = self._reader.read_next()
        self._waiting.extend(changes or ())
        if not self._waiting:
            self._last = self._reader.position
        return changes is not None


def json_lines(
    lake: str | Path | Pipeline,
    tables: Collection[str] | None = None,
    after: After = None,
    *,
    follow: bool = False,
    poll_s: float = 0.5,
) -> Iterator[str]:
    """Yield batches of changes as JSON lines in the format of `to_json`.

    Arguments and errors are those of `stream`.
    """
    reader = ChangeReader(lake, tables, after=after)
    while True:
        for batch in reader.read():
            yield "".join(f"{to_json(change)}\n" for change in batch)
        if not follow:
            return
        time.sleep(poll_s)
