"""The Avro record in which creek sends a change: its source, what was done, the row before and after."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from airflow_provider_pgrepl.replication.avro.codec import long, string
from airflow_provider_pgrepl.replication.avro.columns import CreekColumn, avro_name, avro_names, fields_of
from airflow_provider_pgrepl.replication.avro.fingerprint import (
    Schema,
    fingerprint,
    fingerprint_text,
    to_text,
)
from airflow_provider_pgrepl.replication.events.change import Operation
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName

MAGIC = b"\xc3\x01"
OPS = ("c", "u", "u_pk", "d", "t", "r")
"""`u_pk`: an update of which the source sent the old row or key. `r`, a read, is never sent."""
_CODES = {op: long(place) for place, op in enumerate(OPS)}
_SOURCE_NAME = b"dummy"
_TIMESTAMP = {"type": "long", "logicalType": "timestamp-micros"}


@dataclass(frozen=True)
class Envelope:
    """How changes of one relation are sent. `columns`: all that are, in their order. `has_last`: each tells
    the stamp of the one before it, as the wire's first version does."""

    database: str
    table: TableName
    columns: Sequence[CreekColumn]
    has_last: bool = False

    @property
    def keys(self) -> list[CreekColumn]:
        return [column for column in self.columns if column.is_key]

    @cached_property
    def names(self) -> list[str]:
        """Of each column the name of its field, the same before a change and after it."""
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
        """What schema messages call the table."""
        return f"{self.table.schema}.{self.table.name}"

    def schema_message(self, created_at: datetime) -> bytes:
        """What the schema stream carries, and who asks for a fingerprint gets."""
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
        """All before the stamp. `commit_us`: microseconds since 1970."""
        return b"".join([self._beginning, long(commit_us), self._place, long(xid)])


@dataclass(frozen=True, slots=True)
class Unstamped:
    """A change but for its stamp and the moment at which it is sent."""

    head: bytes
    op: bytes
    rows: bytes
    has_last: bool = False

    def stamped(self, stamp: int, sent_at: bytes, last: int = 0) -> bytes:
        """`stamp`: an LSN of its own; `last`: that before; `sent_at`: a long of microseconds since 1970."""
        before = string(str(LSN(last)).encode()) if self.has_last else b""
        return b"".join([self.head, before, string(str(LSN(stamp)).encode()), self.op, sent_at, self.rows])


def code_of(op: Operation, *, has_old: bool) -> bytes:
    """What creek calls an operation."""
    update = "u_pk" if has_old else "u"
    return _CODES[{"insert": "c", "update": update, "delete": "d", "truncate": "t"}[op]]


def _record(namespace: str, name: str, named: Sequence[tuple[str, CreekColumn]]) -> Schema:
    return {"name": f"{namespace}.{name}", "type": "record", "fields": fields_of(named, namespace)}
