"""The routing key of an event: `schema.table.op`, three words however a table is called."""

from __future__ import annotations

from functools import lru_cache

from airflow_provider_pgrepl.replication.events.publishing.event import Event
from airflow_provider_pgrepl.replication.names import TableName

_SPECIAL = str.maketrans({sign: f"%{ord(sign):02X}" for sign in ".*#%"})
"""What separates words, and stands for words in a binding."""


def routing_key(event: Event) -> str:
    """As `public.orders.insert`; in a name `.`, `*`, `#` and `%` are percent-encoded."""
    return _key(event.table, event.op)


@lru_cache(10_000)
def _key(table: str, op: str) -> str:
    name = TableName.parse(table)
    return f"{name.schema.translate(_SPECIAL)}.{name.name.translate(_SPECIAL)}.{op}"
