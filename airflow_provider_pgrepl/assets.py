"""Lake tables as assets of Airflow, for schedules of DAGs that read them."""

from __future__ import annotations

from urllib.parse import quote

from airflow.sdk import Asset, AssetWatcher

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.triggers import ConsistentPointTrigger

__all__ = ["lake_asset"]
_POLL_INTERVAL_S = 10.0


def lake_asset(
    pipeline: str, table: str, *, state_conn_id: str = "pgrepl_default", every_s: float = 60.0
) -> Asset:
    """Return the asset of a lake table, `pgrepl://PIPELINE/SCHEMA/TABLE`.

    The triggerer adds an event when a consistent point has new changes of the table. It reads the state
    database. The operators add no events: Airflow records those of a task only when the task succeeds, and a
    continuous replication does not end. Use the same arguments for a table in all DAGs.

    :param pipeline: the name of the pipeline, as in its file
    :param table: the table at the source, as `public.orders`
    :param state_conn_id: the connection of the database with the pipeline's state
    :param every_s: the least seconds between two events
    :raises ConfigError: for a name that is not valid
    """
    try:
        name = TableName.parse(table)
    except ValueError as error:
        raise ConfigError(f"table: {error}", "name it with its schema, as public.orders") from None
    trigger = ConsistentPointTrigger(
        pipeline=pipeline,
        table=str(name),
        state_conn_id=state_conn_id,
        every_s=every_s,
        poll_interval_s=min(_POLL_INTERVAL_S, every_s),
    )
    uri = "pgrepl://" + "/".join(quote(part, safe="") for part in (pipeline, name.schema, name.name))
    return Asset(uri, group="pgrepl", watchers=[AssetWatcher(name=uri, trigger=trigger)])
