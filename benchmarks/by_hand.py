"""A comparison with users' own code: Structured Streaming with Spark's MERGE in foreachBatch."""

from __future__ import annotations

from pathlib import Path

from airflow_provider_pgrepl.replication.spark.session import build_session
from benchmarks.figure import Figure
from benchmarks.hand_written import HandWritten, stream
from benchmarks.updated_table import Measured, measure

_SIZES = (1, 5)
"""Sizes of the table in million rows. A thousand random rows are updated per second."""
_STRATEGIES = {"rewriting": False, "deletion vectors": True}
_WARM_UP_S, _SECONDS = 20, 90


def run(folder: Path, scale: float) -> Figure:
    """Measure this package from COMMIT at the source, and the peer from the read of a batch's changes."""
    ours = {size: measure(folder / f"ours_{size}", size, scale) for size in _SIZES}
    peers = _measure_peers(folder, scale)
    sooner = min(peer.p50_s / ours[size].p50_s for (_, size), peer in peers.items())
    fewer = min(peer.bytes_per_change / ours[size].bytes_per_change for (_, size), peer in peers.items())
    beside = {name: _describe([peers[name, size] for size in _SIZES]) for name in _STRATEGIES}
    return Figure(
        f"1,000 updates/s of any of {' and '.join(map(str, _SIZES))} M rows: p50 to merged, bytes a change",
        _describe([ours[size] for size in _SIZES]),
        f"Spark's MERGE by hand, {'; '.join(f'{name}: {told}' for name, told in beside.items())}",
        f"seconds ≥ {sooner:.1f}, bytes ≥ {fewer:.1f}",
        "sooner than each",
        sooner > 1,
        {
            **{f"ours, {size} M rows": one.numbers() for size, one in ours.items()},
            **{f"{name}, {size} M rows": str(peer) for (name, size), peer in peers.items()},
        },
    )


def _measure_peers(folder: Path, scale: float) -> dict[tuple[str, int], HandWritten]:
    spark = build_session("by hand", "local[2]", {"spark.log.level": "ERROR"})
    seconds = _SECONDS * max(scale, 0.3)
    try:
        stream(spark, folder / "warm", 100_000, vectors=True, seconds=_WARM_UP_S)
        return {
            (name, size): stream(spark, folder / f"{name}_{size}", int(size * 1e6 * scale), vectors, seconds)
            for name, vectors in _STRATEGIES.items()
            for size in _SIZES
        }
    finally:
        spark.stop()


def _describe(by_size: list[Measured] | list[HandWritten]) -> str:
    return (
        f"{', '.join(f'{one.p50_s:.1f}' for one in by_size)} s,"
        f" {', '.join(f'{one.bytes_per_change:,.0f}' for one in by_size)} bytes"
    )
