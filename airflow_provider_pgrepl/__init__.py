"""Replication of PostgreSQL into Delta Lake tables, with Airflow and Spark.

Importing this package imports no other module, so that Spark hosts need no Airflow.
"""

from __future__ import annotations

__version__ = "0.1.0"


def get_provider_info() -> dict[str, object]:
    """Return the provider's declarations for Airflow; they are in `provider.yaml`."""
    from airflow_provider_pgrepl.provider_info import read_provider_info

    return read_provider_info()
