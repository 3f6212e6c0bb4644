"""Which commit that deltalake made is one's own.

A client puts a commit again when the answer to the first put was lost or was an error. The second put then
finds the version taken, by what the first has put, and deltalake says that another writer was first.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError

from airflow_provider_pgrepl.replication.storage.durable import local_path
from airflow_provider_pgrepl.replication.storage.filesystem import open_storage, read_commit_actions

_TOKEN = "pgrepl_commit"  # noqa: S105 - of a commit


def commit_token() -> dict[str, str]:
    """For the metadata of one commit, by which no other has the same."""
    return {_TOKEN: uuid.uuid4().hex}


@contextmanager
def committing(table: DeltaTable, properties: CommitProperties) -> Iterator[None]:
    """Commit once through a handle. Raises CommitFailedError when another writer was first, and what else
    deltalake does; OSError."""
    try:
        yield
    except CommitFailedError:
        if not _has_landed(table, properties):
            raise
        table.update_incremental()


def _has_landed(table: DeltaTable, properties: CommitProperties) -> bool:
    """Whether a commit with these properties is one of those after the version where the handle stands.

    On a file system a commit is made once, and its outcome is known.
    """
    uri, token = str(table.table_uri), (properties.custom_metadata or {}).get(_TOKEN)
    if token is None or local_path(uri) is not None:
        return False
    filesystem, root = open_storage(uri)
    version = int(table.version())
    while True:
        version += 1
        try:
            actions = read_commit_actions(filesystem, root, version)
        except FileNotFoundError:
            return False
        if any(action.get("commitInfo", {}).get(_TOKEN) == token for action in actions):
            return True
