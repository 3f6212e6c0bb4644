"""Merge on read: commits that mark rows as deleted with deletion vectors, and add files with the new rows."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from deltalake import CommitProperties, DeltaTable
from pyroaring import BitMap64

from airflow_provider_pgrepl.replication.delta.log import added_action, metadata_action
from airflow_provider_pgrepl.replication.lake.delta.commit import (
    VersionTakenError,
    bounded,
    check_version,
    commit_actions,
    fenced,
    narrow_bounds,
    removed,
)
from airflow_provider_pgrepl.replication.lake.delta.deletion_vector import VectorRecord, encode, vector_path
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import WrittenFile
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.storage import Output, durable, open_storage, storage_errors

from .row_search import FileRows

log = logging.getLogger(__name__)

FEATURE = "deletionVectors"
_ENABLED = "delta.enableDeletionVectors"
_READER, _WRITER = 3, 7


def has_vectors(table: DeltaTable) -> bool:
    """Return True if files of the table may have deletion vectors, as its protocol and a property declare."""
    is_enabled = FEATURE in (table.protocol().reader_features or [])
    return is_enabled and table.metadata().configuration.get(_ENABLED) == "true"


def _allow_vectors(table: DeltaTable) -> list[dict[str, Any]]:
    """Return the actions that declare deletion vectors in the table's protocol.

    From this commit on, readers without support for deletion vectors reject the table instead of returning
    deleted rows.
    """
    held = table.protocol()
    log.info(
        "%s has deletion vectors from version %d on: its readers must know Delta's reader version %d with %s",
        table.table_uri, table.version() + 1, _READER, FEATURE,
    )  # fmt: skip
    protocol = {
        "minReaderVersion": _READER,
        "minWriterVersion": _WRITER,
        "readerFeatures": sorted({FEATURE, *(held.reader_features or [])}),
        "writerFeatures": sorted({FEATURE, *(held.writer_features or [])}),
    }
    return [{"protocol": protocol}, metadata_action(table, {_ENABLED: "true"})]


def without_vectors(table: DeltaTable) -> list[dict[str, Any]]:
    """Return the actions that remove deletion vectors from the table's protocol.

    The same commit must leave no file with a vector. Readers then need no support for deletion vectors.
    """
    held = table.protocol()
    log.info("%s has no deletion vectors from version %d on", table.table_uri, table.version() + 1)
    readers = [name for name in held.reader_features or [] if name != FEATURE]
    writers = [name for name in held.writer_features or [] if name != FEATURE]
    features: dict[str, Any] = {"minReaderVersion": 1, "minWriterVersion": 2}
    if readers:
        features = {
            "minReaderVersion": _READER,
            "minWriterVersion": _WRITER,
            "readerFeatures": readers,
            "writerFeatures": writers,
        }
    return [{"protocol": features}, metadata_action(table, {_ENABLED: "false"})]


def replace_rows(
    table: DeltaTable,
    app: str,
    position: LSN,
    rows: FileRows,
    gone: Mapping[int, BitMap64],
    files: Sequence[WrittenFile],
    properties: CommitProperties,
) -> None:
    """Mark rows as deleted, add files, and set the position, in one commit.

    `gone`: by number of the file in `rows`, the numbers of the rows to mark. Raises what `fenced` does.
    Raises VersionTakenError if another process has committed since `rows` was read, as rows may have moved.
    """

    def mark() -> Iterator[dict[str, Any]]:
        marked = _marked(rows, gone)
        records = _write(rows.uri, {path: vector for path, vector in marked.items() if vector is not None})
        if records and not has_vectors(table):
            yield from _allow_vectors(table)
        yield from _replacing(rows, gone, records)

    _replace(table, app, position, rows, mark(), files, properties)


def rewrite_files(
    table: DeltaTable,
    app: str,
    position: LSN,
    rows: FileRows,
    gone: Iterable[int],
    files: Sequence[WrittenFile],
    properties: CommitProperties,
) -> None:
    """Replace the files with the numbers `gone` by `files`, and set the position, in one commit.

    `files` must have the remaining rows of the replaced files, and the new rows. Raises what `replace_rows`
    does.
    """
    leaving = (removed(rows.files[number]) for number in gone)
    _replace(table, app, position, rows, leaving, files, properties)


def _replace(
    table: DeltaTable,
    app: str,
    position: LSN,
    rows: FileRows,
    replacing: Iterable[dict[str, Any]],
    files: Sequence[WrittenFile],
    properties: CommitProperties,
) -> None:
    """Commit the actions of `replacing`, add `files`, and set the position.

    `replacing` is read only after the check that no other process has committed.
    """
    if rows.version != int(table.version()):
        raise VersionTakenError
    narrow_bounds(table, app, bounded(files, rows.schema))
    check_version(table, rows.version)
    actions = [*replacing, *(added_action(file.add_action()) for file in files)]
    commit = partial(commit_actions, table, "MERGE", properties, actions)
    fenced(table, app, position, commit, passing=(VersionTakenError,))


def _marked(rows: FileRows, gone: Mapping[int, BitMap64]) -> dict[str, BitMap64 | None]:
    """Return, by path of each file that loses rows, all of its deleted rows; None if no row remains."""
    marked: dict[str, BitMap64 | None] = {}
    for number, some in gone.items():
        vector = rows.gone(number) | some
        is_all = len(vector) == rows.count(number)
        marked[rows.files[number].path] = None if is_all else vector
    return marked


def _write(uri: str, vectors: Mapping[str, BitMap64]) -> dict[str, VectorRecord]:
    if not vectors:
        return {}
    name = uuid.uuid4()
    content, records = encode(vectors, name)
    filesystem, root = open_storage(uri)
    with storage_errors(uri):
        with Output(filesystem, f"{root}/{vector_path(name)}", len(content)) as file:
            file.stream.write(content)
        durable.flush_files(uri, [vector_path(name)])
    return records


def _replacing(
    rows: FileRows, gone: Iterable[int], records: Mapping[str, VectorRecord]
) -> Iterator[dict[str, Any]]:
    """Yield, for each file that loses rows, its `remove` and, if rows remain, its `add` with a new vector."""
    for number in gone:
        file = rows.files[number]
        yield removed(file)
        if file.path in records:
            # The bounds of the remaining rows may be narrower.
            statistics = {**file.statistics, "numRecords": rows.count(number), "tightBounds": False}
            stats = json.dumps(statistics, separators=(",", ":"))
            vector = records[file.path].to_action()
            again = {key: value for key, value in file.action.items() if value is not None}
            yield {"add": {**again, "dataChange": True, "stats": stats, "deletionVector": vector}}
