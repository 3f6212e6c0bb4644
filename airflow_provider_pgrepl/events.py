"""The public names for functions that make business events, and for consumers of creek's events.

    from airflow_provider_pgrepl.events import BusinessEvent

    def order_events(change):
        if change.op == "insert":
            yield BusinessEvent({"id": change.data["id"]}, type="order.placed")

Only `CreekClient` needs the NATS client to be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_pgrepl.replication.events.business import BusinessEvent
from airflow_provider_pgrepl.replication.events.changes import Change

if TYPE_CHECKING:
    from airflow_provider_pgrepl.replication.creek.client import CreekClient

__all__ = ["BusinessEvent", "Change", "CreekClient"]


def __getattr__(name: str) -> Any:
    if name == "CreekClient":
        from airflow_provider_pgrepl.replication.creek.client import CreekClient

        return CreekClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
