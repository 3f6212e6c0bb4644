"""The figures that a replication reads for its metrics, from a real source and state database."""

from __future__ import annotations

import psycopg2

from airflow_provider_pgrepl.replication.app.metrics.replication import ErrorCounts, Observer
from airflow_provider_pgrepl.replication.app.status.summary import LagMeter
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.receiver.changelog_feed import ReceiverProgress
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from tests.support.replicated import execute, wait_until


def test_source_that_goes_away_leaves_its_figures_and_is_read_again(dsn):
    received, applied, asked = ReceiverProgress(), ApplierProgress(), []
    pipeline = Pipeline(name="observed", tables=("public.t",), lake="/nowhere")
    execute(dsn, f"select pg_create_logical_replication_slot('{pipeline.slot}', 'pgoutput')")
    lag = LagMeter(lambda: received, lambda: applied)
    name = psycopg2.extensions.parse_dsn(dsn)["dbname"]
    other = dsn.replace(f"dbname={name}", "dbname=postgres")
    observer = Observer(dsn, dsn, pipeline, lag, ErrorCounts(), lambda: asked.append(1), interval_s=0.05)
    try:
        with observer:
            wait_until(lambda: observer.observed.is_source_up, what="the source to be read")
            before = observer.observed
            assert (before.is_slot_active, before.is_slot_lost, before.is_state_up) == (False, False, False)
            assert before.retained_bytes is not None
            assert before.limit_bytes == float("inf")
            assert asked
            execute(
                other,
                f"alter database {name} allow_connections false",
                f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'",
            )
            wait_until(lambda: not observer.observed.is_source_up, what="the loss to be noticed")
            assert observer.observed.end is not None
            execute(other, f"alter database {name} allow_connections true")
            wait_until(lambda: observer.observed.is_source_up, what="the source to be read again")
    finally:
        execute(other, f"alter database {name} allow_connections true")
