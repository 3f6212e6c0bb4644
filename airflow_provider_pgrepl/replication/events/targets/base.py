"""The interface of a target, the broker that a publisher sends events to, and the addresses of events there:
topics, routing keys, subjects, and CloudEvents attributes.
"""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from functools import lru_cache
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote

from airflow_provider_pgrepl.errors import PgReplError, TargetError
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings

_PATTERN = str.maketrans({sign: f"%{ord(sign):02X}" for sign in "*#%"})
"""The wildcards of a RabbitMQ binding, and the percent sign."""
_SPECIAL = {**_PATTERN, ord("."): "%2E"}
"""The characters of `_PATTERN`, and the separator of words."""
_OF_SUBJECTS = re.compile(r"[\s.*>%\x00-\x1f\x7f]")
"""The separators and wildcards of a subject, and the characters that a subject cannot contain."""
_PLACES = re.compile(r"\{(?:route|type|schema|table)\}")
_NOT_OF_TOPICS = re.compile("[^a-zA-Z0-9._-]")
KAFKA_PREFIX = "ce_"
"""The prefix of CloudEvents' headers (Kafka protocol binding, 3.2.3)."""
RABBITMQ_PREFIX = "ce-"
"""The prefix of CloudEvents' headers (Knative's RabbitMQ protocol binding, 3.1.3)."""
NATS_PREFIX = "ce-"
"""The prefix of CloudEvents' headers (NATS protocol binding, 3.1.3)."""
NATS_ID = "Pgrepl-Id"
"""This package's header for the id of an event, which is the same each time the event is sent."""


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


def routing_key(event: Event, settings: PublisherSettings) -> str:
    """Return the routing key of RabbitMQ: `schema.table.op`, for example `public.orders.insert`.

    It always has three words: `.`, `*`, `#` and `%` in a name are percent-encoded. The key of a business
    event is made by the setting `route`; a `.` in its parts separates words.
    """
    said = event.business
    if said is not None:
        return _filled(settings.route, said.route.translate(_PATTERN), said.type.translate(_PATTERN))
    return _key(event.table, event.op)


def subject(event: Event, settings: PublisherSettings) -> str:
    """Return the subject of NATS: the stream's name, then words as in a routing key.

    Empty words are omitted, because a subject cannot contain them.
    """
    said = event.business
    if said is None:
        return f"{settings.stream}.{words_of(event.table)}.{event.op}"
    words = _filled(settings.route, said.route, said.type).split(".")
    return ".".join([settings.stream, *(word_of(word) for word in words if word)])


def topic(event: Event, settings: PublisherSettings) -> str:
    """Return the topic of Kafka."""
    said = event.business
    if said is not None:
        return _NOT_OF_TOPICS.sub("_", _filled(settings.route, said.route, said.type))
    return topic_of(settings.topic, event.table)


@lru_cache(10_000)
def topic_of(template: str, table: str) -> str:
    """Return the topic of a table by the template.

    Characters that a topic's name cannot contain become `_`, as in Debezium.
    """
    name = TableName.parse(table)
    fields = {"{schema}": name.schema, "{table}": name.name}
    return _PLACES.sub(lambda found: _NOT_OF_TOPICS.sub("_", fields.get(found[0], found[0])), template)


@lru_cache(10_000)
def words_of(table: str) -> str:
    """Return the words of a table in a subject: schema and name."""
    name = TableName.parse(table)
    return f"{word_of(name.schema)}.{word_of(name.name)}"


def word_of(name: str) -> str:
    """Return a name as one word of a subject."""
    return _OF_SUBJECTS.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), name)


@lru_cache(10_000)
def _key(table: str, op: str) -> str:
    name = TableName.parse(table)
    return f"{name.schema.translate(_SPECIAL)}.{name.name.translate(_SPECIAL)}.{op}"


def _filled(template: str, route: str, type_: str) -> str:
    if not type_:
        # A logical message has no type: remove the separator with it, so that the route does not end with
        # one.
        template = template.replace(".{type}", "").replace("{type}.", "").replace("{type}", "")
    values = {"{route}": route, "{type}": type_}
    # Replace all in one pass: a route may contain the text {type}.
    return _PLACES.sub(lambda found: values.get(found[0], found[0]), template)


def attributes(event: Event, settings: PublisherSettings) -> dict[str, str]:
    """Return the CloudEvents attributes, except for `datacontenttype`, which depends on the protocol.

    `id` and `source` together are unique. `id` is the application's own id of a business event if it has one,
    otherwise the id of the event.
    """
    said = event.business
    own = "" if said is None else said.headers.get("event_id", "")
    found = {
        "specversion": "1.0",
        "id": own or event.id,
        "source": f"/{quote(settings.source, safe='')}",
        "type": f"{settings.source}.{event.table}.{event.op}"
        if said is None
        else said.type or said.route or "message",
        "subject": event.table,
    }
    if event.commit_ts is not None:
        found["time"] = event.commit_ts.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return found
