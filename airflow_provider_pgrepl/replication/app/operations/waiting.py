"""Waiting until nobody is in the way: locks of a pipeline, and batches that have begun."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from airflow_provider_pgrepl.errors import BusyError
from airflow_provider_pgrepl.replication.state.store import Purpose, Store

_POLL_S = 0.1

Result = TypeVar("Result")


class Deadline:
    """A moment up to which busy things are tried again."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    def retry(self, attempt: Callable[[], Result]) -> Result:
        """Try until `attempt` raises BusyError no more; return what it gives. In the end raise that error."""
        while True:
            try:
                return attempt()
            except BusyError:
                if time.monotonic() >= self._end:
                    raise
            time.sleep(_POLL_S)


def lock(store: Store, pipeline: str, purpose: Purpose, deadline: Deadline) -> None:
    """Take the pipeline's lock for this purpose. Raises BusyError, which names who holds it."""
    deadline.retry(lambda: store.lock(pipeline, purpose))


def lock_all(store: Store, pipeline: str, deadline: Deadline) -> None:
    """Take the pipeline's locks for every purpose: those of its apps, and of each publisher that runs.

    Raises BusyError, which names who holds one.
    """
    for purpose in ("replicate", "snapshot"):
        lock(store, pipeline, purpose, deadline)
    # A publisher that starts meanwhile finds its pipeline gone, or holds a lock by the next look.
    while held := store.held_by_others(pipeline):
        for purpose in held:
            lock(store, pipeline, purpose, deadline)


def wait_until_let_go(store: Store, pipeline: str, since: datetime, deadline: Deadline) -> None:
    """Wait until the replication app works by the states that were set before `since`, by the clock of the
    state database: a batch has begun later, so that none of before is running, or no app is.

    Raises BusyError.
    """

    def attempt() -> None:
        progress = store.read_progress(pipeline)
        if progress is None or progress.idle_at is None or progress.idle_at <= since:
            store.lock(pipeline, "replicate")

    deadline.retry(attempt)
