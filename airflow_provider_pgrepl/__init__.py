"""PostgreSQL into Delta lake tables, driven by Airflow, on Spark.

Importing this package imports nothing else, so that Spark hosts need no Airflow.
"""

from __future__ import annotations

__version__ = "0.1.0"


def get_provider_info() -> dict[str, object]:
    """Airflow's entry point; see `airflow_provider_pgrepl.provider_info`."""
    from airflow_provider_pgrepl.provider_info import PROVIDER_INFO

    return PROVIDER_INFO
