"""The lake's storage: where files are written, and when what was written is there for good."""

from airflow_provider_pgrepl.replication.storage.filesystem import (
    commit_mark,
    commit_path,
    commit_version,
    delete_files,
    delete_tree,
    has_commit,
    log_path,
    make_folder,
    make_folders,
    open_storage,
    parse_parquet,
    read_commit,
    read_commit_actions,
    read_file,
    read_parquet,
)
from airflow_provider_pgrepl.replication.storage.reading import (
    HeldFiles,
    many_at_once,
    open_file,
    open_parquet,
    read_range,
    requests_at_once,
)
from airflow_provider_pgrepl.replication.storage.refusal import (
    delta_errors,
    is_away,
    is_refusal,
    raise_if_away,
    refusal,
    storage_errors,
)
from airflow_provider_pgrepl.replication.storage.stores.object_store import is_store
from airflow_provider_pgrepl.replication.storage.writing import Output

__all__ = [
    "HeldFiles",
    "Output",
    "commit_mark",
    "commit_path",
    "commit_version",
    "delete_files",
    "delete_tree",
    "delta_errors",
    "has_commit",
    "is_away",
    "is_refusal",
    "is_store",
    "log_path",
    "make_folder",
    "make_folders",
    "many_at_once",
    "open_file",
    "open_parquet",
    "open_storage",
    "parse_parquet",
    "raise_if_away",
    "read_commit",
    "read_commit_actions",
    "read_file",
    "read_parquet",
    "read_range",
    "refusal",
    "requests_at_once",
    "storage_errors",
]
