"""Runs an app that is killed (SIGKILL, all of its processes) at a chosen point.

PGREPL_TEST_POINT=POINT python dying.py --pipeline FILE.json snapshot|replicate [...]
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from airflow_provider_pgrepl.replication.app import copy_states, replicate, snapshot
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.lake import consistent_points
from airflow_provider_pgrepl.replication.lake.apply import merge_scheduler, merge_task
from airflow_provider_pgrepl.replication.lake.snapshot import copy_report, snapshot_copy
from airflow_provider_pgrepl.replication.source import publication
from airflow_provider_pgrepl.replication.source.stream import ReplicationStream
from airflow_provider_pgrepl.replication.state.database import StateDatabase

GROUP = os.getpgid(0)


def die(*_: object, **__: object) -> None:
    """Kill the driver and its JVM, and this very process: a worker has a group of its own."""
    os.killpg(GROUP, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def before(room: Any, name: str) -> None:
    setattr(room, name, die)


def after(room: Any, name: str) -> None:
    """Die when it has been called for the first time."""
    real = getattr(room, name)

    def wrapped(*arguments: Any, **named: Any) -> None:
        real(*arguments, **named)
        die()

    setattr(room, name, wrapped)


def in_workers(replace: Callable[[Any], Any]) -> None:
    """Replace what tasks run: what this script defines travels to them by value."""
    real = merge_task.bring_forward  # type: ignore[attr-defined]

    class DyingJob(merge_task.MergeJob):
        def run(self) -> Any:
            return replace(real)(self.work, self.paths, self.upto_lsn)

    merge_scheduler.MergeJob = DyingJob  # type: ignore[misc, attr-defined]


def killed_while_it_runs(real: Any) -> Any:
    def run(*arguments: Any) -> Any:
        from airflow_provider_pgrepl.replication.lake.merge.slice_commit import SliceCommit

        replace = SliceCommit.replace

        def replace_and_be_killed(commit: Any, *what: Any) -> Any:
            threading.Timer(0.002, die).start()
            return replace(commit, *what)

        SliceCommit.replace = replace_and_be_killed  # type: ignore[method-assign]
        return real(*arguments)

    return run


def killed_before_its_log_entry(real: Any) -> Any:
    def run(*arguments: Any) -> Any:
        from airflow_provider_pgrepl.replication.lake.delta import commit

        commit.put_version = die  # type: ignore[assignment, attr-defined]
        return real(*arguments)

    return run


def killed_after_its_log_entry(real: Any) -> Any:
    def run(*arguments: Any) -> Any:
        from airflow_provider_pgrepl.replication.lake.delta import commit

        after(commit, "put_version")
        return real(*arguments)

    return run


def killed_when_it_has_run(real: Any) -> Any:
    def run(*arguments: Any) -> Any:
        result = real(*arguments)
        return die() if result.changes else result

    return run


def killed_while_receiving() -> None:
    real = ReplicationStream.read

    def read(stream: ReplicationStream, *arguments: Any) -> Any:
        chunk = real(stream, *arguments)
        return die() if chunk.messages else chunk

    ReplicationStream.read = read  # type: ignore[method-assign]


def killed_amid_ranges() -> None:
    """Die when half of a table of many ranges is copied, and some of it recorded."""
    real = copy_report.TableCopy.finish

    def finish(copy: copy_report.TableCopy, *what: Any) -> None:
        real(copy, *what)
        done = copy.progress()
        if len(copy._ranges) > _MANY_RANGES and done.bytes > done.total_bytes / 2:
            assert copy._kept is not None
            copy._kept.record()
            die()

    copy_report.TableCopy.finish = finish  # type: ignore[method-assign]


_MANY_RANGES = 50
POINTS: dict[str, Callable[[], None]] = {
    "receiving": killed_while_receiving,
    "parts written": lambda: before(ChangelogWriter, "append"),
    "durable and not told": lambda: after(ChangelogWriter, "append"),
    "merging": lambda: in_workers(killed_while_it_runs),
    "rows marked and not committed": lambda: in_workers(killed_before_its_log_entry),
    "rows marked and committed": lambda: in_workers(killed_after_its_log_entry),
    "one table applied": lambda: in_workers(killed_when_it_has_run),
    "all tables applied": lambda: before(consistent_points.ConsistentPoints, "append"),
    "snapshot of one table committed": lambda: after(snapshot_copy, "commit_snapshot"),
    "snapshot of one table recorded": lambda: after(StateDatabase, "record_snapshot"),
    "epoch begun": lambda: before(snapshot_copy.SnapshotCopy, "run"),
    "half of the ranges copied": killed_amid_ranges,
    "tables published": lambda: after(publication, "add_tables"),
    "tables begun": lambda: after(copy_states.CopyStates, "begin"),
}

if __name__ == "__main__":
    pipeline, app, *more = sys.argv[1:3], *sys.argv[3:]
    POINTS[os.environ["PGREPL_TEST_POINT"]]()
    sys.exit({"replicate": replicate, "snapshot": snapshot}[app].main([*pipeline, *more]))
