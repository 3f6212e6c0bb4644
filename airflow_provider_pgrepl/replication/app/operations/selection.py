"""Waiting until nobody is in the way: locks of a pipeline, and batches that have begun."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from airflow_provider_pgrepl.errors import BusyError, StateError
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.state.locks import Purpose
from airflow_provider_pgrepl.replication.state.store import Store

_POLL_S = 0.1
_LOOK_S = 2.0
_SAY_EVERY_S = 60.0

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


def wait_until_unlocked(
    access: Access,
    purpose: Purpose,
    timeout_s: float,
    say: Callable[[str], None],
    pause: Callable[[float], None],
) -> None:
    """Wait until no process holds the pipeline's lock for this purpose, and name the holder once a minute.

    Takes no lock and writes nothing. Raises BusyError after `timeout_s` seconds, SourceConnectionError, and
    what `pause` raises.
    """
    deadline, next_say = time.monotonic() + timeout_s, time.monotonic()
    while True:
        try:
            with Store(access.state_dsn, f"preflight {access.pipeline.name}") as store:
                store.check_unlocked(access.pipeline.name, purpose)
            return
        except StateError:
            return  # a schema of another version, which the application brings to its own, or refuses
        except BusyError as error:
            now = time.monotonic()
            if now >= deadline:
                raise
            if now >= next_say:
                next_say = now + _SAY_EVERY_S
                say(f"Waiting: {error.message}")
        pause(_LOOK_S)


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
