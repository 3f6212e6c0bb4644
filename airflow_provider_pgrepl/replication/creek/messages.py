"""The messages that a consumer of creek's wire receives: changes, schemas and snapshots, decoded with
fastavro."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import fastavro

from airflow_provider_pgrepl.errors import ConfigError, MessageError
from airflow_provider_pgrepl.replication.avro.codec import fingerprint_text
from airflow_provider_pgrepl.replication.avro.columns import INFINITIES, INFINITY
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.targets.base import NATS_ID, words_of
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.values.text_output import DAY_US, moment_text
from airflow_provider_pgrepl.trace import traced

from .stream_reading import PREVIOUS
from .wire import MAGIC

_HEAD_BYTES = 10
_NESTED = ("type", "items", "fields")
_TIME, _PREFIX = "time-micros", "pgrepl-"
_OWN = {"date": ("int", 1), _TIME: ("long", 0), "timestamp-micros": ("long", DAY_US)}
"""Logical types, each with its underlying type and the number of its units in a day."""
Row = dict[str, Any]
"""Values by column: numbers, text, `Decimal`, `date`, `datetime`, `UUID`, bytes of JSON, lists. An infinite
date or timestamp is the text `infinity` or `-infinity`. A value that Python's types cannot hold (before year
1, after 9999, 24:00:00) is the text that PostgreSQL writes."""


@dataclass(frozen=True, slots=True)
class Schema:
    """A version of a table in the schema stream. `text`: the Avro schema; `source`: the table."""

    fingerprint: str
    text: str
    source: str
    created_at: datetime

    @classmethod
    def parse(cls, data: bytes) -> Schema:
        """Parse a message of the schema stream. Raises MessageError."""
        try:
            found = json.loads(data)
            moment = datetime.fromisoformat(found["created_at"])
            return cls(str(found["fingerprint"]), str(found["schema"]), str(found["source"]), moment)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise MessageError(
                "a message in the stream of schemas is not a schema in creek's format"
            ) from None


@dataclass(frozen=True, slots=True)
class WalChange:
    """A change. `lsn`: its stamp, which is higher than that of each change before it. `id`: the change's own
    id, empty if creek itself has sent the change. `before`: the key, or the row with REPLICA IDENTITY FULL.
    `unchanged`: columns that were not sent, and that are None in `after`. `previous`: the id of the table's
    change that the publisher sent before this one; empty if this is the first of a run, or if it is
    unknown."""

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
    """The sequence of the message in the stream."""
    previous: str = ""

    @property
    def words(self) -> str:
        """Return the last two words of its table's subjects."""
        return words_of(str(TableName(self.schema, self.table)))


@dataclass(frozen=True, slots=True)
class UnreadableChange:
    """A message of the stream of changes that is not a change, or that cannot be decoded. `words`: the last
    two words of its subject, which identify the table."""

    words: str
    sequence: int
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """The header of a snapshot. `stream_wal_from(schema, table, at, lsn)` reads the changes after the
    snapshot.

    `keys`: the columns that identify rows.
    """

    topic: str
    fingerprint: str
    schema: str
    lsn: LSN
    at: datetime
    approx_rows: int
    keys: tuple[str, ...]
    position: str = ""
    """The id of the last change that can be in the snapshot; empty if creek itself has sent the snapshot."""

    def has(self, change: WalChange) -> bool:
        """Return True if a change of the table is in the snapshot. Ids are compared if both have one, because
        a change that is sent again keeps its id; stamps may be ahead of the source."""
        if self.position and change.id:
            return EventPosition.parse(change.id) <= EventPosition.parse(self.position)
        return change.lsn <= self.lsn

    @classmethod
    def parse(cls, topic: str, data: bytes) -> SnapshotHeader:
        """Parse the first message of a snapshot. Raises MessageError."""
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
    """Return the fingerprint of a change's schema. Raises MessageError."""
    if payload[:2] != MAGIC or len(payload) < _HEAD_BYTES:
        raise MessageError("a message in the stream of changes is not in creek's format")
    return fingerprint_text(payload[2:_HEAD_BYTES])


def parsed_schema(text: str) -> Any:
    """Return the schema in the form that `row_of` and `change_of` accept. Raises MessageError."""
    try:
        return fastavro.parse_schema(_with_own_moments(json.loads(text)))
    except Exception as error:  # noqa: BLE001 - of fastavro's many, none says more to who cannot change it
        failed = MessageError(f"an Avro schema cannot be read: {type(error).__name__}")
        raise traced(failed, error) from None


def _with_own_moments(schema: Any) -> Any:
    """Return the schema with logical types whose readers handle the values that Python's types cannot
    hold."""
    if isinstance(schema, list):
        return [_with_own_moments(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _with_own_moments(one) if key in _NESTED else one for key, one in schema.items()}
    if found.get("logicalType") in _OWN:
        found["logicalType"] = f"{_PREFIX}{found['logicalType']}"
    return found


def _reader(logical: str) -> Any:
    kind, per_day = _OWN[logical]
    usual = fastavro.read.LOGICAL_READERS[f"{kind}-{logical}"]

    def read(data: int, writer_schema: Any = None, reader_schema: Any = None) -> Any:
        try:
            return usual(data, writer_schema, reader_schema)
        except (OverflowError, ValueError):
            return "24:00:00" if logical == _TIME else moment_text(data, per_day)

    return read


for _logical, (_kind, _) in _OWN.items():
    fastavro.read.LOGICAL_READERS[f"{_kind}-{_PREFIX}{_logical}"] = _reader(_logical)


def change_of(payload: bytes, schema: Any, headers: Mapping[str, str], sequence: int) -> WalChange:
    """Decode a change. Raises MessageError."""
    found = row_of(payload[_HEAD_BYTES:], schema)
    try:
        source = found["source"]
        for name in (NATS_ID, PREVIOUS):
            if headers.get(name):
                EventPosition.parse(headers[name])
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
            headers.get(NATS_ID, ""),
            tuple(unchanged.split(",")) if unchanged else (),
            sequence,
            headers.get(PREVIOUS, ""),
        )
    except (KeyError, TypeError, ValueError, ConfigError):
        raise MessageError(
            "a message in the stream of changes does not match its schema, or its ID cannot be read"
        ) from None


def row_of(data: bytes, schema: Any) -> Row:
    """Decode a row. Raises MessageError."""
    try:
        found = fastavro.schemaless_reader(io.BytesIO(data), schema, return_named_type=True)
    except Exception as error:  # noqa: BLE001 - bytes may be anything
        raise traced(
            MessageError(f"a row does not match the schema of its message: {type(error).__name__}"), error
        ) from None
    plain: Row = _plain(found)
    return plain


def _plain(value: Any) -> Any:
    """Return the value without the names of named types, and infinities as PostgreSQL writes them."""
    if isinstance(value, tuple):
        name, value = value
        return INFINITIES.get(value, value) if name.endswith(INFINITY) else _plain(value)
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value
