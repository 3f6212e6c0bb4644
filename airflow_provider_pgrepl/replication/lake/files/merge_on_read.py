"""Merge on read: a commit that marks rows as gone where they are, and adds a file of the rows that come."""

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
    check_version,
    commit_actions,
    removed,
)
from airflow_provider_pgrepl.replication.lake.delta.deletion_vector import VectorRecord, encode, vector_path
from airflow_provider_pgrepl.replication.lake.delta.fenced_commit import bounded, fenced, narrow_bounds
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import WrittenFile
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.storage import Output, durable, open_storage, storage_errors

log = logging.getLogger(__name__)

FEATURE = "deletionVectors"
_ENABLED = "delta.enableDeletionVectors"
_READER, _WRITER = 3, 7


def has_vectors(table: DeltaTable) -> bool:
    """Whether files of the table may get deletion vectors: its protocol tells all readers of them."""
    is_told = FEATURE in (table.protocol().reader_features or [])
    return is_told and table.metadata().configuration.get(_ENABLED) == "true"


def _allow_vectors(table: DeltaTable) -> list[dict[str, Any]]:
    """From this commit on readers that do not know deletion vectors refuse the table, instead of reading it
    wrongly."""
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
    """Actions of a commit after which no file of the table has a vector, and its readers need know none."""
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
    """Mark rows, by the numbers of files and of rows that `rows` has found in the table as it is; add the
    rows of files; and move the position.

    One commit. Raises what `fenced` does; VersionTakenError when somebody has committed since the rows were
    found, whose places may be others now.
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
    """Put files in place of those of these numbers, which hold the rows that stay of them as well as others,
    and move the position. One commit; raises what `replace_rows` does."""
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
    """Commit what becomes of the files that `rows` knows, and others that come. `replacing` is read only
    once nobody was faster."""
    if rows.version != int(table.version()):
        raise VersionTakenError
    narrow_bounds(table, app, bounded(files, rows.schema))
    check_version(table, rows.version)
    actions = [*replacing, *(added_action(file.add_action()) for file in files)]
    commit = partial(commit_actions, table, "MERGE", properties, actions)
    fenced(table, app, position, commit, passing=(VersionTakenError,))


def _marked(rows: FileRows, gone: Mapping[int, BitMap64]) -> dict[str, BitMap64 | None]:
    """By the path of each file that loses rows: those it has lost then; None when no row is left."""
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
    """Each file that loses rows is removed and, unless it has lost all, added with its new vector."""
    for number in gone:
        file = rows.files[number]
        yield removed(file)
        if file.path in records:
            # The bounds of what is left may be narrower.
            told = {**file.statistics, "numRecords": rows.count(number), "tightBounds": False}
            stats = json.dumps(told, separators=(",", ":"))
            vector = records[file.path].to_action()
            again = {key: value for key, value in file.action.items() if value is not None}
            yield {"add": {**again, "dataChange": True, "stats": stats, "deletionVector": vector}}
