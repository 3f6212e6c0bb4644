"""Runs the snapshot app, and kills it (SIGKILL, all of its processes) at a share of its table's bytes.

spark-submit interrupted_app.py SHARE SECONDS --pipeline FILE.json

Writes the number of seconds that it has copied into the file SECONDS. With a share above 1 it ends by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from airflow_provider_pgrepl.replication.app import snapshot
from airflow_provider_pgrepl.replication.lake.snapshot.copy_report import TableCopy
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy


def main() -> int:
    """Run the app, and return its exit code."""
    share, seconds, arguments = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    began = list[float]()
    copy, finish = SnapshotCopy._copy, TableCopy.finish

    def copy_from_now(*what: Any) -> int:
        began.append(time.perf_counter())
        return copy(*what)

    def finish_or_die(one: TableCopy, *what: Any) -> None:
        finish(one, *what)
        progress = one.progress()
        if progress.bytes >= share * progress.total_bytes:
            _write_since(began[-1], seconds)
            os.killpg(0, signal.SIGKILL)

    SnapshotCopy._copy = copy_from_now  # type: ignore[method-assign, assignment]
    TableCopy.finish = finish_or_die  # type: ignore[method-assign, assignment]
    code = snapshot.main(arguments)
    _write_since(began[-1], seconds)
    return code


def _write_since(began: float, seconds: Path) -> None:
    seconds.write_text(f"{time.perf_counter() - began:.3f}")


if __name__ == "__main__":
    sys.exit(main())
