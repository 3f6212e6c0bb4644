"""Rows of the changelog → the events that a function makes of each transaction."""

from __future__ import annotations

from functools import partial
from itertools import groupby

import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.gaps import NO_RELATION
from airflow_provider_pgrepl.replication.events.business import as_bytes, kind_of, transformed
from airflow_provider_pgrepl.replication.events.business_event import BusinessEvent
from airflow_provider_pgrepl.replication.events.by_relation import ByRelation, ChoicesOf
from airflow_provider_pgrepl.replication.events.change import Change
from airflow_provider_pgrepl.replication.events.changes import TypedChanges
from airflow_provider_pgrepl.replication.events.columns import PublishedColumns
from airflow_provider_pgrepl.replication.events.event import Business, Event
from airflow_provider_pgrepl.replication.events.relations import KnownRelations
from airflow_provider_pgrepl.replication.events.table_selection import TableSelection
from airflow_provider_pgrepl.replication.events.transaction_function import TransactionFunction

TRANSACTIONS = "transactions"
"""What their events are of where a table would be; their route, unless the function says another."""


class TransactionEvents(ByRelation[Event]):
    """It must be given whole transactions."""

    def __init__(
        self,
        function: TransactionFunction,
        relations: KnownRelations,
        choices_of: ChoicesOf,
        wanted: TableSelection,
        published: PublishedColumns,
    ) -> None:
        super().__init__(relations, choices_of, wanted, published)
        self._function = function
        self._typed = TypedChanges(relations, choices_of, wanted, published)

    def of(self, rows: pa.Table) -> list[Event]:
        """Raises TransformError, and what TypedChanges raise."""
        by_transaction = groupby(self._typed.of(rows), lambda change: change.commit_lsn)
        return [event for _, changes in by_transaction for event in self._events(list(changes))]

    def _events(self, changes: list[Change]) -> list[Event]:
        last = changes[-1]
        make = partial(_event, last)
        return transformed(self._function, changes, TRANSACTIONS, last.commit_lsn, make)


def _event(last: Change, number: int, made: BusinessEvent) -> Event:
    """The first has the id of the transaction's last change; those after it a number more."""
    name = last.id if number == 0 else f"{last.id}.{number}"
    headers = {**made.headers, **({"event_id": made.id} if made.id else {})}
    event = Event(
        last.position, name, NO_RELATION, TRANSACTIONS, last.op, last.commit_ts, as_bytes(made.body)
    )
    event.key = None if made.key is None else as_bytes(made.key)
    event.business = Business(made.route or TRANSACTIONS, made.type or "transaction", kind_of(made), headers)
    return event
