"""The messages of the event trigger: a table's catalog rows, the relation built from them, and the seal.

`relations.py` sends the same queries to the catalog, and builds the relation with the same code. So the
relation of a message equals what would have been read at the time of the DDL.

The seal proves that the event trigger wrote the message: any session may emit logical messages. The trigger's
function seals its messages with a key that only its owner and the replicating role can read (`trigger.py`),
and with the transaction, so that a message is not valid in another one. The first line of a message holds
pipeline, transaction and seal; the content follows.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog import partitions, relations, types
from airflow_provider_pgrepl.replication.source.catalog import relations as missing
from airflow_provider_pgrepl.replication.source.catalog import relations as publication_membership
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.trace import log_unexpected

Rows = Mapping[str, list[list[Any]]]
"""The rows of each query, by the query's name."""
log = logging.getLogger(__name__)
_MOST_BYTES = 64 << 20
_MOST_TRIGGER = 1000
_OIDS = 1 << 32
_MOST_HEAD_BYTES = 512
_XID_BITS = 32
SEALED_SQL = """
pg_logical_emit_message(true, <prefix>, convert_to(jsonb_build_object('pipeline', <pipeline>,
            'xid', pg_current_xact_id()::text,
            'seal', encode(sha256(_key || sha256(_key || convert_to(pg_current_xact_id()::text, 'UTF8')
                || decode('0a', 'hex') || _said)), 'hex'))::text || chr(10), 'UTF8') || _said)
""".strip()
"""The call with which the trigger's function emits the content of `_said`, with the key in `_key`."""


def carried_queries(server_version: int) -> dict[str, str]:
    """Return the queries of `relations.py` about one table, by name, for a server of this version."""
    by_version = server_version >= publication_membership.COLUMN_LISTS_SINCE
    queries = {
        "publication": publication_membership.PUBLICATION,
        "members": publication_membership.members_query(server_version),
        "tables": relations.TABLES,
        "columns": relations.COLUMNS,
        "keys": relations.KEYS,
        "leaves": partitions.LEAVES,
        "types": types.PARTS + types.TYPES,
        "fields": types.PARTS + types.FIELDS,
        "labels": types.LABELS,
        "missing": missing.MISSING,
    }
    return {**queries, "schemas": publication_membership.SCHEMA_MEMBERS} if by_version else queries


def carried_format(server_version: int) -> str:
    """Return a hash of the carried queries. Rows with another hash cannot be read."""
    texts = "\0".join(carried_queries(server_version).values())
    return hashlib.blake2b(texts.encode(), digest_size=6).hexdigest()


class _Carried:
    """A substitute for a connection that answers a query with the rows that the message carries for it."""

    def __init__(self, server_version: int, rows: Rows) -> None:
        self.server_version = server_version
        self._rows = {query: rows[name] for name, query in carried_queries(server_version).items()}
        self._found: list[tuple[Any, ...]] = []

    def cursor(self) -> _Carried:
        return self

    def __enter__(self) -> _Carried:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def execute(self, query: str, _: object = None) -> None:
        self._found = [tuple(row) for row in self._rows[query]]

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self._found


def build_relation(oid: int, publication: str, server_version: int, rows: Rows) -> Relation | None:
    """Return the relation that these rows describe, or None if it did not exist.

    Raises LookupError or ValueError if the rows do not match the queries.
    """
    connection = cast(Connection, _Carried(server_version, rows))
    return relations.read_relation(connection, oid, publication)


@dataclass(frozen=True)
class DdlMessage:
    """One table after a DDL command.

    `oid`: 0 if any table may have changed. `trigger`: the identity of the event triggers that were active.
    `using`: the DDL had, or may have had, a USING clause. `gone`: the name of a dropped table. `relation`:
    None if the message does not carry it.
    """

    oid: int = 0
    trigger: str = ""
    using: bool = False
    gone: TableName | None = None
    relation: Relation | None = None


ANYTHING = DdlMessage(using=True)
"""The content that is assumed if a message cannot be read, or the function has failed.

The catalog is read then. It does not show the expression by which a type was changed.
"""


def parse_ddl_message(said: bytes, publication: str) -> DdlMessage:
    """Parse the content of a genuine message. Return `ANYTHING` if it cannot be read.

    The content is from this package's function, but maybe from another version of it. Tables' owners chose
    the names, types and labels in it.
    """
    if len(said) > _MOST_BYTES:
        return ANYTHING
    try:
        return _parse(json.loads(said.decode()), publication)
    except Exception as error:  # noqa: BLE001 - no message may end the receiver, which would meet it at every start
        log_unexpected(log, "reading a message of the event trigger", error, logging.INFO)
        return ANYTHING


def _parse(fields: dict[str, Any], publication: str) -> DdlMessage:
    oid = int(fields.get("oid", 0))
    if not 0 < oid < _OIDS:
        return ANYTHING
    gone = TableName(str(fields["schema"]), str(fields["name"])) if fields.get("gone") else None
    rows, server = fields.get("rows"), int(fields.get("server", 0))
    relation = None
    if rows is not None and fields["format"] == carried_format(server):
        relation = build_relation(oid, publication, server, rows)
        if relation is not None and relation.oid != oid:
            return ANYTHING
    using = fields.get("using", False)
    trigger = str(fields.get("trigger") or "")
    trigger.encode()  # raise for lone surrogates, which the lake cannot store
    if len(trigger) > _MOST_TRIGGER:
        return ANYTHING
    # `using` is null if the function could not read the text of the command.
    return DdlMessage(oid, trigger, using is None or bool(using), gone, relation)


@dataclass(frozen=True)
class SealedMessage:
    """A received message. Do not trust `said` unless `is_genuine` returns True."""

    pipeline: str
    said: bytes
    xid: int = -1
    seal: str = ""

    def is_genuine(self, key: bytes, xid: int) -> bool:
        """Return True if the message was sealed with the key, in the transaction with this 32-bit xid."""
        if self.xid < 0 or self.xid % (1 << _XID_BITS) != xid:
            return False
        # compare_digest raises TypeError for text that is not ASCII.
        return self.seal.isascii() and hmac.compare_digest(self.seal, seal_of(key, self.xid, self.said))


def seal_of(key: bytes, xid: int, said: bytes) -> str:
    """Return the hexadecimal seal of a message of a transaction. It cannot be computed without the key."""
    inner = hashlib.sha256(b"%s%d\n%s" % (key, xid, said)).digest()
    return hashlib.sha256(key + inner).hexdigest()


def read_sealed(content: bytes) -> SealedMessage | None:
    """Parse the first line of a message. Return None if it is not from the event trigger of a pipeline."""
    head, _, said = content.partition(b"\n")
    if len(head) > _MOST_HEAD_BYTES:
        return None
    try:
        fields = json.loads(head.decode("ascii"))
        pipeline, xid, seal = fields["pipeline"], fields.get("xid", "-1"), fields.get("seal", "")
        if not (isinstance(pipeline, str) and isinstance(xid, str) and isinstance(seal, str)):
            return None
        return SealedMessage(pipeline, said, int(xid), seal)
    except Exception as error:  # noqa: BLE001 - it may be anybody's, and hold anything
        log_unexpected(log, "reading a message", error, logging.DEBUG)
        return None
