"""The rate at which a stopped app catches up with the changes that the source committed in the meantime.

The peer is pg_recvlogical, which reads the same changes from a copy of the slot, alone on the host, and
discards them.
"""

from __future__ import annotations

import time
from pathlib import Path

from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from benchmarks import pipelines, running_app, workload
from benchmarks.figure import Figure, thousands
from benchmarks.receive import peer_seconds
from benchmarks.source import Source, running_source
from benchmarks.visibility import Actions, read_log, shown_at

_CHANGES = 20_000_000
_COUNTS = (1, 10)
"""Numbers of tables over which the changes are spread evenly."""
_LIMIT = 200_000
_TIMEOUT_S = 1_200


def run(folder: Path, scale: float) -> Figure:
    """Measure both numbers of tables, each with its own database and pipeline."""
    changes = int(_CHANGES * scale)
    seconds = {count: _measure(folder / str(count), count, changes) for count in _COUNTS}
    rates = {count: changes / merged for count, (_, _, merged) in seconds.items()}
    peers = {count: changes / peer for count, (peer, _, _) in seconds.items()}
    slowest = min(rates.values())
    return Figure(
        f"catch-up after a stop, {changes / 1e6:g} M changes of one table, and of {_COUNTS[1]}",
        f"{' and '.join(thousands(rate) for rate in rates.values())} changes/s",
        f"pg_recvlogical to /dev/null: {' and '.join(thousands(rate) for rate in peers.values())} changes/s",
        ", ".join(f"{rates[count] / peers[count]:.2f}" for count in _COUNTS),
        f"≥ {thousands(_LIMIT)} changes/s",
        slowest >= _LIMIT,
        {f"tables: {count}; peer, until received, merged s": found for count, found in seconds.items()},
    )


def _measure(folder: Path, count: int, changes: int) -> tuple[float, float, float]:
    """Return the seconds of the peer, of receiving and of merging.

    The last two are from the start of the app, including Spark's start, until the last change is in the
    changelog, and until the last table shows it.
    """
    tables = [f"public.bench_{number}" for number in range(1, count + 1)]
    step = workload.ROWS_A_TRANSACTION
    updates = changes // 3 // count // step * step
    with running_source() as source:
        for table in tables:
            workload.create_table(source, table)
        pipeline = pipelines.make_pipeline(folder, "catch_up", *tables)
        dsn = source.replicator_dsn()
        with running_app.replicating(dsn, pipeline) as app:
            running_app.wait_applied(app, pipeline, source.end_lsn())
        workload.fill(source, changes // count - updates, updates, tables)
        end = workload.touch(source, tables)
        peer = _peer_seconds(source, pipeline, end)
        started = time.time()
        with running_app.resumed(dsn, pipeline) as app:
            running_app.wait_shown(app, pipeline, tables, end, _TIMEOUT_S)
    received = max(at for at, actions in read_log(changelog_uri(pipeline.lake_root)) if _adds(actions))
    return round(peer, 1), round(received - started, 1), round(shown_at(pipeline, tables, end) - started, 1)


def _peer_seconds(source: Source, pipeline: Pipeline, end: LSN) -> float:
    source.execute("select pg_copy_logical_replication_slot(%s, 'peer')", pipeline.slot)
    seconds = peer_seconds(source, "peer", pipeline.publication, end)
    source.execute("select pg_drop_replication_slot('peer')")
    return seconds


def _adds(actions: Actions) -> bool:
    return any("add" in action for action in actions)
