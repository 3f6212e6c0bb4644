"""Absence of a lake: a disk that is not mounted looks like a folder in which there is nothing."""

from __future__ import annotations

import os
from pathlib import Path

from airflow_provider_pgrepl.replication.storage.durable import local_path


def doubt_of_absence(uri: str) -> str:
    """Return why a folder in which no Delta table was found may have one all the same, or "".

    An object store that finds no table has answered.
    """
    folder = local_path(uri)
    if folder is None:
        return ""
    try:
        if _exists(folder):
            return f"{folder} exists, and no table in it can be opened"
        while not _exists(folder):
            folder = folder.parent
        is_empty = next(folder.iterdir(), None) is None
    except OSError as error:
        return f"{folder} cannot be looked at: {os.strerror(error.errno or 0)}"
    return f"{folder} is empty, as the folder of a disk that is not mounted" if is_empty else ""


def is_there(uri: str) -> bool:
    """Return True if a folder of this host exists, or may: its parents cannot be looked at. An object store
    that finds no table has no folder."""
    folder = local_path(uri)
    try:
        return folder is not None and _exists(folder)
    except OSError:
        return True


def _exists(path: Path) -> bool:
    """Unlike Path.exists(), which takes a missing permission for a missing file. Raises OSError."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
