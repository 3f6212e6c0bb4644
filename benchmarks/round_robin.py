"""The rate for many very small transactions, each on another table than the previous one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import pipelines, running_app, workload
from benchmarks.figure import Figure, thousands
from benchmarks.source import Source, running_source
from benchmarks.visibility import shown_at

_TRANSACTIONS = 200_000
_TABLES = tuple(f"public.bench_{number}" for number in range(100))
_ROWS = 10_000
_LIMIT = 25_000


def run(folder: Path, scale: float) -> Figure:
    """Measure a warm app. The walsender is stopped until all transactions are committed."""
    count = int(_TRANSACTIONS * scale)
    with running_source() as source:
        for table in _TABLES:
            workload.make_table(source, _ROWS, table)
        pipeline = pipelines.make_pipeline(folder, "round_robin", *_TABLES)
        with running_app.streaming(source, pipeline) as app:
            running_app.wait_shown(app, pipeline, _TABLES, workload.touch(source, _TABLES))
            with _held_sender(source, pipeline.slot):
                _commit(source, count)
                end = workload.touch(source, _TABLES)
            started = time.time()
            running_app.wait_shown(app, pipeline, _TABLES, end)
    seconds = shown_at(pipeline, _TABLES, end) - started
    rate = count / seconds
    return Figure(
        f"{count:,} transactions of one row, round robin over {len(_TABLES)} tables: slot → all merged",
        f"{thousands(rate)} changes/s",
        "",
        "",
        f"≥ {thousands(_LIMIT)} changes/s",
        rate >= _LIMIT,
        {"seconds": round(seconds, 1)},
    )


def _commit(source: Source, count: int) -> None:
    """Commit the transactions in the server.

    A client would take longer than the replication stream may be silent.
    """
    source.execute("set synchronous_commit = off")
    turn = " ".join(f"update {table} set k = k + 1 where id = n; commit;" for table in _TABLES)
    source.execute(f"do $$ begin for n in 1..{count // len(_TABLES)} loop {turn} end loop; end $$")


@contextmanager
def _held_sender(source: Source, slot: str) -> Iterator[None]:
    """Stop the walsender of a slot during the block, as a congested network would."""
    (sender,) = source.fetch("select active_pid from pg_replication_slots where slot_name = %s", slot)
    os.kill(sender, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(sender, signal.SIGCONT)
