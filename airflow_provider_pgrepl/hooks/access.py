"""From a pipeline's connection ids to the access that the core's operations take."""

from __future__ import annotations

from airflow_provider_pgrepl.hooks.lake import lake_variables
from airflow_provider_pgrepl.hooks.replication import PgReplicationHook
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.store_variables import use_store


def access_to(pipeline: Pipeline) -> Access:
    """The pipeline, with connection strings that are masked in logs from here on. Raises ConfigError."""
    dsn = PgReplicationHook(pipeline.conn_id).dsn()
    state_dsn = PgReplicationHook(pipeline.state_conn_id).dsn() if pipeline.state_conn_id else dsn
    return Access(pipeline, dsn, state_dsn)


def access_with_lake(pipeline: Pipeline) -> Access:
    """The same for what reads or writes the lake in this process: it reaches the store as the pipeline says.

    For tasks, which have a process of their own; not for triggers. Raises ConfigError.
    """
    use_store(lake_variables(pipeline))
    return access_to(pipeline)
