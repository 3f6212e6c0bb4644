"""The changelog's rows in the order in which they happened, read a file at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.reader import ChangelogFile, live_files
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.storage import open_storage, read_parquet

_ORDER = [("commit_lsn", "ascending"), ("ordinal", "ascending")]


def ordered_rows(changelog: DeltaTable, after: EventPosition) -> Iterator[pa.Table]:
    """What the open changelog holds after a position, of its epoch: tables of ROW_SCHEMA, in order.

    A file holds at most what the receiver's buffer held, sorted by relation. Files follow one another as the
    receiver wrote them; only those of one large transaction have equal bounds.
    Raises ChangelogError when a file is gone, or the order is not as it must be.
    """
    filesystem, root = open_storage(changelog.table_uri)
    files = live_files(changelog, after.epoch, LSN(max(0, after.commit_lsn - 1)))
    last: tuple[int, int] = (after.commit_lsn, after.ordinal)
    for file in _in_order(filesystem, root, files):
        rows = _after(_read(filesystem, root, file).sort_by(_ORDER), after)
        if rows.num_rows == 0:
            continue
        if _place(rows, 0) < last:
            raise ChangelogError(
                f"the changelog holds changes of {LSN(rows['commit_lsn'][0].as_py())} after later ones",
                "nothing was passed on out of order; please report it, with `pgrepl status`",
            )
        last = _place(rows, rows.num_rows - 1)
        yield rows


def _in_order(filesystem: pafs.FileSystem, root: str, files: list[ChangelogFile]) -> Iterator[ChangelogFile]:
    bounds = lambda file: (file.min_lsn, file.max_lsn)  # noqa: E731 - a sort key
    for _, group in groupby(sorted(files, key=bounds), key=bounds):
        equal = list(group)
        if len(equal) > 1:
            equal.sort(key=lambda file: _first_ordinal(filesystem, root, file))
        yield from equal


def _first_ordinal(filesystem: pafs.FileSystem, root: str, file: ChangelogFile) -> int:
    return int(pc.min(_read(filesystem, root, file, ["ordinal"])["ordinal"]).as_py())


def _read(
    filesystem: pafs.FileSystem, root: str, file: ChangelogFile, columns: list[str] | None = None
) -> pa.Table:
    try:
        return read_parquet(filesystem, f"{root}/{file.path}", columns or ROW_SCHEMA.names)
    except FileNotFoundError:
        raise ChangelogError("a changelog file is gone", "read again: old hours were just dropped") from None


def _after(rows: pa.Table, position: EventPosition) -> pa.Table:
    lsn, ordinal = int(position.commit_lsn), position.ordinal
    later = pc.greater(rows["commit_lsn"], lsn)
    rest = pc.and_(pc.equal(rows["commit_lsn"], lsn), pc.greater(rows["ordinal"], ordinal))
    return rows.filter(pc.or_(later, rest))


def _place(rows: pa.Table, index: int) -> tuple[int, int]:
    return rows["commit_lsn"][index].as_py(), rows["ordinal"][index].as_py()
