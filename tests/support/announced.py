"""Relations as a stream announces them, with a catalog that agrees with it."""

from __future__ import annotations

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.pgoutput.messages import RelationMessage
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from tests.support import wire_bytes as wire

TEXT = 25


def announce(oid: int, *columns: str) -> bytes:
    """Return a Relation message of a table with text columns, the first of which is the key."""
    return wire.put_relation(
        oid, "public", f"t{oid}", [(name, TEXT, -1, name == columns[0]) for name in columns]
    )


def relation(oid: int, *columns: str) -> Relation:
    """Return the relation that the catalog has for this message."""
    shape = [
        Column(name, n, TEXT, -1, "text", is_key=n == 1, not_null=n == 1) for n, name in enumerate(columns, 1)
    ]
    return Relation(oid, TableName("public", f"t{oid}"), tuple(shape))


def look_up(message: RelationMessage, _commit_lsn: int = 0, _xid: int = 0) -> RelationRecord:
    """Return a record whose catalog agrees with the announced message."""
    return RelationRecord(message, relation(message.oid, *(column.name for column in message.columns)))
