"""Streams and subjects of creek's wire, in its two versions."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Literal

from airflow_provider_pgrepl.replication.postgres.names import TableName

Kind = Literal["wal", "schema", "snap"]
Version = Literal["v1", "v2"]
KINDS: tuple[Kind, ...] = ("wal", "schema", "snap")
_SPECIAL = re.compile(r"[\s.*>%\x00-\x1f\x7f]")
"""What separates the words of a subject, or stands for words."""
TOPIC_FORM, TOPIC_SUFFIX = "%Y%m%d%H%M%S_%f", len("_xxxx")
_V1_REQUESTS = {"schema": "_schema", "snap": "_snapshot"}


@dataclass(frozen=True)
class Wire:
    """How one database's streams are called. In `v1`, of creek before March 2025, which its PostgreSQL
    consumer reads, all databases of a namespace share three streams."""

    namespace: str
    database: str
    version: Version = "v2"

    def stream(self, kind: Kind) -> str:
        if self.version == "v1":
            return f"{self.namespace}_{kind}"
        return f"{self.namespace}_{kind}_{self.database}"

    def all_subjects(self, kind: Kind) -> str:
        """A pattern of the database's subjects in a stream."""
        return f"{self._prefix(kind)}.>"

    def subject(self, kind: Kind, table: str) -> str:
        """What is special in a name is percent-encoded. `table`: `schema.name`."""
        return f"{self._prefix(kind)}.{words_of(table)}"

    def request(self, kind: Kind) -> str:
        """Where schemas (`schema`) and snapshots (`snap`) are asked for."""
        return f"{self.namespace}.{_V1_REQUESTS[kind]}" if self.version == "v1" else self.stream(kind)

    def new_snapshot(self, table: str, now: datetime) -> str:
        """The subject of a snapshot, which no other has: `….YYYYMMDDHHMMSS_micros_xxxx`."""
        return f"{self.subject('snap', table)}.{now:{TOPIC_FORM}}_{secrets.token_hex(2)}"

    @property
    def own(self) -> tuple[str, ...]:
        """How all subjects begin that are the streams', of whichever database, or the publishers'."""
        return (f"{self.namespace}.", f"{self.namespace}_")

    def _prefix(self, kind: Kind) -> str:
        return f"{self.namespace}.{self.database}.{kind}" if self.version == "v1" else self.stream(kind)


@lru_cache(10_000)
def words_of(table: str) -> str:
    """How subjects of a table end."""
    name = TableName.parse(table)
    return f"{word_of(name.schema)}.{word_of(name.name)}"


def word_of(name: str) -> str:
    """A name as one word of a subject."""
    return _SPECIAL.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), name)
