"""The interface of a target, the broker that a publisher sends events to."""

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
    """An event that the target permanently refuses, for example because it is too large or has no recipient.

    `is_unrouted`: True if the target accepted the event but had no queue for it.
    """

    event: Event
    reason: str
    is_unrouted: bool = False


class PendingEvents:
    """Events that were passed to a target.

    The sending is done when the target has acknowledged or refused each, or has failed.

    `ends_transaction`: True if the last event ends its transaction. A target that keeps transactions together
    sets `waits_for_commit` at once; the sending is then not done before the target's `commit`.
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
        """Wait at most `seconds`. Return True if the sending is done."""
        return self._done.wait(seconds)

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def settle(self, index: int, refusal: Refusal | None = None) -> None:
        """Record that the target has acknowledged, or refused, the event with this index."""
        if refusal is not None:
            self._refusals[index] = refusal
        self._is_settled[index] = True
        self._left -= 1
        if self._left == 0 and self.waits_for_commit:
            # Free the events: a transaction may have any number of them.
            self.events, self._is_settled = (), []
        elif self._left == 0:
            self._done.set()

    def commit(self) -> None:
        """Mark the sending as done: the target has committed its events, all of which are settled."""
        assert self._left == 0
        self.waits_for_commit = False
        self._done.set()

    @property
    def is_held(self) -> bool:
        """Return True if the events are part of a transaction that is neither committed nor lost."""
        return self.waits_for_commit and not self.is_done

    def fail(self, error: PgReplError) -> None:
        """Mark the sending as failed: it is unknown whether the unsettled events have arrived."""
        if not self._done.is_set():
            self.error = error
            self._done.set()

    @property
    def settled(self) -> int:
        """Return the number of settled events before the first unsettled one.

        Later events must be sent again.
        """
        return next((i for i, settled in enumerate(self._is_settled) if not settled), self.count)

    @property
    def refusals(self) -> list[Refusal]:
        """Return the refusals of the settled events, in order."""
        settled = self.settled
        return [self._refusals[index] for index in sorted(self._refusals) if index < settled]


@dataclass(frozen=True)
class UnacknowledgedEvent:
    """An event that the target has not acknowledged yet."""

    sending: PendingEvents
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
        """Return True if no error has ended the connection."""

    def send(self, sending: PendingEvents) -> None:
        """Start to send."""

    def stop(self) -> None:
        """Close the connection; unacknowledged events fail."""


OfLink = TypeVar("OfLink", bound=Link)


class LinkedTarget(Generic[OfLink]):
    """The common part of targets that create a new link for each connection."""

    stamp = 0
    keeps_transactions = False

    def __init__(self, address: str) -> None:
        self.address = address
        self._link: OfLink | None = None

    @property
    def link(self) -> OfLink:
        """Return the current link."""
        assert self._link is not None
        return self._link

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.is_open

    def send(self, sending: PendingEvents) -> None:
        self.link.send(sending)

    def commit(self) -> None:
        """Do nothing: consumers receive events without a commit."""

    def close(self) -> None:
        if self._link is not None:
            self._link.stop()
            self._link = None


def certificate_refused(where: str, error: ssl.SSLCertVerificationError) -> TargetError:
    """Return the error for a target whose certificate the host's certificate authorities do not verify."""
    return TargetError(
        f"{where}: its certificate was refused: {error.verify_message}",
        "name the host as its certificate does, and give the authority's certificate in a file that"
        " SSL_CERT_FILE names",
    )


class Target(Protocol):
    """A broker that keeps the order of the events it is sent. One thread calls its methods.

    `address`: for messages, without credentials. `stamp`: the highest stamp of all events that publishers of
    this name have sent, if events have stamps. It is set when the target is created, and saved again as it
    grows.

    `keeps_transactions`: True if consumers see all changes of a source transaction at once or none of them.
    If the connection to such a target is lost, everything since the last commit must be read again.
    """

    address: str
    stamp: int
    keeps_transactions: bool

    @property
    def is_connected(self) -> bool:
        """Return True if no error has ended the connection."""

    def connect(self) -> None:
        """Connect, or connect again. Raises TargetUnavailableError, TargetError."""

    def send(self, sending: PendingEvents) -> None:
        """Start to send. Except within a transaction, only a few sendings are unsettled at the same time."""

    def commit(self) -> None:
        """Make the sent events visible to consumers, if the target keeps transactions."""

    def close(self) -> None:
        """Close the connection; unacknowledged events fail."""
