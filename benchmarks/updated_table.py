"""Delay, bytes and CPU time of one table under a small steady load of updates."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from benchmarks import pipelines, processes, running_app, workload
from benchmarks.lake_bytes import WrittenBytes
from benchmarks.source import running_source
from benchmarks.steady import CHANGES, SteadyLoad, random_updates
from benchmarks.visibility import delays, table_folder, table_history
from benchmarks.workload import BIGINT, TABLE, Keys

TRANSACTIONS_PER_S = 100
WARM_UP_S = 20
_SECONDS = 60
_LEAST_ROWS = 1_000
_LEAST_SHARE = 0.2


@dataclass(frozen=True)
class Measured:
    """Seconds until updates are visible, and per update the lake's bytes and the app's CPU time.

    `rate`: the changes per second at the source, which should be a thousand.
    """

    millions: float
    p50_s: float
    p95_s: float
    bytes_per_change: float
    cpu_us_per_change: float
    rate: float

    def numbers(self) -> dict[str, Any]:
        """Return all numbers, rounded."""
        return {
            "M rows": self.millions,
            "p50 s": round(self.p50_s, 2),
            "p95 s": round(self.p95_s, 2),
            "bytes a change": round(self.bytes_per_change),
            "CPU µs a change": round(self.cpu_us_per_change),
            "changes/s": round(self.rate),
        }


def measure(
    folder: Path, millions: float, scale: float, keys: Keys = BIGINT, recent: int | None = None
) -> Measured:
    """Fill and copy the table, then measure a thousand updates per second for a minute.

    The updates are of random rows, or of random ones among the last `recent` rows. `scale` also reduces the
    size of the table.
    """
    rows = max(_LEAST_ROWS, int(millions * 1e6 * scale))
    with running_source() as source:
        workload.make_table(source, rows, keys=keys)
        pipeline = pipelines.make_pipeline(folder, "updated", TABLE)
        numbers = range(rows - min(rows, recent or rows) + 1, rows + 1)
        load = SteadyLoad(source.dsn, TRANSACTIONS_PER_S, random_updates(TABLE, numbers, keys))
        with (
            running_app.streaming(source, pipeline) as app,
            WrittenBytes(table_folder(pipeline, TABLE)) as written,
            processes.CpuTime(app.pid) as cpu,
        ):
            load.start()
            time.sleep(WARM_UP_S)
            before = time.time(), written.total(), cpu.seconds(), len(load.commits)
            time.sleep(_SECONDS * max(scale, _LEAST_SHARE))
            after = time.time(), written.total(), cpu.seconds(), len(load.commits)
            commits = load.stop()
            running_app.wait_shown(app, pipeline, [TABLE], LSN(commits[-1][0]))
    p50, p95 = np.percentile(delays(commits[before[3] :], table_history(pipeline, TABLE)), [50, 95])
    seconds, size, cpu_s, transactions = (now - then for now, then in zip(after, before, strict=True))
    changes = transactions * CHANGES
    return Measured(
        millions, float(p50), float(p95), size / changes, cpu_s * 1e6 / changes, changes / seconds
    )
