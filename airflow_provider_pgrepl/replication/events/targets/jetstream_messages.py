"""What a publisher's format makes of events at JetStream: messages, and the streams that they go to."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from nats.js.errors import NotFoundError

from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.targets.cloud_events import NATS_ID, NATS_PREFIX, attributes
from airflow_provider_pgrepl.replication.events.targets.routing import subject
from airflow_provider_pgrepl.replication.settings.publisher_settings import PublisherSettings

_API_S = 20.0
_LONGEST_SUBJECT = 1_024
"""A server ends a connection whose commands are longer than 4,096 bytes (max_control_line)."""
_NAME = re.compile(r"[!-9;-~]+")
"""Of a header: printable ASCII but for the colon, as in HTTP."""
_NATS = "nats-"
"""What JetStream takes for orders (Nats-Rollup, Nats-TTL, …)."""
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F))).replace('"', "").replace("%", "")


class UnsendableError(Exception):
    """Why an event cannot be sent, for a person to mend."""


class Message(NamedTuple):
    """One event's. `size`: bytes of its body, which limits count. `has_small_headers`: whether nobody but the
    publisher says what is in them."""

    subject: str
    payload: bytes
    headers: dict[str, str]
    size: int
    has_small_headers: bool = True


class Messages(Protocol):
    """Of one connection; all but `of` raises what the client raises."""

    stream: str
    """That has to acknowledge them."""

    async def begin(self, client: Any) -> None:
        """Have the streams there."""

    async def of(self, event: Event) -> Message:
        """An event's. Raises UnsendableError."""

    async def end(self) -> None:
        """The connection is over."""


class PlainMessages:
    """Bodies as they are, into one stream, which takes the subjects below its name unless it is there."""

    def __init__(self, settings: PublisherSettings) -> None:
        self._settings, self.stream = settings, settings.stream

    async def begin(self, client: Any) -> None:
        jetstream = client.jetstream(timeout=_API_S)
        try:
            await jetstream.stream_info(self.stream)
        except NotFoundError:
            await jetstream.add_stream(name=self.stream, subjects=[f"{self.stream}.>"])

    async def of(self, event: Event) -> Message:
        place = subject(event, self._settings)
        if place == self.stream:
            raise UnsendableError("its subject has no words beside the stream's name: it has no route")
        if len(place.encode()) > _LONGEST_SUBJECT:
            raise UnsendableError(f"its subject has more than {_LONGEST_SUBJECT:,} bytes")
        return Message(place, event.body, self._headers(event), len(event.body), event.business is None)

    async def end(self) -> None:
        """Nothing is left."""

    def _headers(self, event: Event) -> dict[str, str]:
        said = event.business
        found = {} if said is None else _checked(dict(said.headers))
        if self._settings.cloudevents:
            given = attributes(event, self._settings) | {
                "datacontenttype": "application/json" if said is None else said.content_type
            }
            found |= {f"{NATS_PREFIX}{name}": _encoded(value) for name, value in given.items()}
        # What an event says by itself is last, so that nothing else is taken for it.
        own = {"Pgrepl-Op": event.op, "Content-Type": "application/json"}
        if said is not None:
            own = _checked({"Pgrepl-Type": said.type, "Content-Type": said.content_type})
        return found | own | identity(event) | {"Pgrepl-Generation": str(event.generation)}


def identity(event: Event) -> dict[str, str]:
    """By which an event is known. JetStream drops what has a message id that it had of late: of what is sent
    again it must drop nothing, since it would drop what it has and take what was refused, out of order."""
    return {"Nats-Msg-Id": f"{event.id}-{event.generation}", NATS_ID: event.id}


def _checked(headers: dict[str, str]) -> dict[str, str]:
    """Raises UnsendableError for those that NATS would change, or take for orders."""
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or name.lower().startswith(_NATS):
            raise UnsendableError(
                f"its header {name!r} has a name that NATS does not take, or takes for its own"
            )
        if value != value.strip() or any(sign in value for sign in "\r\n"):
            raise UnsendableError(f"its header {name} has line breaks, or white space at an end")
    return headers


@lru_cache(1_000)
def _encoded(value: str) -> str:
    """As the binding of CloudEvents to HTTP says (3.1.3.2), and that to NATS with it."""
    return quote(value, safe=_PRINTABLE)
