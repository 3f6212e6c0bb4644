"""The lake's storage: where files are written, and when what was written is there for good."""

from airflow_provider_pgrepl.replication.storage.filesystem import open_storage, storage_errors

__all__ = ["open_storage", "storage_errors"]
