"""What a message of the event trigger says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from airflow_provider_pgrepl.replication.relation import Relation, TableName
from airflow_provider_pgrepl.replication.source.carried_catalog import build_relation, carried_format


@dataclass(frozen=True)
class DdlMessage:
    """One table as some DDL left it.

    `oid` is 0 when anything may have changed. `trigger`: identity of the triggers that watched. `gone`: the
    name of a table that was dropped. `relation` is None when the message does not carry it; `using`: the DDL
    had, or may have had, a USING clause.
    """

    pipeline: str
    oid: int = 0
    trigger: str = ""
    using: bool = False
    gone: TableName | None = None
    relation: Relation | None = None


def parse_ddl_message(content: bytes, publication: str) -> DdlMessage | None:
    """Read a message's content; None when it is none of ours.

    Anybody may emit messages: one that looks like ours but cannot be read says that anything may have
    changed.
    """
    try:
        # In whatever encoding, the name of a pipeline is ASCII.
        pipeline = json.loads(content.decode("latin-1"))["pipeline"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    if not isinstance(pipeline, str):
        return None
    try:
        return _parse(pipeline, json.loads(content.decode()), publication)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return DdlMessage(pipeline)


def _parse(pipeline: str, fields: dict[str, Any], publication: str) -> DdlMessage:
    oid = int(fields.get("oid", 0))
    gone = TableName(str(fields["schema"]), str(fields["name"])) if fields.get("gone") else None
    rows, server = fields.get("rows"), int(fields.get("server", 0))
    relation = None
    if rows is not None and fields["format"] == carried_format(server):
        relation = build_relation(oid, publication, server, rows)
    using = fields.get("using", False)
    trigger = str(fields.get("trigger") or "")
    trigger.encode()  # it goes into the lake, which has no half characters
    # Null: the function could not see the text of the command.
    return DdlMessage(pipeline, oid, trigger, using is None or bool(using), gone, relation)
