"""creek's wire: subjects, packets, and the Avro record of a change.

creek splits a payload into packets, one in each NATS message. The first packet is `uint16 0`, the payload's
length as `uint32`, and bytes; a later one is its number as `uint16`, and bytes; all big-endian. creek's newer
client cannot read a second packet, so a payload that needs one is not sent.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Literal

from airflow_provider_pgrepl.replication.avro.codec import (
    Schema,
    fingerprint,
    fingerprint_text,
    long,
    string,
    to_text,
)
from airflow_provider_pgrepl.replication.avro.columns import CreekColumn, avro_name, avro_names, fields_of
from airflow_provider_pgrepl.replication.events.changes import Operation
from airflow_provider_pgrepl.replication.events.targets.base import words_of
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName

Kind = Literal["wal", "schema", "snap"]
Version = Literal["v1", "v2"]
KINDS: tuple[Kind, ...] = ("wal", "schema", "snap")
TOPIC_FORM, TOPIC_SUFFIX = "%Y%m%d%H%M%S_%f", len("_xxxx")
_V1_REQUESTS = {"schema": "_schema", "snap": "_snapshot"}
_FIRST, _LATER = struct.Struct(">HI"), struct.Struct(">H")
MAGIC = b"\xc3\x01"
OPS = ("c", "u", "u_pk", "d", "t", "r")
"""`u_pk`: an update for which the source sent the old row or key. `r`, a read, is never sent."""
_CODES = {op: long(place) for place, op in enumerate(OPS)}
_SOURCE_NAME = b"dummy"
_TIMESTAMP = {"type": "long", "logicalType": "timestamp-micros"}


@dataclass(frozen=True)
class Wire:
    """The names of one database's streams and subjects. In `v1`, the wire of creek before March 2025, which
    creek's PostgreSQL consumer reads, all databases of a namespace share three streams."""

    namespace: str
    database: str
    version: Version = "v2"

    def stream(self, kind: Kind) -> str:
        if self.version == "v1":
            return f"{self.namespace}_{kind}"
        return f"{self.namespace}_{kind}_{self.database}"

    def all_subjects(self, kind: Kind) -> str:
        """Return the pattern of the database's subjects in a stream."""
        return f"{self._prefix(kind)}.>"

    def subject(self, kind: Kind, table: str) -> str:
        """Return a table's subject. Special characters in names are percent-encoded. `table`:
        `schema.name`."""
        return f"{self._prefix(kind)}.{words_of(table)}"

    def request(self, kind: Kind) -> str:
        """Return the subject of requests for schemas (`schema`) or snapshots (`snap`)."""
        return f"{self.namespace}.{_V1_REQUESTS[kind]}" if self.version == "v1" else self.stream(kind)

    def new_snapshot(self, table: str, now: datetime) -> str:
        """Return a unique subject for a snapshot: `….YYYYMMDDHHMMSS_micros_xxxx`."""
        return f"{self.subject('snap', table)}.{now:{TOPIC_FORM}}_{secrets.token_hex(2)}"

    @property
    def own(self) -> tuple[str, ...]:
        """Return the prefixes of all subjects of the streams of any database, and of requests to
        publishers."""
        return (f"{self.namespace}.", f"{self.namespace}_")

    def _prefix(self, kind: Kind) -> str:
        return f"{self.namespace}.{self.database}.{kind}" if self.version == "v1" else self.stream(kind)


def largest_payload(max_payload: int) -> int:
    """Return how many bytes of payload one packet holds. `max_payload`: the server's limit, in bytes."""
    return max_payload - _FIRST.size - 2


def framed(payload: bytes) -> bytes:
    """Return the payload as its only packet."""
    return _FIRST.pack(0, len(payload)) + payload


def unframed(packets: list[bytes]) -> bytes:
    """Return the payload of packets, in their order. Raises ValueError if they are not those of one
    payload."""
    unframing, found = PacketDecoder(), None
    for packet in packets:
        if found is not None:
            raise ValueError("the packets do not have the announced length")
        found = unframing.add(packet)
    if found is None:
        raise ValueError("a packet is missing")
    return found


class PacketDecoder:
    """A decoder of successive packets."""

    def __init__(self) -> None:
        self._length, self._next, self._payload = 0, 0, b""

    def add(self, packet: bytes) -> bytes | None:
        """Return the payload if the packet completes it, otherwise None. Raises ValueError if the packet does
        not continue the earlier ones."""
        if len(packet) < _LATER.size:
            raise ValueError("the message is no packet: it is too short")
        (number,) = _LATER.unpack_from(packet)
        if number == 0:
            # The sender of the earlier packets may have been interrupted.
            if len(packet) < _FIRST.size:
                raise ValueError("the message is no packet: it is too short")
            _, self._length = _FIRST.unpack_from(packet)
            self._payload = packet[_FIRST.size :]
        elif number == self._next:
            self._payload += packet[_LATER.size :]
        else:
            raise ValueError("a packet is missing")
        self._next = number + 1
        if len(self._payload) > self._length:
            raise ValueError("the packets do not have the announced length")
        if len(self._payload) < self._length:
            return None
        self._next, found, self._payload = -1, self._payload, b""
        return found


@dataclass(frozen=True)
class CreekEnvelope:
    """The Avro record of a relation's changes. `columns`: the published ones, in their order. `has_last`:
    each change has the stamp of the change before it, as in v1."""

    database: str
    table: TableName
    columns: Sequence[CreekColumn]
    has_last: bool = False

    @property
    def keys(self) -> list[CreekColumn]:
        return [column for column in self.columns if column.is_key]

    @cached_property
    def names(self) -> list[str]:
        """Return the field name of each column, the same before and after a change."""
        return avro_names(self.columns)

    @cached_property
    def schema(self) -> Schema:
        name = avro_name(self.table.name)
        named = list(zip(self.names, self.columns, strict=True))
        keys = [(field, column) for field, column in named if column.is_key]
        source = [
            {"name": "name", "type": "string"},
            {"name": "tx_at", "type": _TIMESTAMP},
            {"name": "db", "type": "string"},
            {"name": "schema", "type": "string"},
            {"name": "table", "type": "string"},
            {"name": "tx_id", "type": "long"},
            *([{"name": "last_lsn", "type": "string"}] if self.has_last else []),
            {"name": "lsn", "type": "string"},
        ]
        fields = [
            {"name": "fingerprint", "type": "string"},
            {"name": "source", "type": {"name": "source", "type": "record", "fields": source}},
            {"name": "op", "type": {"name": "op", "type": "enum", "symbols": list(OPS)}},
            {"name": "sent_at", "type": _TIMESTAMP},
            {"name": "before", "type": ["null", _record("before", name, keys)]},
            {"name": "after", "type": ["null", _record("after", name, named)]},
        ]
        return {"name": "publish_message", "type": "record", "fields": fields}

    @cached_property
    def fingerprint(self) -> bytes:
        return fingerprint(self.schema)

    @cached_property
    def fingerprint_text(self) -> str:
        return fingerprint_text(self.fingerprint)

    @property
    def source(self) -> str:
        """Return the table's name in schema messages."""
        return f"{self.table.schema}.{self.table.name}"

    def schema_message(self, created_at: datetime) -> bytes:
        """Return the message for the schema stream, which also answers a request for its fingerprint."""
        return json.dumps(
            {
                "fingerprint": self.fingerprint_text,
                "schema": to_text(self.schema),
                "source": self.source,
                "created_at": created_at.isoformat().replace("+00:00", "Z"),
            },
            separators=(",", ":"),
            ensure_ascii=False,
        ).encode()

    @cached_property
    def _beginning(self) -> bytes:
        named = self.fingerprint_text.encode()
        return b"".join([MAGIC, self.fingerprint, string(named), string(_SOURCE_NAME)])

    @cached_property
    def _place(self) -> bytes:
        names = (self.database, self.table.schema, self.table.name)
        return b"".join(string(name.encode()) for name in names)

    def head(self, commit_us: int, xid: int) -> bytes:
        """Return the bytes before the stamp. `commit_us`: microseconds since 1970-01-01."""
        return b"".join([self._beginning, long(commit_us), self._place, long(xid)])


@dataclass(frozen=True, slots=True)
class EncodedChange:
    """An encoded change without its stamp and the time at which it is sent."""

    head: bytes
    op: bytes
    rows: bytes
    has_last: bool = False

    def stamped(self, stamp: int, sent_at: bytes, last: int = 0) -> bytes:
        """Return the change with its stamp, which is an LSN of its own. `sent_at`: an encoded long of
        microseconds since 1970-01-01. `last`: the stamp of the change before."""
        before = string(str(LSN(last)).encode()) if self.has_last else b""
        return b"".join([self.head, before, string(str(LSN(stamp)).encode()), self.op, sent_at, self.rows])


def code_of(op: Operation, *, has_old: bool) -> bytes:
    """Return creek's encoded code of an operation."""
    update = "u_pk" if has_old else "u"
    return _CODES[{"insert": "c", "update": update, "delete": "d", "truncate": "t"}[op]]


def _record(namespace: str, name: str, named: Sequence[tuple[str, CreekColumn]]) -> Schema:
    return {"name": f"{namespace}.{name}", "type": "record", "fields": fields_of(named, namespace)}
