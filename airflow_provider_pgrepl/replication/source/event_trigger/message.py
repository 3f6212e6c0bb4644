"""What a message of the event trigger says."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.event_trigger.carried_catalog import (
    build_relation,
    carried_format,
)
from airflow_provider_pgrepl.trace import log_unexpected

log = logging.getLogger(__name__)

_MOST_BYTES = 64 << 20
_MOST_TRIGGER = 1000
_OIDS = 1 << 32


@dataclass(frozen=True)
class DdlMessage:
    """One table as some DDL left it.

    `oid` is 0 when anything may have changed. `trigger`: identity of the triggers that watched. `gone`: the
    name of a table that was dropped. `relation` is None when the message does not carry it; `using`: the DDL
    had, or may have had, a USING clause.
    """

    oid: int = 0
    trigger: str = ""
    using: bool = False
    gone: TableName | None = None
    relation: Relation | None = None


ANYTHING = DdlMessage(using=True)
"""Whatever cannot be read, and what the function says when it has failed: the catalog is to be asked, which
does not show by which expression a type was changed."""


def parse_ddl_message(said: bytes, publication: str) -> DdlMessage:
    """Read what a genuine message says. It comes from our function, but by whatever version of it; and names,
    types and labels in it are what tables' owners have made of them. So whatever is odd is `ANYTHING`."""
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
    trigger.encode()  # it goes into the lake, which has no half characters
    if len(trigger) > _MOST_TRIGGER:
        return ANYTHING
    # Null: the function could not see the text of the command.
    return DdlMessage(oid, trigger, using is None or bool(using), gone, relation)
