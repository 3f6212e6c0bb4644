"""UntouchedRows: what can be read as of a moment before some changes, since none of them came before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pyarrow as pa

from airflow_provider_pgrepl.replication.events.filled_rows import Key
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch

_MOST = 1_000_000
"""Rows that are known to have changed."""


class RowChange(NamedTuple):
    """`key` and `old`: of the row after and before, as far as they were sent. `unsent`: places of values that
    an update left alone. Also a TRUNCATE, or a definition, of the table."""

    op: str
    key: Key | None
    old: Key | None
    unsent: Sequence[int]

    @property
    def before(self) -> Key | None:
        """The key of the row that it changes."""
        return self.old or self.key


class UntouchedRows:
    """`since`: the epoch and LSN of the moment; None: there is none of which enough is known. Where a
    transaction is given in parts, it is before all of them."""

    def __init__(self) -> None:
        self.since: tuple[Epoch, LSN] | None = None
        self._last: tuple[int, int] | None = None
        self._rows: set[int] = set()
        self._tables: set[int] = set()

    def forget(self) -> None:
        """What comes next need not come right after what came."""
        self.since = self._last = None

    def begin(self, rows: pa.Table) -> bool:
        """With these rows, in order; whether they begin with another transaction than those before ended
        with."""
        places = rows.select(["epoch", "commit_lsn", "ordinal"])
        (epoch, lsn, ordinal), (_, last, _) = (
            place.values() for n in (0, rows.num_rows - 1) for place in places.slice(n, 1).to_pylist()
        )
        before, self._last = self._last, (epoch, last)
        if before == (epoch, lsn):
            return False
        self._rows.clear()
        self._tables.clear()
        is_whole = before is not None or ordinal <= 0
        self.since = (Epoch(epoch), LSN(max(0, lsn - 1))) if is_whole else None
        return is_whole

    def first_changes(self, oid: int, changes: Iterable[RowChange]) -> dict[Key, Sequence[int]]:
        """By the keys of rows that no change before has concerned, which values their first one left out."""
        found: dict[Key, Sequence[int]] = {}
        for change in changes:
            if change.op in "TR":
                self._tables.add(oid)
            elif (before := change.before) is not None:
                # Who shares a hash with another row is taken for touched.
                row = hash((oid, before))
                if change.unsent and row not in self._rows and oid not in self._tables:
                    found[before] = change.unsent
                self._rows |= {row, hash((oid, change.key))}
        if len(self._rows) > _MOST:
            self.since = None
            self._rows.clear()
        return found if self.since is not None else {}
