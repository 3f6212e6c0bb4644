"""Checkpoints in a Delta table's log: single-file, multi-part and V2 checkpoints.

A V2 checkpoint has a random name and may be JSON. Its actions are in sidecars, which are files in a folder of
the log, or in the checkpoint itself.
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
    """The writer of checkpoints of a table, one for every `every` versions, in a thread.

    A reader that opens the table reads all commits since the last checkpoint.
    """

    def __init__(self, uri: str, every: int) -> None:
        self._uri, self._every = uri, every
        self._writing: threading.Thread | None = None

    def after(self, before: int, version: int) -> None:
        """Start a checkpoint of a flushed version if `before` and `version` are on different sides of a
        multiple of `every`. Does nothing while the previous checkpoint is being written."""
        if version // self._every == before // self._every:
            return
        if self._writing is None or not self._writing.is_alive():
            # Not a daemon thread, so that the process waits for it at exit: deltalake in a running daemon
            # thread would crash the process.
            self._writing = threading.Thread(target=self._write, args=(version,), name="pgrepl-checkpoint")
            self._writing.start()

    def _write(self, version: int) -> None:
        """Write a checkpoint of exactly this version: a newer one may not be on disk, and be set aside."""
        with _warn_of_failed_checkpoint(self._uri):
            write_checkpoint(open_delta(self._uri, version))


def write_checkpoint(table: DeltaTable) -> None:
    """Write a checkpoint of the handle's version, which must be on disk, and flush it.

    Errors are only logged: the commits are valid without a checkpoint.
    """
    with _warn_of_failed_checkpoint(table.table_uri):
        table.create_checkpoint()
        durable.flush_checkpoint(table.table_uri, table.version())


@contextmanager
def _warn_of_failed_checkpoint(uri: str) -> Iterator[None]:
    try:
        yield
    except (DeltaError, OSError) as error:
        log.warning("%s: no checkpoint could be written: %s", uri, type(error).__name__)


def checkpoint_version(name: str) -> int | None:
    """Return the version of the checkpoint to which a log file of this name belongs; None for other files."""
    match = _match(name)
    return int(match[1]) if match else None


def _match(name: str) -> re.Match[str] | None:
    return _CHECKPOINT.fullmatch(name) or _JSON_CHECKPOINT.fullmatch(name)


def whole_checkpoints(entries: Iterable[fs.FileInfo]) -> list[tuple[int, list[str]]]:
    """Return the checkpoints whose parts are all among a log's files, and not empty.

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
    """Yield the actions of these kinds, each under its kind, from the checkpoint files `names`.

    `root`: the table's path in its filesystem. Raises FileNotFoundError, OSError, and ValueError or
    ArrowException for an incomplete checkpoint.
    """
    for name in names:
        for action in _actions(filesystem, f"{log_path(root)}/{name}", (*kinds, _SIDECAR)):
            if _SIDECAR in action:
                yield from _actions(filesystem, _sidecar_path(root, action), kinds)
            else:
                yield action


def sidecars(filesystem: fs.FileSystem, root: str, name: str) -> list[str]:
    """Return the paths of the sidecars that a checkpoint file names. Raises as `read_checkpoint`."""
    named = _actions(filesystem, f"{log_path(root)}/{name}", (_SIDECAR,))
    return [_sidecar_path(root, action) for action in named if action]


def _sidecar_path(root: str, action: dict[str, Any]) -> str:
    """Return a sidecar's path. All sidecars are in one folder; only the name in the action is used."""
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
