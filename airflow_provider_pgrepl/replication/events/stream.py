"""Reading a pipeline's changes in Python, one by one and in order, for who has the lake and no broker.

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

from airflow_provider_pgrepl.replication.events.changes import Change
from airflow_provider_pgrepl.replication.events.formats.json_text import to_json
from airflow_provider_pgrepl.replication.events.position import After, EventPosition
from airflow_provider_pgrepl.replication.events.reader import ChangeReader
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline


def stream(
    lake: str | Path | Pipeline,
    tables: Collection[str] | None = None,
    *,
    after: After = None,
    follow: bool = True,
    poll_s: float = 0.5,
) -> ChangeStream:
    """The changes of a pipeline's tables (of all of them without `tables`), each once, in commit order.

    `lake`: its lake root; or the pipeline, whose choices of types then hold. `after`: where to begin: the id
    of the last change that was read; a consistent point, after what the lake's tables show there; an LSN of
    the newest epoch (a number, or as `0/16B3748`), after the transaction that committed there, also one that
    the changelog has yet to reach, of which a warning is logged; a moment with
    a time zone, with the first transaction that committed later by the source's clock, or with what comes;
    None, with the oldest change that is kept of the newest epoch. With `follow` it waits for what comes, and
    looks every `poll_s` seconds; else it ends.

    Reading it raises ChangelogError when changes after `after` are gone, or when a new epoch has begun: what
    happened between two epochs is in no changelog, only in the lake. Raises GapError before a transaction
    that was skipped, ValueRangeError before a change whose value its type here cannot hold, ConfigError,
    LakeUnavailableError. All say after what to go on.
    """
    return ChangeStream(lake, tables, after, follow=follow, poll_s=poll_s)


class ChangeStream:
    """Changes for `for` and `async for`; may be waited for with a time limit, and gone on with."""

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
        """After the last change that was given, or later: after all that was looked through since. Its text
        is what `after` takes. For tables that change seldom write it down from time to time: an id may be
        older than what is kept. None before the first change was waited for."""
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
            # Who stops waiting leaves a thread that reads on; what that finds is for who waits next.
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
        """Whether there was anything to read."""
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
    """Some lines at a time, each as `to_json` has it. Arguments and errors are those of `stream`."""
    reader = ChangeReader(lake, tables, after=after)
    while True:
        for batch in reader.read():
            yield "".join(f"{to_json(change)}\n" for change in batch)
        if not follow:
            return
        time.sleep(poll_s)
