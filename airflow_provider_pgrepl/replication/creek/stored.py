"""What creek's streams hold, as its client shows it: snapshots, and their bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from airflow_provider_pgrepl.errors import MessageError
from airflow_provider_pgrepl.replication.creek.messages import Row, SnapshotHeader, parsed_schema, row_of
from airflow_provider_pgrepl.replication.creek.snapshot import END


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot that the snapshot stream has. `rows`: without header and end; -1: only begun."""

    topic: str
    at: datetime
    rows: int


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """When a stream was made, and which places its messages have; `newest`: of the database's last, 0 where
    it has none."""

    made: str
    first: int
    last: int
    newest: int


class Snapshot:
    """A snapshot's header, and its rows by asynchronous iteration, once.

    That raises TargetUnavailableError when none comes for `timeout_s`: who made it has failed, and it has no
    end; MessageError when rows are missing. What was read of it then is not whole.
    """

    def __init__(self, header: SnapshotHeader, payloads: AsyncIterator[bytes]) -> None:
        self.header = header
        self._payloads, self._schema = payloads, parsed_schema(header.schema)
        self._read, self._is_at_end = 0, False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Row:
        if self._is_at_end:
            raise StopAsyncIteration
        payload = await anext(self._payloads)
        if payload == END:
            self._is_at_end = True
            # creek's own header has an estimate.
            if self.header.position and self._read != self.header.approx_rows:
                raise MessageError(
                    f"{self.header.topic} has {self._read:,} of {self.header.approx_rows:,} rows",
                    "give the stream of snapshots larger limits, and ask for a new one",
                )
            raise StopAsyncIteration
        self._read += 1
        return row_of(payload, self._schema)
