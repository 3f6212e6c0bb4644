"""The filter that drops transactions that the server sends again, after checking that they are the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import RewoundError, prove_source
from airflow_provider_pgrepl.replication.changelog.layout import CHANGES, ROW_SCHEMA, STATUS_ORDINAL, letters
from airflow_provider_pgrepl.replication.changelog.reader import live_files, open_changelog, read_floor_lsn
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.pgoutput.columns import TransactionEnd
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.storage import open_storage, read_parquet

_NOWHERE = LSN(0)
_COLUMNS = ["epoch", "commit_lsn", "ordinal", "xid", "commit_ts", "op"]


class RedeliveryFilter:
    """A filter for transactions above the slot's confirmed LSN that the changelog holds, or held.

    Retention may have deleted transactions up to `floor_lsn`: those are dropped without a comparison.

    Transactions in `optional` have only messages. They may be missing when the server sends again: the
    settings decide which messages the server sends and which become rows.

    The server sends a Relation message once per connection. If it was in a dropped transaction, its row is
    kept and placed before the first new rows, which need it.
    """

    def __init__(
        self,
        durable_lsn: LSN,
        known: dict[int, tuple[int, int]],
        floor_lsn: LSN = _NOWHERE,
        *,
        optional: frozenset[int] = frozenset(),
        is_passed: bool = False,
    ) -> None:
        self.is_passed = is_passed
        """True once every transaction that is sent again has been checked.

        Until then the durable LSN must not be confirmed to the slot. Otherwise the server would not send
        these transactions after the next start, and a source restored to an earlier state would go unnoticed.
        """
        self._durable_lsn = durable_lsn
        self._known = known
        self._floor_lsn = floor_lsn
        self._optional = optional
        self._awaited = deque(sorted(known))
        self._last_lsn = 0
        self._last_dropped = 0
        self._relations: dict[int, dict[str, Any]] = {}
        self._over = False

    @classmethod
    def load(cls, uri: str, writer: ChangelogWriter, confirmed_lsn: LSN) -> RedeliveryFilter:
        """Read the commit LSN, xid and commit time of the transactions that the server may send again."""
        if confirmed_lsn >= writer.durable_lsn:
            return cls(writer.durable_lsn, {}, is_passed=True)
        filesystem, root = open_storage(uri)
        changelog = open_changelog(uri)
        above = LSN(max(0, confirmed_lsn - 1))
        pieces = [
            read_parquet(filesystem, f"{root}/{file.path}", _COLUMNS)
            for file in live_files(changelog, writer.epoch, above)
        ]
        known: dict[int, tuple[int, int]] = {}
        with_rows: set[int] = set()
        for piece in pieces:
            of_source = pc.greater(piece["ordinal"], STATUS_ORDINAL)
            is_above = pc.and_(pc.equal(piece["epoch"], writer.epoch), pc.greater(piece["commit_lsn"], above))
            wanted = (
                piece.filter(pc.and_(is_above, of_source))
                .group_by(["commit_lsn", "xid", "commit_ts"])
                .aggregate([])
            )
            times = wanted["commit_ts"].cast(pa.int64()).to_pylist()
            for lsn, xid, us in zip(
                wanted["commit_lsn"].to_pylist(), wanted["xid"].to_pylist(), times, strict=True
            ):
                known[lsn] = (xid or 0, us or 0)
            with_rows |= set(_of_rows(piece).unique().to_pylist())
        floor = read_floor_lsn(changelog, writer.epoch)
        return cls(writer.durable_lsn, known, floor, optional=frozenset(known.keys() - with_rows))

    def drop(self, rows: pa.Table, ended: Sequence[TransactionEnd]) -> pa.Table:
        """Return the new rows. Raises RewoundError if a transaction sent again differs from the changelog's.

        A transaction is durable exactly if its commit LSN is before the durable LSN, because the durable LSN
        is always the end of a WAL record.
        """
        if self._over or not rows.num_rows:
            self._check(ended, frozenset([self._last_dropped]))
            return rows
        lsns = rows["commit_lsn"].to_numpy()
        new_from = int(np.searchsorted(lsns, self._durable_lsn, side="left"))
        again = rows.slice(0, new_from)
        own = _of_rows(again)
        self._check(ended, frozenset([*own.to_pylist(), self._last_dropped]))
        if new_from:
            self._last_dropped = own[-1].as_py() if len(own) else self._last_dropped
            self._remember_relations(again)
        if new_from == rows.num_rows:
            return rows.slice(new_from)
        self._over = True
        return self._announce(rows.slice(new_from))

    def pass_idle(self, lsn: LSN) -> None:
        """Note that every transaction that committed before `lsn` was received. Raises RewoundError.

        The error means that a transaction in the changelog was not sent again.
        """
        while self._awaited and self._awaited[0] < lsn and self._awaited[0] in self._optional:
            self._awaited.popleft()
        if self._awaited and self._awaited[0] < lsn:
            raise _rewound(self._awaited[0], "is in the changelog, but the source has it no more")
        self.is_passed = self.is_passed or lsn >= self._durable_lsn

    def _check(self, ended: Sequence[TransactionEnd], with_rows: frozenset[int]) -> None:
        for transaction in ended:
            lsn = transaction.commit_lsn
            if lsn < self._last_lsn:
                raise _rewound(lsn, "came out of order")
            self._last_lsn = lsn
            self.pass_idle(LSN(lsn))
            if lsn >= self._durable_lsn:
                continue
            known = self._known.get(lsn)
            if known is None and lsn > self._floor_lsn and lsn in with_rows:
                raise _rewound(lsn, "is not in the changelog, which holds later ones")
            if known is not None:
                self._awaited.popleft()
                if transaction.xid and known != (transaction.xid, transaction.commit_us):
                    raise _rewound(lsn, "is not the one that the changelog holds there")

    def _remember_relations(self, dropped: pa.Table) -> None:
        for row in dropped.filter(pc.equal(dropped["op"], "R")).to_pylist():
            self._relations[row["relation_id"]] = row

    def _announce(self, rows: pa.Table) -> pa.Table:
        """Return the rows after the kept Relation rows, which become part of the first row's transaction."""
        first = rows.slice(0, 1).select(["commit_lsn", "xid", "commit_ts"]).to_pylist()[0]
        relations = [{**row, **first, "ordinal": -1} for row in self._relations.values()]
        self._relations = {}
        return pa.concat_tables([pa.Table.from_pylist(relations, schema=ROW_SCHEMA), rows])


def _of_rows(rows: pa.Table) -> pa.ChunkedArray:
    """Return the commit LSNs of the rows that change tables."""
    return rows.filter(pc.is_in(rows["op"], letters(CHANGES)))["commit_lsn"]


def _rewound(lsn: int, what: str) -> RewoundError:
    return RewoundError(
        f"the source was restored to an earlier state, or replaced: the transaction at {LSN(lsn)} {what}",
        prove_source(),
    )
