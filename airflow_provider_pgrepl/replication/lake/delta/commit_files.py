"""The files of a Delta log's commits: which one stands for a version, and those that hold nothing.

A folder that is put back, and a power cut, take commits away that this product has seen. Delta does not mind:
the newest file that is there is the newest version, and a file without content is a commit without actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.delta.checkpoint_files import whole_checkpoints
from airflow_provider_pgrepl.replication.delta.recovery import find_torn
from airflow_provider_pgrepl.replication.lake.delta.ownership import Owner, read_ownership
from airflow_provider_pgrepl.replication.storage import (
    commit_mark,
    commit_version,
    log_path,
    open_storage,
    storage_errors,
)
from airflow_provider_pgrepl.replication.storage.durable import local_path

COMMIT_METADATA = "pgrepl"
"""Key of our JSON in a commit's metadata: `{"kind", "position", "commit_ts"}`."""


def commit_fingerprint(uri: str, version: int) -> str:
    """What tells the commit of a version from another in its place; empty when there is none."""
    with storage_errors(uri):
        return commit_mark(uri, version)


def settle_log(uri: str, pipeline_name: str, told: int | None = None) -> None:
    """Have a lake table go back to before the first commit that is not whole, or holds nothing.

    For who writes the table while nobody else does. Its position says where it is then; what it lacks is in
    the changelog. `told` as in `find_torn`. Raises LakeTableError where no commit can be set aside, and for a
    table that another program has written: nothing in it is renamed.
    """
    torn, commits = find_torn(uri, told=told), dict(_commits_to_read(uri))
    first = min((version for version, size in commits.items() if not size), default=None)
    if first is not None and local_path(uri) is None:
        raise LakeTableError(f"{uri}: the file of its commit {first} is empty")
    if first is not None:
        rest = {version for version in commits if version >= first}
        torn = replace(torn, commits=tuple(sorted(rest | set(torn.commits))))
    if not torn:
        return
    found = read_ownership(uri, pipeline_name)
    if found.owner not in (Owner.PIPELINE, Owner.NOBODY):
        raise LakeTableError(
            f"{uri}: its log is damaged, and stays as it is, for this pipeline has not written the table:"
            f" {found.reason}",
            "move that folder away, or give the pipeline a lake root of its own",
        )
    torn.set_aside()


def _commits_to_read(uri: str) -> Iterator[tuple[int, int]]:
    """Versions and sizes of the commits after the last checkpoint: what was before is in that."""
    filesystem, root = open_storage(uri)
    with storage_errors(uri):
        infos = filesystem.get_file_info(fs.FileSelector(log_path(root), allow_not_found=True))
    last = next((version for version, _ in whole_checkpoints(infos)), -1)
    for info in infos:
        version = commit_version(info.base_name)
        if version is not None and version > last:
            yield version, info.size or 0
