"""Scattered updates of a table with uuid keys, compared with bigint keys: they must not cost much more.

The lake stores uuids as text values, and their order says nothing about the location of a row.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.updated_table import Measured, measure
from benchmarks.workload import BIGINT, UUIDS

_SIZES = (1, 5)
_LIMIT = 2.5


def run(folder: Path, scale: float) -> Figure:
    """Measure both kinds of keys for each size, one after the other."""
    found = {
        (size, keys.type): measure(folder / f"{size}_{keys.type}", size, scale, keys)
        for size in _SIZES
        for keys in (BIGINT, UUIDS)
    }
    late, work = (
        [of(found[size, "uuid"]) / of(found[size, "bigint"]) for size in _SIZES] for of in (_p95_s, _cpu_us)
    )
    return Figure(
        f"1,000 updates/s of any rows, uuid keys, one table of {' and '.join(map(str, _SIZES))} M rows",
        _describe([found[size, "uuid"] for size in _SIZES]),
        f"bigint keys: {_describe([found[size, 'bigint'] for size in _SIZES])}",
        f"p95 {max(late):.2f}, CPU {max(work):.2f}",
        f"≤ {_LIMIT:g} × bigint",
        max(late + work) <= _LIMIT,
        {f"{size} M rows, {keys}": one.numbers() for (size, keys), one in found.items()},
    )


def _p95_s(one: Measured) -> float:
    return one.p95_s


def _cpu_us(one: Measured) -> float:
    return one.cpu_us_per_change


def _describe(by_size: list[Measured]) -> str:
    return (
        f"p95 {', '.join(f'{one.p95_s:.1f}' for one in by_size)} s,"
        f" {', '.join(f'{one.cpu_us_per_change:,.0f}' for one in by_size)} µs of CPU a change"
    )
