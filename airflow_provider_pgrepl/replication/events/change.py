"""Change: one change of one row, or the TRUNCATE of a table, as a reader of events gets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.postgres.lsn import LSN

Operation = Literal["insert", "update", "delete", "truncate"]
OPERATIONS: dict[str, Operation] = {"I": "insert", "U": "update", "D": "delete", "T": "truncate"}
"""By the changelog's letters."""
LETTERS = "".join(OPERATIONS)


@dataclass(frozen=True)
class Change:
    """One change, typed as the lake's values are.

    `table` is `schema.name`, as the table was called when the change was received. `data`: the row after an
    insert or update, None for a delete or truncate; it lacks the columns of `unchanged`, large values which
    an update did not touch and the server did not send. `old`: the row before, as far as the server sent it:
    all of it with REPLICA IDENTITY FULL; else its key, for a delete and for an update that changes the key;
    None where nothing.
    `commit_ts` is the source's clock and orders nothing. `json_columns`: those whose texts are JSON.
    `relation_id`: the table's oid, which stays when it is renamed.
    """

    position: EventPosition
    table: str
    op: Operation
    data: dict[str, Any] | None
    old: dict[str, Any] | None
    unchanged: tuple[str, ...]
    xid: int
    commit_ts: datetime
    json_columns: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    relation_id: int = field(default=0, repr=False, compare=False)

    @cached_property
    def id(self) -> str:
        """The same whenever the change is read: `<epoch>:<commit LSN>:<ordinal>`."""
        return str(self.position)

    @property
    def commit_lsn(self) -> LSN:
        """Where its transaction committed: equal for all changes of one transaction."""
        return self.position.commit_lsn
