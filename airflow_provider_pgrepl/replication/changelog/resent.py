"""ResentCheck: transactions that the server sends again are dropped, after a look that they are the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from airflow_provider_pgrepl.errors import RewoundError
from airflow_provider_pgrepl.replication.changelog.reader import live_files, open_changelog
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.wire.columns import Ended

_COLUMNS = ["epoch", "commit_lsn", "xid", "commit_ts"]


class ResentCheck:
    """Knows which transactions above the slot's confirmed LSN the changelog holds already."""

    def __init__(self, durable_lsn: LSN, known: dict[int, tuple[int, int]]) -> None:
        self._durable_lsn = durable_lsn
        self._known = known
        self._last_lsn = 0
        self._last_dropped = 0
        self._over = False

    @classmethod
    def load(cls, uri: str, writer: ChangelogWriter, confirmed_lsn: LSN) -> ResentCheck:
        """Read (commit LSN, xid, time) of what may be sent again."""
        if confirmed_lsn >= writer.durable_lsn:
            return cls(writer.durable_lsn, {})
        filesystem, root = pafs.FileSystem.from_uri(uri)
        above = LSN(max(0, confirmed_lsn - 1))
        pieces = [
            pq.read_table(f"{root}/{file.path}", filesystem=filesystem, columns=_COLUMNS, partitioning=None)
            for file in live_files(open_changelog(uri), writer.epoch, above)
        ]
        known: dict[int, tuple[int, int]] = {}
        for piece in pieces:
            wanted = (
                piece.filter(
                    pc.and_(pc.equal(piece["epoch"], writer.epoch), pc.greater(piece["commit_lsn"], above))
                )
                .group_by(["commit_lsn", "xid", "commit_ts"])
                .aggregate([])
            )
            times = wanted["commit_ts"].cast(pa.int64()).to_pylist()
            for lsn, xid, us in zip(
                wanted["commit_lsn"].to_pylist(), wanted["xid"].to_pylist(), times, strict=True
            ):
                known[lsn] = (xid or 0, us or 0)
        return cls(writer.durable_lsn, known)

    def drop(self, rows: pa.Table, ended: Sequence[Ended]) -> pa.Table:
        """The rows that are new. Raises RewoundError when a transaction is not the changelog's.

        A transaction was durable exactly when it began to commit before the durable LSN, because that LSN
        always stands at the end of a record.
        """
        if self._over or not rows.num_rows:
            self._check(ended, frozenset([self._last_dropped]))
            return rows
        lsns = rows["commit_lsn"].to_numpy()
        new_from = int(np.searchsorted(lsns, self._durable_lsn, side="left"))
        self._check(ended, frozenset([*lsns[:new_from].tolist(), self._last_dropped]))
        if new_from:
            self._last_dropped = int(lsns[new_from - 1])
        self._over = new_from < rows.num_rows
        return rows.slice(new_from)

    def _check(self, ended: Sequence[Ended], with_rows: frozenset[int]) -> None:
        for transaction in ended:
            if transaction.commit_lsn < self._last_lsn:
                raise _rewound(transaction, "came out of order")
            self._last_lsn = transaction.commit_lsn
            if transaction.commit_lsn >= self._durable_lsn:
                continue
            known = self._known.get(transaction.commit_lsn)
            if known is None and transaction.commit_lsn in with_rows:
                raise _rewound(transaction, "is not in the changelog, which holds later ones")
            if known is not None and transaction.xid and known != (transaction.xid, transaction.commit_us):
                raise _rewound(transaction, "is not the one that the changelog holds there")


def _rewound(transaction: Ended, what: str) -> RewoundError:
    return RewoundError(
        f"the source was set back or replaced: the transaction at {LSN(transaction.commit_lsn)} {what}",
        "run the snapshot app with --new-epoch to take everything anew",
    )
