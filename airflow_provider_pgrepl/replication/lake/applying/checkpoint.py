"""Where Spark keeps what its streaming query has done: for one run of the app, and no longer.

Tables say themselves where they are, so nothing of it is needed by the next run; and what an earlier one has
left may be damaged, of another lake, or newer than a changelog that was restored.
"""

from __future__ import annotations

import logging

from pyarrow import fs

from airflow_provider_pgrepl.replication.changelog.layout import system_folder
from airflow_provider_pgrepl.replication.storage import open_storage, storage_errors

log = logging.getLogger(__name__)


def checkpoint_uri(lake_root: str) -> str:
    """The folder that Spark is given."""
    return f"{system_folder(lake_root)}/checkpoint"


def drop_checkpoint(lake_root: str) -> None:
    """Have nothing there, whatever an earlier run left. Raises LakeError, LakeUnavailableError."""
    filesystem, place = open_storage(checkpoint_uri(lake_root))
    with storage_errors(place):
        kind = filesystem.get_file_info(place).type
        if kind is fs.FileType.NotFound:
            return
        log.info("Spark's checkpoint of an earlier run is dropped: tables say themselves where they are")
        if kind is fs.FileType.Directory:
            filesystem.delete_dir(place)
        else:
            filesystem.delete_file(place)
