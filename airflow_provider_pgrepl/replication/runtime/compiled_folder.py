"""Where compiled loops are kept: beside the package when that may be written, else with the user."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "NUMBA_CACHE_DIR"
"""Names another folder; numba's own variable."""

BESIDE = Path(__file__).parent / "__pycache__" / "compiled"
_NAME = "airflow_provider_pgrepl"


@cache
def folder() -> Path:
    """The folder of this process; it exists and may be written.

    What an image or an administrator compiled beside a package that may not be written is copied from there:
    numba keeps to folders that it can write. Machine code is loaded from it: no other user may write there.
    """
    given = os.environ.get(FOLDER_VARIABLE, "").strip()
    if given:
        return _made(Path(given))
    if _is_writable(BESIDE):
        return BESIDE
    own = _user_cache()
    if own is not None and _is_private(own):
        if BESIDE.is_dir():
            shutil.copytree(BESIDE, own, dirs_exist_ok=True, copy_function=_copy_newer)
        return own
    passing = Path(tempfile.mkdtemp(prefix=f"{_NAME}-"))
    log.warning(
        "no folder can keep what is compiled: each start compiles again. Set %s to one", FOLDER_VARIABLE
    )
    # For the processes that this one starts.
    os.environ[FOLDER_VARIABLE] = str(passing)
    return passing


def _made(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    return place


def _user_cache() -> Path | None:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _NAME
    except RuntimeError:  # no home
        return None


def _is_writable(place: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=_made(place)):
            return True
    except OSError:
        return False


def _is_private(place: Path) -> bool:
    """Made for, and only written by, the user that we are."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.lstat()
    except OSError:
        return False
    is_ours = found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode)
    return is_ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and _is_writable(place)


def _copy_newer(source: str, target: str) -> str:
    if not Path(target).exists() or Path(target).stat().st_mtime < Path(source).stat().st_mtime:
        shutil.copy2(source, target)
    return target
