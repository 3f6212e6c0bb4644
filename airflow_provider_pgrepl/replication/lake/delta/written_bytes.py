"""What commits of a Delta table have written: data files, deletion vectors, and the log's own entries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from airflow_provider_pgrepl.replication.lake.delta.live_files import LiveFile
from airflow_provider_pgrepl.replication.storage import read_commit, storage_errors


def written_bytes(uri: str, after: int, upto: int) -> int:
    """Bytes, by the versions after one and up to another. Raises LakeUnavailableError."""
    total = 0
    with storage_errors(uri):
        for version in range(after + 1, upto + 1):
            content = read_commit(uri, version) or b""
            total += len(content) + _bytes_of(json.loads(line) for line in content.splitlines() if line)
    return total


def _bytes_of(actions: Iterable[Mapping[str, Any]]) -> int:
    actions = list(actions)
    before = {action["remove"]["path"] for action in actions if "remove" in action}
    added = [LiveFile(action["add"]) for action in actions if "add" in action]
    # A file that gets another vector is named again, and is the same.
    data = sum(file.size for file in added if file.action["path"] not in before)
    ends: dict[str, int] = {}
    for file in added:
        if file.vector is not None and file.action["path"] in before and (path := file.vector.path):
            ends[path] = max(ends.get(path, 0), file.vector.end)
    return data + sum(ends.values())
