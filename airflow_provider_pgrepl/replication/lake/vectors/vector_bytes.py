"""What the deletion vectors of a file have cost: each commit that marks rows in it writes its vector whole.

The log has no count of that, but its newest commit says how many rows it marked. As if all before had marked
as many, vectors of half the present one's size were written, each time that many rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from airflow_provider_pgrepl.replication.lake.delta.deletion_vector import VectorRecord
from airflow_provider_pgrepl.replication.lake.delta.live_files import LiveFile
from airflow_provider_pgrepl.replication.storage import open_storage, read_commit_actions


def bytes_written(file: LiveFile, marked: int) -> int:
    """For the vectors that a file has had, if the newest commit has marked so many of its rows."""
    vector = file.vector
    return 0 if vector is None or marked <= 0 else vector.size * vector.rows // (2 * marked)


def rows_marked(uri: str, version: int) -> dict[str, int]:
    """How many rows a commit marked, by the path of each file that has a vector by it. Empty when the commit
    is not there any more. Raises OSError, ValueError."""
    filesystem, root = open_storage(uri)
    try:
        return marked_by(read_commit_actions(filesystem, root, version))
    except FileNotFoundError:
        return {}


def marked_by(actions: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The same of a commit's actions."""
    had, has = dict[str, int](), dict[str, int]()
    for action in actions:
        for kind, rows in (("remove", had), ("add", has)):
            if kind in action:
                vector = VectorRecord.of_action(action[kind].get("deletionVector"))
                rows[unquote(action[kind]["path"])] = 0 if vector is None else vector.rows
    return {path: rows - had[path] for path, rows in has.items() if path in had}
