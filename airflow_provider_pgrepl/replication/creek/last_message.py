"""The last message of a subject in a JetStream stream."""

from __future__ import annotations

from typing import Any

from nats.js.errors import NotFoundError


async def last_message(jetstream: Any, stream: str, subject: str) -> Any:
    """A RawStreamMsg; None when there is none. Raises NotFoundError when there is no such stream.

    A stream that is just being made is asked for nothing but what it holds: nats-server 2.9.10, as Debian 12
    has it, ends itself by a nil pointer when it is asked for a message of a stream without a store yet
    (jsMsgGetRequest).
    """
    if not (await jetstream.stream_info(stream)).state.messages:
        return None
    try:
        return await jetstream.get_last_msg(stream, subject)
    except NotFoundError:
        return None
