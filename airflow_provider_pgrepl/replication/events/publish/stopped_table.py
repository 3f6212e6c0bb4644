"""StoppedTable: a table whose events wait while those of others go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from airflow_provider_pgrepl.errors import ChangelogError, GapError, PgReplError, ValueRangeError
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.table_selection import TableGroup
from airflow_provider_pgrepl.replication.events.targets.base import Refusal
from airflow_provider_pgrepl.replication.postgres.names import TableName

_AGAIN = "start the publisher again: it begins with this table. Or let on_error be skip_and_record"
_ROUTED = "bind a queue, or let unrouted be drop"
_SMALLER = "leave the large column out (exclude_columns), or have the target take it"
_OTHERWISE = "have what makes the event give it another route, other headers or less content"


@dataclass(frozen=True)
class StoppedTable:
    """Its events, and those of whichever table has one of its names, wait after a position; the rest says
    why."""

    table: str
    names: tuple[str, ...]
    after: EventPosition
    error: str
    reason: str
    hint: str

    @property
    def table_names(self) -> frozenset[TableName]:
        """Those of its names that are a table's: one that nobody knows by name is known by its oid."""
        found = set()
        for name in self.names:
            with suppress(ValueError):
                found.add(TableName.parse(name))
        return frozenset(found)

    @property
    def is_lost(self) -> bool:
        """Whether changes that it waits for are gone."""
        return self.error == ChangelogError.__name__


def group_of(stopped: Mapping[int, StoppedTable]) -> TableGroup:
    """Which tables' events wait. `stopped`: by oid."""
    names = frozenset[TableName]().union(*(table.table_names for table in stopped.values()))
    return TableGroup(frozenset(stopped), names)


def stopped_by(names: Sequence[str], after: EventPosition, why: PgReplError | Refusal) -> StoppedTable:
    """A table that stops by an error of its changes, or by a target's refusal."""
    table = " or ".join(names)
    if isinstance(why, Refusal):
        said_otherwise = _SMALLER if why.event.business is None else _OTHERWISE
        mend = _ROUTED if why.is_unrouted else said_otherwise
        reason, hint = f"{why.event.id}: {why.reason}", f"{mend}, then {_AGAIN}"
        return StoppedTable(table, tuple(names), after, "TargetError", reason, hint)
    return StoppedTable(table, tuple(names), after, type(why).__name__, why.message, _hint(why))


def _hint(error: PgReplError) -> str:
    if isinstance(error, ValueRangeError):
        return f"list the column in text_columns, then {_AGAIN}"
    if isinstance(error, GapError | ChangelogError):
        return (
            "have readers take the table from the lake at a consistent point, let on_error be"
            " skip_and_record, and start the publisher again"
        )
    return f"{error.hint}; then {_AGAIN}" if error.hint else _AGAIN
