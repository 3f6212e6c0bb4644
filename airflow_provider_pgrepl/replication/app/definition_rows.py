"""Of the changelog's rows those by which a table's definitions can be followed: no values, few of many."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from airflow_provider_pgrepl.errors import ChangelogFileGoneError
from airflow_provider_pgrepl.replication.changelog.layout import letters
from airflow_provider_pgrepl.replication.changelog.reader import ChangelogFile, value_bytes
from airflow_provider_pgrepl.replication.storage import open_file, open_parquet, open_storage

COLUMNS = ("relation_id", "op", "commit_lsn", "ordinal", "relation_version", "xid")
_SAYING = "RT"
_ORDER = [("relation_id", "ascending"), ("commit_lsn", "ascending"), ("ordinal", "ascending")]


def definition_rows(uri: str, files: Iterable[ChangelogFile]) -> pa.Table:
    """Rows of files of the changelog, by relation and place: each definition and TRUNCATE, and of a table's
    other changes the first of each transaction, and after each of these. Raises ChangelogFileGoneError."""
    filesystem, root = open_storage(uri)
    pieces = [piece for file in files for piece in _read(filesystem, f"{root}/{file.path}")]
    if not pieces:
        return pa.table({name: [] for name in COLUMNS})
    return pa.concat_tables(pieces).sort_by(_ORDER)


def _read(filesystem: pafs.FileSystem, path: str) -> Iterable[pa.Table]:
    try:
        source = open_file(filesystem, path, value_bytes(path))
    except FileNotFoundError:
        raise ChangelogFileGoneError(
            "a changelog file is gone", "run it again: an hour may just have been joined or dropped"
        ) from None
    with source, open_parquet(filesystem, source) as file:
        return [_reduced(group) for group in _groups(file)]


def _groups(file: pq.ParquetFile) -> Iterable[pa.Table]:
    for group in range(file.metadata.num_row_groups):
        yield file.read_row_group(group, columns=list(COLUMNS), use_threads=False)


def _reduced(rows: pa.Table) -> pa.Table:
    rows = rows.sort_by(_ORDER)
    said = pc.is_in(rows["op"], value_set=letters(_SAYING)).to_numpy()
    first = np.zeros(rows.num_rows, dtype=bool)
    for name in ("relation_id", "commit_lsn", "relation_version"):
        values = rows[name].to_numpy()
        first[1:] |= values[1:] != values[:-1]
    first[:1] = True
    first[1:] |= said[:-1]
    return rows.filter(pa.array(first | said))
