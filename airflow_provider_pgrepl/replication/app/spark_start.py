"""The start of Spark by an app, in turn with the other apps of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_pgrepl.replication.runtime.start_queue import StartTurn
from airflow_provider_pgrepl.replication.spark.session import build_session, has_local_jvm

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def start_spark(name: str, turn: StartTurn) -> SparkSession:
    """Return a session without Delta. One on this host has started its Python workers.

    :param name: the app and its pipeline, as Spark's page shows it
    :raises SparkError: if the workers do not start
    """
    with turn:
        spark = build_session(f"pgrepl {name}", delta=False)
        if has_local_jvm():
            # Import this here: without lake tables, Spark need not be installed.
            from airflow_provider_pgrepl.replication.lake.apply.applier import warm_up

            warm_up(spark)
        return spark
