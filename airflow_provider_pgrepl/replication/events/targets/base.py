"""Target: a broker, as the publisher sees it."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from airflow_provider_pgrepl.errors import PgReplError, TargetError
from airflow_provider_pgrepl.replication.events.event import Event


@dataclass(frozen=True)
class Refusal:
    """An event that the target does not take for what it is: too large, or wanted by nobody.

    `is_unrouted`: it went to the target, which had nobody to give it to.
    """

    event: Event
    reason: str
    is_unrouted: bool = False


class Sending:
    """Some events on their way. Done when the target has acknowledged or refused each, or has failed.

    `ends_transaction`: whether no event of the last one's transaction comes after them. A target that keeps
    transactions together says at once that they wait for its `commit`; then they are not done before it.
    """

    def __init__(self, events: Sequence[Event], *, ends_transaction: bool = True) -> None:
        self.events, self.ends_transaction = events, ends_transaction
        self.count = len(events)
        self.error: PgReplError | None = None
        self.waits_for_commit = False
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
        if self._left == 0 and self.waits_for_commit:
            # A transaction may have any number of them.
            self.events, self._is_settled = (), []
        elif self._left == 0:
            self._done.set()

    def commit(self) -> None:
        """The target keeps them, all of which are settled."""
        assert self._left == 0
        self.waits_for_commit = False
        self._done.set()

    @property
    def is_held(self) -> bool:
        """Whether they are part of a transaction that is neither committed nor lost."""
        return self.waits_for_commit and not self.is_done

    def fail(self, error: PgReplError) -> None:
        """What is not settled is not known."""
        if not self._done.is_set():
            self.error = error
            self._done.set()

    @property
    def settled(self) -> int:
        """How many events from the first on are settled: those after that have to be sent again."""
        return next((i for i, settled in enumerate(self._is_settled) if not settled), self.count)

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


class Link(Protocol):
    """One connection, until it has failed or is closed."""

    @property
    def is_open(self) -> bool:
        """Whether nothing is known that ended it."""

    def send(self, sending: Sending) -> None:
        """Begin to send."""

    def stop(self) -> None:
        """What is not acknowledged fails."""


OfLink = TypeVar("OfLink", bound=Link)


class Linked(Generic[OfLink]):
    """What all targets have that make a link whenever they are connected."""

    stamp = 0
    keeps_transactions = False

    def __init__(self, address: str) -> None:
        self.address = address
        self._link: OfLink | None = None

    @property
    def link(self) -> OfLink:
        """The present one."""
        assert self._link is not None
        return self._link

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.is_open

    def send(self, sending: Sending) -> None:
        self.link.send(sending)

    def commit(self) -> None:
        """All that was sent is with the consumers as soon as it has arrived."""

    def close(self) -> None:
        if self._link is not None:
            self._link.stop()
            self._link = None


def certificate_refused(where: str, error: ssl.SSLCertVerificationError) -> TargetError:
    """Of a target whose certificate is checked by those of the machine."""
    return TargetError(
        f"{where}: its certificate was refused: {error.verify_message}",
        "name the host as its certificate does, and give the authority's certificate in a file that"
        " SSL_CERT_FILE names",
    )


class Target(Protocol):
    """Keeps the order of what it is sent. Its methods are called by one thread.

    `address`: as people are told of it, without credentials. `stamp`: the highest number that any event was
    sent with, by whichever publisher of this name, where events have such numbers; it is given when the
    target is made, and again kept when it has grown.
    `keeps_transactions`: whether consumers see what a transaction of the source changed at once, or not at
    all. What of it was sent when such a target is lost has to be read again, from the last commit on.
    """

    address: str
    stamp: int
    keeps_transactions: bool

    @property
    def is_connected(self) -> bool:
        """Whether nothing is known that ended the connection."""

    def connect(self) -> None:
        """Connect, again if need be. Raises TargetUnavailableError, TargetError."""

    def send(self, sending: Sending) -> None:
        """Begin to send; at most a few of these are under way at once, but for a transaction."""

    def commit(self) -> None:
        """Let consumers have what was sent. Of targets that keep transactions."""

    def close(self) -> None:
        """End the connection; what is not acknowledged fails."""
