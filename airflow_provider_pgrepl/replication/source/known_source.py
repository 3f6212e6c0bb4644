"""KnownSource: the server and database that changelog or state have recorded, to be found again by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from airflow_provider_pgrepl.replication.source.server import Server
from airflow_provider_pgrepl.replication.source.slot import Slot


class SourceRecord(Protocol):
    """The fields of a changelog's or a state's record that identify a source."""

    @property
    def system_identifier(self) -> str: ...
    @property
    def database(self) -> str: ...
    @property
    def database_oid(self) -> int: ...
    @property
    def slot(self) -> str: ...


@dataclass(frozen=True)
class KnownSource:
    """A server and a database; `database_oid` is 0 where only the name is known, or nothing."""

    system_identifier: str
    database: str
    database_oid: int

    @property
    def name(self) -> str:
        """The name that `--give-up` takes for it."""
        return f"{self.system_identifier}/{self.database}" if self.database else self.system_identifier

    def differs(self, server: Server) -> bool:
        """Return True if the server, or its database, is another one. A database may be renamed."""
        if self.system_identifier != server.system_identifier:
            return True
        if self.database_oid:
            return self.database_oid != server.database_oid
        return bool(self.database) and self.database != server.database

    def kind_of(self, server: Server) -> str:
        """Say in which way a source is another one than this."""
        is_server = self.system_identifier != server.system_identifier
        return "server" if is_server else "database of that server"

    def __str__(self) -> str:
        server = f"the server of system identifier {self.system_identifier}"
        return f"database {self.database} of {server}" if self.database else server


def source_of(server: Server) -> KnownSource:
    """The source that a connection leads to."""
    return KnownSource(server.system_identifier, server.database, server.database_oid)


def known_source(
    record: SourceRecord, server: Server, slots: Mapping[str, Slot] = MappingProxyType({})
) -> KnownSource:
    """Return the source of a record. Where that has no database, it is the one that the slot of its name is
    in, at the recorded server."""
    slot = slots.get(record.slot) if record.system_identifier == server.system_identifier else None
    database = record.database or (slot.database if slot is not None else None) or ""
    return KnownSource(record.system_identifier, database, record.database_oid)
