"""The changelog's rows again, cut between transactions alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.events.changelog_rows import Stretch
from airflow_provider_pgrepl.replication.postgres.lsn import LSN


class TooManyChangesError(Exception):
    """Of one transaction, that committed at `commit_lsn`."""

    def __init__(self, commit_lsn: LSN) -> None:
        super().__init__(str(commit_lsn))
        self.commit_lsn = commit_lsn


def whole_transactions(
    stretches: Iterator[Stretch], needed: Callable[[pa.Table], pa.Table], most: int
) -> Iterator[Stretch]:
    """Of the rows those that are `needed`.

    Raises TooManyChangesError for a transaction that has more than `most` of them, once all before it are
    given.
    """
    held: list[pa.Table] = []
    for rows, ends_transaction in stretches:
        found = pa.concat_tables([*held, needed(rows)])
        held = []
        if not ends_transaction:
            last = rows["commit_lsn"][-1]
            held = [found.filter(pc.equal(found["commit_lsn"], last))]
            found = found.filter(pc.not_equal(found["commit_lsn"], last))
        yield from _within(found, most)
        if held and held[0].num_rows > most:
            raise TooManyChangesError(LSN(last.as_py()))


def _within(rows: pa.Table, most: int) -> Iterator[Stretch]:
    """Whole transactions, up to the first that is too large."""
    if rows.num_rows > most:
        counts = pc.value_counts(rows["commit_lsn"])
        large = [one["values"] for one in counts.to_pylist() if one["counts"] > most]
        if large:
            first = min(large)
            yield Stretch(rows.filter(pc.less(rows["commit_lsn"], first)), True)
            raise TooManyChangesError(LSN(first))
    yield Stretch(rows, True)
