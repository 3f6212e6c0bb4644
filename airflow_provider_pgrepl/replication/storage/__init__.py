"""The lake's storage: where files are written, and when what was written is there for good."""

from airflow_provider_pgrepl.replication.storage.delta_tables import (
    append_delta,
    create_delta,
    has_delta,
    open_delta,
    query_delta,
)
from airflow_provider_pgrepl.replication.storage.filesystem import (
    commit_path,
    has_commit,
    log_path,
    make_folder,
    open_storage,
    read_commit,
    read_commit_actions,
    read_parquet,
)
from airflow_provider_pgrepl.replication.storage.own_commit import commit_token, committing
from airflow_provider_pgrepl.replication.storage.put_commit import put_commit
from airflow_provider_pgrepl.replication.storage.refusal import (
    delta_errors,
    is_refusal,
    refusal,
    storage_errors,
)

__all__ = [
    "append_delta",
    "commit_path",
    "commit_token",
    "committing",
    "create_delta",
    "delta_errors",
    "has_commit",
    "has_delta",
    "is_refusal",
    "log_path",
    "make_folder",
    "open_delta",
    "open_storage",
    "put_commit",
    "query_delta",
    "read_commit",
    "read_commit_actions",
    "read_parquet",
    "refusal",
    "storage_errors",
]
