"""Checkpoints in a Delta table's log: their names, and what they say. Of one file, of parts, and V2 ones.

A V2 checkpoint has a random name and may be JSON. Its files are listed in sidecars, files of a folder of the
log, or in itself.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyarrow import fs

from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.storage import durable
from airflow_provider_pgrepl.replication.storage.filesystem import log_path, open_file, open_parquet

log = logging.getLogger(__name__)
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10})|\.[0-9a-fA-F-]{36}(?=\.))?\.parquet")
_JSON_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.[0-9a-fA-F-]{36}\.json()")
_SIDECARS, _SIDECAR = "_sidecars", "sidecar"
_ANY_SIZE = 2**63 - 1


class Checkpoints:
    """Of a table that this process commits to, one every so many versions. Who opens the table reads all
    commits since the last one."""

    def __init__(self, uri: str, every: int) -> None:
        self._uri, self._every = uri, every
        self._writing: threading.Thread | None = None

    def after(self, before: int, version: int) -> None:
        """Begin one of a version that is on the disk, when the table has come to it from an earlier one and
        it is time; unless the last is still being written."""
        if version // self._every == before // self._every:
            return
        if self._writing is None or not self._writing.is_alive():
            # Waited for when the process ends: deltalake at work in a daemon thread would crash it then.
            self._writing = threading.Thread(target=self._write, args=(version,), name="pgrepl-checkpoint")
            self._writing.start()

    def _write(self, version: int) -> None:
        """Of this very version: a newer one may not be on the disk, and be set aside."""
        with _told(self._uri):
            write_checkpoint(open_delta(self._uri, version))


def write_checkpoint(table: DeltaTable) -> None:
    """Of the version where the handle stands, which is on the disk. What is committed stays so without."""
    with _told(table.table_uri):
        table.create_checkpoint()
        durable.flush_checkpoint(table.table_uri, table.version())


@contextmanager
def _told(uri: str) -> Iterator[None]:
    try:
        yield
    except (DeltaError, OSError) as error:
        log.warning("%s: no checkpoint could be written: %s", uri, type(error).__name__)


def checkpoint_version(name: str) -> int | None:
    """Return the version of the checkpoint that a file of this name in a log is, or is a part of."""
    match = _match(name)
    return int(match[1]) if match else None


def _match(name: str) -> re.Match[str] | None:
    return _CHECKPOINT.fullmatch(name) or _JSON_CHECKPOINT.fullmatch(name)


def whole_checkpoints(entries: Iterable[fs.FileInfo]) -> list[tuple[int, list[str]]]:
    """Return the checkpoints among a log's files of which all parts are there and none is empty.

    Newest first: the version, and the names of the parts.
    """
    parts: dict[tuple[int, int], list[str]] = {}
    whole: dict[int, list[str]] = {}
    for info in entries:
        match = _match(info.base_name)
        if match is None or not info.size:
            continue
        version = int(match[1])
        if match[2]:
            parts.setdefault((version, int(match[2])), []).append(info.base_name)
        else:
            whole[version] = [info.base_name]
    whole |= {version: names for (version, count), names in sorted(parts.items()) if len(names) == count}
    return sorted(whole.items(), reverse=True)


def read_checkpoint(
    filesystem: fs.FileSystem, root: str, names: Sequence[str], kinds: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the actions of these kinds of a checkpoint whose files have these names, each under its kind.

    `root`: the table's path in its filesystem. Raises FileNotFoundError, OSError, ValueError and
    ArrowException for a checkpoint that is not whole.
    """
    for name in names:
        for action in _actions(filesystem, f"{log_path(root)}/{name}", (*kinds, _SIDECAR)):
            if _SIDECAR in action:
                yield from _actions(filesystem, _sidecar_path(root, action), kinds)
            else:
                yield action


def sidecars(filesystem: fs.FileSystem, root: str, name: str) -> list[str]:
    """The files that a checkpoint's file of this name has its actions in, besides its own. Raises what
    `read_checkpoint` does."""
    named = _actions(filesystem, f"{log_path(root)}/{name}", (_SIDECAR,))
    return [_sidecar_path(root, action) for action in named if action]


def _sidecar_path(root: str, action: dict[str, Any]) -> str:
    """All are in one folder, whatever else the action says."""
    return f"{log_path(root)}/{_SIDECARS}/{unquote(action[_SIDECAR]['path']).rpartition('/')[2]}"


def _actions(filesystem: fs.FileSystem, path: str, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    with open_file(filesystem, path, _ANY_SIZE) as source:
        if path.endswith(".json"):
            for line in source.read().splitlines():
                yield {kind: action for kind, action in json.loads(line).items() if kind in kinds}
            return
        with open_parquet(filesystem, source) as parquet:
            held = [kind for kind in kinds if kind in parquet.schema_arrow.names]
            rows = parquet.read(columns=held)
    for kind in held:
        yield from ({kind: action} for action in rows[kind].to_pylist() if action is not None)
