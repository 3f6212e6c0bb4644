"""Lake tables that are given up: the folder goes, with all versions and the history."""

from __future__ import annotations

from collections.abc import Iterable

from deltalake.exceptions import DeltaError, TableNotFoundError
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.changelog.layout import system_folder
from airflow_provider_pgrepl.replication.lake.delta.table import app_id
from airflow_provider_pgrepl.replication.lake.history.place import history_path
from airflow_provider_pgrepl.replication.lsn import Epoch
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.storage import (
    delete_tree,
    is_refusal,
    is_store,
    log_path,
    open_delta,
    open_storage,
    refusal,
    storage_errors,
)


def check_droppable(lake_root: str, tables: Iterable[TableName], pipeline: str, epoch: int) -> None:
    """Raises LakeError, naming all, for Delta tables that this pipeline has not written up to this epoch."""
    unknown = [
        f"{lake_root}/{table.path}"
        for table in tables
        if not _may_be_ours(f"{lake_root}/{table.path}", pipeline, epoch)
    ]
    if unknown:
        raise LakeError(
            f"not dropped, because pipeline {pipeline} has not written it: {', '.join(unknown)}",
            "move it away, or drop it yourself",
        )


def _may_be_ours(uri: str, pipeline: str, epoch: int) -> bool:
    try:
        table = open_delta(uri)
    except TableNotFoundError:
        return True
    except (DeltaError, OSError) as error:
        if is_refusal(error):
            # Whose it is cannot be known before the storage answers.
            raise refusal(f"{uri} is not dropped, since it cannot be read", error) from None
        return True  # what an earlier try has left
    apps = (app_id(pipeline, Epoch(number)) for number in range(1, epoch + 1))
    return any(table.transaction_version(app) is not None for app in apps)


def drop_lake_tables(lake_root: str, tables: Iterable[TableName]) -> list[TableName]:
    """Delete these tables and their histories; says which of them were there. May be called again.

    Nobody may be writing them. Raises LakeError, LakeUnavailableError.
    """
    filesystem, root = open_storage(lake_root)
    dropped = []
    for table in tables:
        found = [_delete(filesystem, f"{root}/{path}") for path in (history_path(table), table.path)]
        if any(found):
            dropped.append(table)
        _delete_if_empty(filesystem, f"{root}/{table.path.partition('/')[0]}")
    return dropped


def drop_system_folder(lake_root: str) -> None:
    """Delete the changelog, the points and all else that is the pipeline's own; then the root, if empty.

    Raises LakeError, LakeUnavailableError.
    """
    filesystem, root = open_storage(lake_root)
    _delete(filesystem, open_storage(system_folder(lake_root))[1])
    _delete_if_empty(filesystem, root)


def _delete(filesystem: fs.FileSystem, folder: str) -> bool:
    """Its log first: what is half deleted is then no table any more."""
    there = False
    for place in (log_path(folder), folder):
        with storage_errors(place):
            if filesystem.get_file_info(place).type == fs.FileType.Directory:
                delete_tree(filesystem, place)
                there = True
    return there


def _delete_if_empty(filesystem: fs.FileSystem, folder: str) -> None:
    with storage_errors(folder):
        if is_store(filesystem):
            return  # It has no folders but by what is in them.
        if filesystem.get_file_info(folder).type != fs.FileType.Directory:
            return
        if not filesystem.get_file_info(fs.FileSelector(folder)):
            filesystem.delete_dir(folder)
