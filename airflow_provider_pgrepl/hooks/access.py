"""From a pipeline's connection ids to the access that the core's operations take."""

from __future__ import annotations

from airflow_provider_pgrepl.hooks.replication import PgReplicationHook
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.config import Pipeline


def access_to(pipeline: Pipeline) -> Access:
    """The pipeline, with connection strings that are masked in logs from here on. Raises ConfigError."""
    dsn = PgReplicationHook(pipeline.conn_id).dsn()
    state_dsn = PgReplicationHook(pipeline.state_conn_id).dsn() if pipeline.state_conn_id else dsn
    return Access(pipeline, dsn, state_dsn)
