"""The lake's storage: where files are written, and when what was written is there for good."""

from airflow_provider_pgrepl.replication.storage.filesystem import make_folder, open_storage
from airflow_provider_pgrepl.replication.storage.refusal import (
    delta_errors,
    is_refusal,
    refusal,
    storage_errors,
)

__all__ = ["delta_errors", "is_refusal", "make_folder", "open_storage", "refusal", "storage_errors"]
