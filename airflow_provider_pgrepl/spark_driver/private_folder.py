"""Folders that are ours alone: only what lies in them is believed, signalled by, or deleted."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from airflow_provider_pgrepl.errors import ConfigError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(path: Path) -> Path:
    """A folder, made where it is not there, which nobody but this user can enter.

    Raises ConfigError for one that cannot be made, is a link, is somebody else's, or was open to others'
    writing: what lies in it then may be anybody's.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        raise _refused(path, f"cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(facts.st_mode):
        raise _refused(path, "is a link, not a folder")
    if facts.st_uid != os.geteuid():
        raise _refused(
            path, f"belongs to user {facts.st_uid}, not to user {os.geteuid()}, who runs this task"
        )
    if facts.st_mode & _OTHERS_WRITE:
        raise _refused(path, "can be written in by other users")
    if stat.S_IMODE(facts.st_mode) != 0o700:
        path.chmod(0o700)
    return path


def is_private_folder(path: Path) -> bool:
    """Whether there is such a folder."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) == 0o700
    )


def remove_private_folder(path: Path) -> None:
    """Delete it with all that is in it, if it is one; links in it are not followed."""
    if is_private_folder(path):
        shutil.rmtree(path, ignore_errors=True)


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the run folder {path} {why}",
        "name a folder that belongs to the user of Airflow's workers alone in Airflow's configuration:"
        " [pgrepl] run_folder, or AIRFLOW__PGREPL__RUN_FOLDER",
    )
