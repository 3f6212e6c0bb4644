"""The differences of two lists of rows: rows that are missing in the lake, extra there, or changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.values.text_output import texts_of

from .buckets import K1, K2, R1, R2, RowShape, column_hash, key_value

Ints = np.ndarray[Any, np.dtype[np.int64]]
MOST_SHOWN = 100
"""The most keys of each kind that are shown."""


@dataclass
class RowDifferences:
    """The rows that differ, counted. `changed`: rows with the same key and other values. `columns`: for each
    column that differs, the number of rows. The lists of keys have up to 100 keys, as PostgreSQL writes their
    values, and are empty unless keys were asked for."""

    missing: int = 0
    extra: int = 0
    changed: int = 0
    columns: Counter[str] = field(default_factory=Counter)
    missing_keys: list[list[str | None]] = field(default_factory=list)
    extra_keys: list[list[str | None]] = field(default_factory=list)
    changed_keys: list[list[str | None]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.missing + self.extra + self.changed


def find_differences(
    source: pa.Table | None,
    lake: pa.Table | None,
    shape: RowShape,
    key_types: Sequence[PgType] = (),
    *,
    ignores_extra: bool = False,
) -> RowDifferences:
    """Compare the rows of both sides. Each row is counted as often as it is there.

    :param key_types: of the key's columns, if keys are to be shown
    :param ignores_extra: rows that only the lake has are no difference
    """
    found = RowDifferences()
    missing, extra = _unmatched(source, lake, (K1, K2, R1, R2))
    source, lake = _some(source, missing), _some(lake, extra)
    if shape.keys and source is not None and lake is not None:
        pairs = _pairs(source, lake)
        found.changed = len(pairs)
        ours, theirs = pairs[:, 0], pairs[:, 1]
        for number, name in enumerate(shape.columns):
            of = column_hash(number)
            if of not in source.column_names:
                break
            differ = int((_words(source, of)[ours] != _words(lake, of)[theirs]).sum())
            if differ:
                found.columns[name] = differ
        if key_types:
            found.changed_keys = _keys(_some(source, ours), shape, key_types)
        source = _some(source, np.setdiff1d(np.arange(len(source)), ours))
        lake = _some(lake, np.setdiff1d(np.arange(len(lake)), theirs))
    found.missing = 0 if source is None else len(source)
    if not ignores_extra:
        found.extra = 0 if lake is None else len(lake)
    if key_types:
        found.missing_keys = _keys(source, shape, key_types)
        found.extra_keys = [] if ignores_extra else _keys(lake, shape, key_types)
    return found


def without(rows: pa.Table | None, less: pa.Table | None) -> pa.Table | None:
    """Return a list of rows without those of another, each as often as it is there."""
    return _some(rows, _unmatched(rows, less, (K1, K2, R1, R2))[0])


def unmatched_rows(source: pa.Table | None, lake: pa.Table | None) -> tuple[pa.Table | None, pa.Table | None]:
    """Return the rows that only one of two lists has, of each side. Changed rows are in both."""
    missing, extra = _unmatched(source, lake, (K1, K2, R1, R2))
    return _some(source, missing), _some(lake, extra)


def _words(rows: pa.Table, name: str) -> Any:
    return rows[name].to_numpy()


def _some(rows: pa.Table | None, chosen: Ints) -> pa.Table | None:
    return None if rows is None else rows.take(pa.array(chosen, pa.int64()))


def _coded(tables: Sequence[pa.Table], names: Sequence[str]) -> list[Ints]:
    """Return a code for each row of each table, the same for rows that are equal in these columns, made
    different for the second, third … of equal rows of a table."""
    stacked = [np.stack([_words(rows, name) for name in names], axis=1) for rows in tables]
    _, codes = np.unique(np.concatenate(stacked), axis=0, return_inverse=True)
    codes = codes.reshape(-1).astype(np.int64)
    ends = np.cumsum([len(rows) for rows in tables])
    parts = np.split(codes, ends[:-1])
    ranks = [_ranks(part) for part in parts]
    most = max((int(rank.max(initial=0)) for rank in ranks), default=0) + 1
    return [part * most + rank for part, rank in zip(parts, ranks, strict=True)]


def _ranks(codes: Ints) -> Ints:
    """Return, for each code, how many equal ones come before it."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    ranks = np.empty(len(codes), np.int64)
    ranks[order] = np.arange(len(codes)) - np.repeat(starts, np.diff(starts, append=len(codes)))
    return ranks


def _unmatched(source: pa.Table | None, lake: pa.Table | None, names: Sequence[str]) -> tuple[Ints, Ints]:
    """Return the numbers of the rows of each side that the other side does not have."""
    if source is None or lake is None:
        return _all(source), _all(lake)
    ours, theirs = _coded([source, lake], names)
    return np.flatnonzero(~np.isin(ours, theirs)), np.flatnonzero(~np.isin(theirs, ours))


def _all(rows: pa.Table | None) -> Ints:
    return np.arange(0 if rows is None else len(rows))


def _pairs(source: pa.Table, lake: pa.Table) -> Ints:
    """Return the numbers of rows of both sides that have the same key."""
    ours, theirs = _coded([source, lake], (K1, K2))
    _, at_source, in_lake = np.intersect1d(ours, theirs, assume_unique=True, return_indices=True)
    return np.stack([at_source, in_lake], axis=1)


def _keys(rows: pa.Table | None, shape: RowShape, types: Sequence[PgType]) -> list[list[str | None]]:
    if rows is None or not shape.keys:
        return []
    some = rows.slice(0, MOST_SHOWN)
    texts = [
        texts_of(some[key_value(number)].combine_chunks(), pg_type).to_pylist()
        for number, pg_type in enumerate(types)
    ]
    return [list(key) for key in zip(*texts, strict=True)]
