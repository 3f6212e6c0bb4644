"""Deadlines of blocks, which one thread watches: to start a thread for each statement takes longer than the
statement."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NEVER = float("inf")


class Deadlines:
    """A thread that calls a function for each block which does not end in time.

    The first block starts the thread. A forked process has none of the parent's blocks, and a thread of its
    own.
    """

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._blocks: dict[object, tuple[float, Callable[[], None]]] = {}
        self._wakes_at = _NEVER
        self._has_thread = False

    @contextmanager
    def calling(self, end: Callable[[], None], limit_s: float) -> Iterator[None]:
        """Call `end` once, in the thread, if the block takes longer than `limit_s` seconds.

        `end` returns at once and raises nothing. It is not running or called after the block.
        """
        block, deadline = object(), time.monotonic() + limit_s
        with self._changed:
            self._blocks[block] = (deadline, end)
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._watch, name="pgrepl-deadlines", daemon=True).start()
            elif deadline < self._wakes_at:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._blocks.pop(block, None)

    def _watch(self) -> None:
        """Sleep until the next deadline, also if its block ends before: the next blocks need no wake-up."""
        with self._changed:
            while True:
                now = time.monotonic()
                overdue = [block for block, (deadline, _) in self._blocks.items() if deadline <= now]
                for block in overdue:
                    self._blocks.pop(block)[1]()
                self._wakes_at = min((deadline for deadline, _ in self._blocks.values()), default=_NEVER)
                self._changed.wait(None if self._wakes_at == _NEVER else self._wakes_at - now)
