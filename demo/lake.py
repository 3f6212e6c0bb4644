"""Reads of the demo's lake at consistent points, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.read import ArrowView, consistent_arrow
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from demo.errors import DemoError

# Each transaction of pgbench adds the same amount to one row of each of three tables, and to the history.
_SUMS = {
    "public.pgbench_accounts": "abalance",
    "public.pgbench_tellers": "tbalance",
    "public.pgbench_branches": "bbalance",
    "public.pgbench_history": "delta",
}


@dataclass(frozen=True)
class Balance:
    """The sum of each of the four tables at one consistent point. All four are equal.

    `commit_ts`: the commit time of the point's last transaction.
    """

    lsn: LSN
    commit_ts: datetime | None
    rows: int
    total: int


class Lake:
    """The demo's lake. Each call reads the newest consistent point."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._root = pipeline.lake_root
        self._checked: Balance | None = None

    def has_reached(self, lsn: LSN) -> bool:
        """Return True if the newest point with all tables of the demo is at or after this LSN."""
        view = self._view()
        return view is not None and view.point.lsn >= lsn

    def check_balance(self) -> Balance | None:
        """Return the sums at the newest point, or None while there is no point with all tables.

        Raises DemoError if the sums differ: the lake then shows a part of a transaction.
        """
        view = self._view()
        if view is None or (self._checked is not None and self._checked.lsn == view.point.lsn):
            return self._checked
        rows, totals = 0, {}
        for table, column in _SUMS.items():
            found = view.sql(f"select count(*) as n, coalesce(sum({column}), 0) as total from {table}")
            rows += found["n"][0].as_py()
            totals[f"sum({column})"] = found["total"][0].as_py()
        if len(set(totals.values())) != 1:
            sums = ", ".join(f"{name} = {total:,}" for name, total in totals.items())
            raise DemoError(f"The lake shows half of a transaction at {LSN(view.point.lsn)}: {sums}")
        self._checked = Balance(LSN(view.point.lsn), view.point.commit_ts, rows, totals["sum(delta)"])
        return self._checked

    def rows(self, table: str, columns: str, order: str) -> Iterator[tuple[Any, ...]]:
        """Yield all rows of a table at the newest point, sorted. Raises DemoError if there is no point."""
        view = self._view()
        if view is None:
            raise DemoError("The lake has no consistent point with all tables.")
        found = view.sql(f"select {columns} from {table} order by {order}")
        for batch in found.to_batches(max_chunksize=20_000):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def _view(self) -> ArrowView | None:
        point = ConsistentPoints(self._root).latest()
        if point is None or not set(point.tables) >= set(_SUMS):
            return None
        return consistent_arrow(self._root, point.lsn, point.epoch)
