"""What a changelog holds right before some of its rows."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.changelog.reader import ChangelogFile, live_files, open_changelog
from airflow_provider_pgrepl.replication.events.changelog_rows import ordered_rows
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch


def rows_before(uri: str, rows: pa.Table, value_bytes: int) -> Iterator[pa.Table]:
    """All that came before some rows, about so many bytes of values back, in order.

    Raises ChangelogError when old hours are dropped meanwhile, LakeUnavailableError.
    """
    first = rows.slice(0, 1).select(["epoch", "commit_lsn", "ordinal"]).to_pylist()[0]
    epoch, lsn = Epoch(first["epoch"]), LSN(first["commit_lsn"])
    files = [file for file in live_files(open_changelog(uri), epoch, LSN(0)) if file.min_lsn <= lsn]
    begin, some = _last_of(files, value_bytes)
    for stretch in ordered_rows(uri, some, EventPosition.after_transaction(epoch, begin)):
        found = stretch.rows
        at_it = pc.and_(pc.equal(found["commit_lsn"], lsn), pc.less(found["ordinal"], first["ordinal"]))
        before = found.filter(pc.or_(pc.less(found["commit_lsn"], lsn), at_it))
        if before.num_rows == 0:
            return
        yield before


def _last_of(files: list[ChangelogFile], value_bytes: int) -> tuple[LSN, list[ChangelogFile]]:
    """The last files that have so many bytes, and the LSN after which they have everything."""
    found, left = [], sorted(files, key=lambda file: file.max_lsn)
    while left and value_bytes > 0:
        file = left.pop()
        value_bytes -= file.value_bytes
        found.append(file)
    return (left[-1].max_lsn if left else LSN(0)), found
