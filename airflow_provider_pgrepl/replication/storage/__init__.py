"""The lake's storage: where files are written, and when what was written is there for good."""

from airflow_provider_pgrepl.replication.storage.app_log import AppLog, TakenOverError
from airflow_provider_pgrepl.replication.storage.checkpoint_files import (
    checkpoint_version,
    read_checkpoint,
    whole_checkpoints,
)
from airflow_provider_pgrepl.replication.storage.delta_tables import (
    append_delta,
    create_delta,
    has_delta,
    open_delta,
    query_delta,
    write_file,
)
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
from airflow_provider_pgrepl.replication.storage.object_store import is_store
from airflow_provider_pgrepl.replication.storage.own_commit import commit_token, committing
from airflow_provider_pgrepl.replication.storage.put_commit import (
    added_action,
    can_commit,
    metadata_action,
    put_commit,
    put_version,
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
from airflow_provider_pgrepl.replication.storage.writing import Output

__all__ = [
    "AppLog",
    "HeldFiles",
    "Output",
    "TakenOverError",
    "added_action",
    "append_delta",
    "can_commit",
    "checkpoint_version",
    "commit_mark",
    "commit_path",
    "commit_token",
    "commit_version",
    "committing",
    "create_delta",
    "delete_files",
    "delete_tree",
    "delta_errors",
    "has_commit",
    "has_delta",
    "is_away",
    "is_refusal",
    "is_store",
    "log_path",
    "make_folder",
    "make_folders",
    "many_at_once",
    "metadata_action",
    "open_delta",
    "open_file",
    "open_parquet",
    "open_storage",
    "parse_parquet",
    "put_commit",
    "put_version",
    "query_delta",
    "raise_if_away",
    "read_checkpoint",
    "read_commit",
    "read_commit_actions",
    "read_file",
    "read_parquet",
    "read_range",
    "refusal",
    "requests_at_once",
    "storage_errors",
    "whole_checkpoints",
    "write_file",
]
