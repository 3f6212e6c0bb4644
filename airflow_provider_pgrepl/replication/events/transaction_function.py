"""TransactionFunction: a user's function that is given whole transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from airflow_provider_pgrepl.replication.events.business_event import BusinessEvent
from airflow_provider_pgrepl.replication.events.change import Change

TransactionFunction = Callable[[Sequence[Change]], Iterable[BusinessEvent] | None]
"""Given the changes of one transaction of a publisher's tables, in order, at least one, what is sent instead
of them. Pure: it may be called more than once with the same."""
