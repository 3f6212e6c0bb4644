"""Target: a broker, as the publisher sees it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.events.publishing.event import Event


@dataclass(frozen=True)
class Refusal:
    """An event that the target does not take for what it is: too large, or wanted by nobody.

    `is_unrouted`: it went to the target, which had nobody to give it to.
    """

    event: Event
    reason: str
    is_unrouted: bool = False


class Sending:
    """Some events on their way. Done when the target has acknowledged or refused each, or has failed."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.error: PgReplError | None = None
        self._refusals: dict[int, Refusal] = {}
        self._is_settled = [False] * len(events)
        self._left = len(events)
        self._done = threading.Event()
        if not events:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Wait a while; whether it is done."""
        return self._done.wait(seconds)

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def settle(self, index: int, refusal: Refusal | None = None) -> None:
        """The target has taken the event with that index, or refused it."""
        if refusal is not None:
            self._refusals[index] = refusal
        self._is_settled[index] = True
        self._left -= 1
        if self._left == 0:
            self._done.set()

    def fail(self, error: PgReplError) -> None:
        """What is not settled is not known."""
        if not self._done.is_set():
            self.error = error
            self._done.set()

    @property
    def settled(self) -> int:
        """How many events from the first on are settled: those after that have to be sent again."""
        return next((i for i, settled in enumerate(self._is_settled) if not settled), len(self.events))

    @property
    def refusals(self) -> list[Refusal]:
        """Of the settled events, in their order."""
        settled = self.settled
        return [self._refusals[index] for index in sorted(self._refusals) if index < settled]


@dataclass(frozen=True)
class OnTheWay:
    """An event that the target has not acknowledged yet."""

    sending: Sending
    index: int

    @property
    def event(self) -> Event:
        return self.sending.events[self.index]

    def settle(self, refusal: Refusal | None = None) -> None:
        self.sending.settle(self.index, refusal)


class Target(Protocol):
    """Keeps the order of what it is sent. Its methods are called by one thread.

    `stamp`: the highest number that any event was sent with, by whichever publisher of this name, where
    events have such numbers; it is given when the target is made, and again kept when it has grown.
    """

    stamp: int

    @property
    def is_connected(self) -> bool:
        """Whether nothing is known that ended the connection."""

    def connect(self) -> None:
        """Connect, again if need be. Raises TargetUnavailableError, TargetError."""

    def send(self, events: Sequence[Event]) -> Sending:
        """Begin to send; at most a few of these are under way at once."""

    def close(self) -> None:
        """End the connection; what is not acknowledged fails."""
