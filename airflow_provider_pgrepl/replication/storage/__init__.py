"""The lake's storage: where files are written, and when what was written is there for good."""

from airflow_provider_pgrepl.replication.storage.filesystem import (
    commit_path,
    has_commit,
    log_path,
    make_folder,
    open_storage,
)
from airflow_provider_pgrepl.replication.storage.refusal import (
    delta_errors,
    is_refusal,
    refusal,
    storage_errors,
)

__all__ = [
    "commit_path",
    "delta_errors",
    "has_commit",
    "is_refusal",
    "log_path",
    "make_folder",
    "open_storage",
    "refusal",
    "storage_errors",
]
