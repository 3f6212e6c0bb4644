"""The lake as its readers see it: at consistent points, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow_provider_pgrepl.replication.lake.consistent_points import Points
from airflow_provider_pgrepl.replication.lake.read import ArrowView, consistent_arrow
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from demo.errors import DemoError

# Each transaction of pgbench adds one amount to a row of each of these, and appends it to the history.
_SUMS = {
    "public.pgbench_accounts": "abalance",
    "public.pgbench_tellers": "tbalance",
    "public.pgbench_branches": "bbalance",
    "public.pgbench_history": "delta",
}


@dataclass(frozen=True)
class Balance:
    """What all four tables add up to, alike, at one point; `commit_ts` is of its last transaction."""

    lsn: LSN
    commit_ts: datetime | None
    rows: int
    total: int


class Lake:
    """Reads at the newest consistent point of the moment."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._root = pipeline.lake_root
        self._checked: Balance | None = None

    def has_reached(self, lsn: LSN) -> bool:
        """Whether all of the demo's tables are at a point at or after this LSN."""
        view = self._view()
        return view is not None and view.point.lsn >= lsn

    def check_balance(self) -> Balance | None:
        """The sums at the newest point; None while there is no point with all tables.

        Raises DemoError when they differ: somebody would have seen half of a transaction.
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
        """All rows of a table at the newest point, sorted."""
        view = self._view()
        if view is None:
            raise DemoError("The lake has no consistent point with all tables.")
        found = view.sql(f"select {columns} from {table} order by {order}")
        for batch in found.to_batches(max_chunksize=20_000):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def _view(self) -> ArrowView | None:
        point = Points(self._root).latest()
        if point is None or not set(point.tables) >= set(_SUMS):
            return None
        return consistent_arrow(self._root, point.lsn, point.epoch)
