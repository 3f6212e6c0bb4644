"""The lag of a table with a thousand updates per second while it is verified 50 times, and its usual lag."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from benchmarks import pipelines, running_app, workload
from benchmarks.figure import Figure
from benchmarks.source import running_source
from benchmarks.steady import CHANGES, SteadyLoad, random_updates
from benchmarks.updated_table import TRANSACTIONS_PER_S, WARM_UP_S
from benchmarks.visibility import delays, table_history
from benchmarks.workload import TABLE

_ROWS = 1_000_000
_RUNS = 50
_USUAL_S = 60
_LIMIT = 2.0


def run(folder: Path, scale: float) -> Figure:
    """Verify the table by runs of the app, one after the other.

    Each has to find it equal: a run that does not exits with another code, which raises RuntimeError.
    """
    rows, runs = int(_ROWS * scale), max(1, int(_RUNS * scale))
    with running_source() as source:
        workload.make_table(source, rows)
        pipeline = pipelines.make_pipeline(folder, "verify_traffic", TABLE)
        load = SteadyLoad(source.dsn, TRANSACTIONS_PER_S, random_updates(TABLE, range(1, rows + 1)))
        dsn = source.replicator_dsn()
        with running_app.replicating(dsn, pipeline) as app:
            running_app.wait_applied(app, pipeline, source.end_lsn())
            load.start()
            time.sleep(WARM_UP_S)
            began = time.time()
            time.sleep(_USUAL_S * scale)
            verifying = time.time()
            for _ in range(runs):
                running_app.App("verify", dsn, pipeline).wait()
            ended = time.time()
            commits = load.stop()
            running_app.wait_shown(app, pipeline, [TABLE], LSN(commits[-1][0]))
    history = table_history(pipeline, TABLE)
    before, during = (
        np.percentile(
            delays([commit for commit in commits if begin <= commit[1] < end], history), [50, 95, 100]
        )
        for begin, end in ((began, verifying), (verifying, ended))
    )
    ratio = float(during[1] / before[1])
    return Figure(
        f"lag of a table of {rows / 1e6:g} M rows with 1,000 updates/s that is verified {runs} times: none"
        " finds a difference",
        f"p95 {during[1]:.2f} s",
        f"usual: p95 {before[1]:.2f} s",
        f"{ratio:.2f}",
        f"≤ {_LIMIT:g} × usual",
        ratio <= _LIMIT,
        {
            "usual p50, p95, longest s": [round(float(value), 2) for value in before],
            "meanwhile p50, p95, longest s": [round(float(value), 2) for value in during],
            "a run, with the start of Spark, s": round((ended - verifying) / runs, 1),
            "changes/s": round(len(commits) * CHANGES / (commits[-1][1] - commits[0][1])),
        },
    )
