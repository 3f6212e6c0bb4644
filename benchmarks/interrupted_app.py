"""Runs the snapshot app, and kills it (SIGKILL, all of its processes) at a share of its table's bytes.

python -m benchmarks.interrupted_app SHARE --pipeline FILE.json

Its last line of output is the number of seconds that it has copied. With a share above 1 it ends by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from airflow_provider_pgrepl.replication.app import snapshot
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy, TableCopy


def main() -> int:
    """Run the app, and return its exit code."""
    share, arguments = float(sys.argv[1]), sys.argv[2:]
    began = list[float]()
    copy, finish = SnapshotCopy._copy, TableCopy.finish

    def copy_from_now(*what: Any) -> int:
        began.append(time.perf_counter())
        return copy(*what)

    def finish_or_die(one: TableCopy, *what: Any) -> None:
        finish(one, *what)
        progress = one.progress()
        if progress.bytes >= share * progress.total_bytes:
            _say_seconds(began[-1])
            os.killpg(0, signal.SIGKILL)

    SnapshotCopy._copy = copy_from_now  # type: ignore[method-assign, assignment]
    TableCopy.finish = finish_or_die  # type: ignore[method-assign, assignment]
    code = snapshot.main(arguments)
    _say_seconds(began[-1])
    return code


def _say_seconds(began: float) -> None:
    print(f"\n{time.perf_counter() - began:.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
