"""The lake's storage: where files are written, and when what was written is there for good."""

from airflow_provider_pgrepl.replication.storage.delta_tables import (
    append_delta,
    create_delta,
    has_delta,
    open_delta,
    query_delta,
)
from airflow_provider_pgrepl.replication.storage.filesystem import (
    commit_mark,
    commit_path,
    delete_files,
    delete_tree,
    has_commit,
    is_store,
    log_path,
    make_folder,
    make_folders,
    open_storage,
    read_commit,
    read_commit_actions,
    read_parquet,
)
from airflow_provider_pgrepl.replication.storage.own_commit import commit_token, committing, last_of_app
from airflow_provider_pgrepl.replication.storage.put_commit import put_commit
from airflow_provider_pgrepl.replication.storage.refusal import (
    delta_errors,
    is_refusal,
    refusal,
    storage_errors,
)

__all__ = [
    "append_delta",
    "commit_mark",
    "commit_path",
    "commit_token",
    "committing",
    "create_delta",
    "delete_files",
    "delete_tree",
    "delta_errors",
    "has_commit",
    "has_delta",
    "is_refusal",
    "is_store",
    "last_of_app",
    "log_path",
    "make_folder",
    "make_folders",
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
