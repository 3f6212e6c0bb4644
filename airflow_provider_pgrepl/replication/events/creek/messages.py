"""What a consumer of creek's wire gets: changes, schemas, snapshots, decoded with fastavro."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import fastavro

from airflow_provider_pgrepl.errors import MessageError
from airflow_provider_pgrepl.replication.events.creek.columns import INFINITIES, INFINITY
from airflow_provider_pgrepl.replication.events.creek.envelope import MAGIC
from airflow_provider_pgrepl.replication.events.creek.fingerprint import fingerprint_text
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.lsn import LSN

_HEAD_BYTES = 10
Row = dict[str, Any]
"""Values by column: numbers, texts, `Decimal`, `date`, `datetime`, `UUID`, bytes of JSON, lists; an infinite
date or timestamp is the text `infinity` or `-infinity`."""


@dataclass(frozen=True, slots=True)
class Schema:
    """A version of a table, as the schema stream has it. `text`: the Avro schema; `source`: the table."""

    fingerprint: str
    text: str
    source: str
    created_at: datetime

    @classmethod
    def parse(cls, data: bytes) -> Schema:
        """Raises MessageError."""
        try:
            found = json.loads(data)
            moment = datetime.fromisoformat(found["created_at"])
            return cls(str(found["fingerprint"]), str(found["schema"]), str(found["source"]), moment)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise MessageError("a message of the schema stream is no schema of creek's") from None


@dataclass(frozen=True, slots=True)
class WalChange:
    """A change. `lsn`: its stamp, which is above that of each change before it; `id`: the change's own, empty
    when creek itself has sent it. `before`: its key, or with REPLICA IDENTITY FULL the row; `unchanged`:
    columns that were not sent, and are None in `after`."""

    op: str
    schema: str
    table: str
    lsn: LSN
    tx_at: datetime
    tx_id: int
    sent_at: datetime
    fingerprint: str
    before: Row | None
    after: Row | None
    id: str = ""
    unchanged: tuple[str, ...] = ()
    sequence: int = 0
    """Its place in the stream."""


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """What a snapshot begins with: `stream_wal_from(schema, table, at, lsn)` goes on after it.

    `keys`: the columns by which rows are identified.
    """

    topic: str
    fingerprint: str
    schema: str
    lsn: LSN
    at: datetime
    approx_rows: int
    keys: tuple[str, ...]
    position: str = ""
    """After which changes, by their ids; empty when creek itself has sent it."""

    def has(self, change: WalChange) -> bool:
        """Whether a change of the table is in the snapshot. By its id, which it keeps when it is sent again,
        where both have one; stamps may be ahead of the source."""
        if self.position and change.id:
            return EventPosition.parse(change.id) <= EventPosition.parse(self.position)
        return change.lsn <= self.lsn

    @classmethod
    def parse(cls, topic: str, data: bytes) -> SnapshotHeader:
        """Raises MessageError."""
        try:
            found = json.loads(data)
            schema = json.loads(found["schema"])
            return cls(
                topic,
                str(found["fingerprint"]),
                found["schema"],
                LSN.parse(found["lsn"]),
                datetime.fromisoformat(found["at"]),
                int(found["approx_rows"]),
                tuple(field["name"] for field in schema["fields"] if field.get("pgKey")),
                str(found.get("position", "")),
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            raise MessageError(f"{topic} does not begin with the header of a snapshot") from None


def fingerprint_of(payload: bytes) -> str:
    """Of a change. Raises MessageError."""
    if payload[:2] != MAGIC or len(payload) < _HEAD_BYTES:
        raise MessageError("a message of the stream of changes is none of creek's")
    return fingerprint_text(payload[2:_HEAD_BYTES])


def parsed_schema(text: str) -> Any:
    """What `row_of` and `change_of` take. Raises MessageError."""
    try:
        return fastavro.parse_schema(json.loads(text))
    except Exception as error:  # noqa: BLE001 - of fastavro's many, none says more to who cannot change it
        raise MessageError(f"an Avro schema cannot be read: {type(error).__name__}") from None


def change_of(payload: bytes, schema: Any, headers: Mapping[str, str], sequence: int) -> WalChange:
    """Raises MessageError."""
    found = row_of(payload[_HEAD_BYTES:], schema)
    try:
        source = found["source"]
        unchanged = headers.get("Creek-Unchanged", "")
        return WalChange(
            found["op"],
            source["schema"],
            source["table"],
            LSN.parse(source["lsn"]),
            source["tx_at"],
            source["tx_id"],
            found["sent_at"],
            found["fingerprint"],
            found["before"],
            found["after"],
            headers.get("Pgrepl-Id", ""),
            tuple(unchanged.split(",")) if unchanged else (),
            sequence,
        )
    except (KeyError, TypeError, ValueError):
        raise MessageError("a message of the stream of changes has another schema") from None


def row_of(data: bytes, schema: Any) -> Row:
    """Raises MessageError, also for a moment that Python cannot hold."""
    try:
        found = fastavro.schemaless_reader(io.BytesIO(data), schema, return_named_type=True)
    except Exception as error:  # noqa: BLE001 - bytes may be anything
        raise MessageError(f"a message cannot be read: {type(error).__name__}") from None
    plain: Row = _plain(found)
    return plain


def _plain(value: Any) -> Any:
    """Values of named types come with the names; infinities are as PostgreSQL writes them."""
    if isinstance(value, tuple):
        name, value = value
        return INFINITIES.get(value, value) if name.endswith(INFINITY) else _plain(value)
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value
