"""GatheringConnection: pika's connection, which writes many messages to its socket at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pika

_CHUNK_BYTES = 64 << 10


class GatheringConnection(pika.SelectConnection):
    """pika writes each of a message's three frames by a call of its own, and at each of these the thread lets
    others run, which give the processor back milliseconds later."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._gathered: list[bytes] | None = None
        super().__init__(*arguments, **named)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """What is sent inside the block leaves in large pieces, at its end at the latest."""
        self._gathered, self._size = [], 0
        try:
            yield
        finally:
            self._flush()
            self._gathered = None

    def _adapter_emit_data(self, data: bytes) -> None:
        """Overrides what each of pika's adapters has for sending bytes."""
        if self._gathered is None:
            super()._adapter_emit_data(data)
            return
        self._gathered.append(data)
        self._size += len(data)
        if self._size >= _CHUNK_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._gathered:
            super()._adapter_emit_data(b"".join(self._gathered))
            self._gathered, self._size = [], 0
