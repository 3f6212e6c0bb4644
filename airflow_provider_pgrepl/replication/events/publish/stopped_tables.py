"""StoppedTables: which tables' events wait, and how they come to go on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.changelog.gaps import NO_RELATION
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.stopped_table import (
    StoppedTable,
    group_of,
    stopped_by,
)
from airflow_provider_pgrepl.replication.events.table_selection import TableGroup, TableSelection
from airflow_provider_pgrepl.replication.events.targets.base import Refusal


class StoppedTables:
    """By oid; `now`: those that stopped in this run, which are not tried again before the next."""

    def __init__(self, stopped: Mapping[int, StoppedTable]) -> None:
        self.tables = dict(stopped)
        self.now: set[int] = set()

    def is_stopped_before(self, oid: int, after: EventPosition) -> bool:
        """Whether something went wrong with a table in this run earlier, or for good: that counts."""
        known = self.tables.get(oid)
        return known is not None and (known.is_lost or (oid in self.now and known.after <= after))

    def stop(
        self, oid: int, names: Collection[str], after: EventPosition, why: PgReplError | Refusal
    ) -> StoppedTable:
        """A table stops in this run."""
        known = self.tables.get(oid)
        stopped = stopped_by(sorted({*names, *(known.names if known else ())}), after, why)
        self.now.add(oid)
        self.tables[oid] = stopped
        return stopped

    def lose(self, oid: int, error: PgReplError) -> None:
        """Changes for which a table waits are gone."""
        table = self.tables[oid]
        self.tables[oid] = stopped_by(table.names, table.after, error)

    def leave_out(self, selection: TableSelection) -> list[StoppedTable]:
        """Those that are not wanted any more wait no more; they."""
        unwanted = [oid for oid, one in self.tables.items() if not _is_wanted(oid, one, selection)]
        return [self.tables.pop(oid) for oid in unwanted]

    def learn_names(self, oid: int, names: Iterable[str]) -> None:
        """Of one that was renamed since it stopped: whoever had its new name comes again, after it."""
        table = self.tables[oid]
        self.tables[oid] = replace(table, names=tuple(sorted({*table.names, *names})))

    def has_caught_up_to(self, position: EventPosition, oids: Iterable[int]) -> None:
        """Those that have not stopped again wait from there on."""
        for oid in set(oids) - self.now:
            self.tables[oid] = replace(self.tables[oid], after=max(self.tables[oid].after, position))

    def go_on_with(self, oids: Iterable[int]) -> list[StoppedTable]:
        """Those that have not stopped again wait no more; they."""
        return [self.tables.pop(oid) for oid in sorted(set(oids) - self.now)]

    def group(self, oids: Iterable[int]) -> TableGroup:
        """Who waits with these."""
        return group_of({oid: self.tables[oid] for oid in oids})


def _is_wanted(oid: int, table: StoppedTable, selection: TableSelection) -> bool:
    if oid == NO_RELATION:
        return selection.has_messages
    names = table.table_names
    return not names or selection.has(oid, names)
