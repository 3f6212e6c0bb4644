"""From the slot into the durable changelog, beside pg_recvlogical, which throws everything away."""

from __future__ import annotations

import time
from pathlib import Path

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lsn import LSN
from benchmarks import pipelines, workload
from benchmarks.figure import Figure, compare
from benchmarks.source import Source, running_source

_INSERTS, _UPDATES = 1_000_000, 500_000
_REPEAT = 3
_LIMIT = 0.85


def run(folder: Path, scale: float) -> Figure:
    """Ours and the peer take turns on copies of one slot."""
    with running_source() as source:
        workload.create_table(source)
        first = pipelines.make_pipeline(folder, "receive", workload.TABLE)
        pipelines.publish(source.dsn, first)
        _make_slots(source)
        inserts, updates = int(_INSERTS * scale), int(_UPDATES * scale)
        workload.fill(source, inserts, updates)
        source.settle()
        end = source.end_lsn()
        # Not counted: compiled code is loaded, files of the WAL are read for the first time.
        _receive(source, _numbered(first, 0), end)
        ours, peers = [], []
        for number in range(1, _REPEAT + 1):
            peers.append((inserts + updates) / _peer(source, first, number, end))
            ours.append((inserts + updates) / _receive(source, _numbered(first, number), end))
    work = f"receive: slot → durable changelog, {(inserts + updates) / 1e6:g} M changes"
    return compare(work, ours, peers, _LIMIT, "changes/s", "pg_recvlogical to /dev/null")


def _numbered(first: Pipeline, number: int) -> Pipeline:
    folder = Path(first.lake).parent
    return pipelines.make_pipeline(
        folder,
        f"receive_{number}",
        workload.TABLE,
        slot=f"ours_{number}",
        publication=first.publication,
    )


def _make_slots(source: Source) -> None:
    source.execute("select pg_create_logical_replication_slot('ours_0', 'pgoutput')")
    for number in range(1, _REPEAT + 1):
        for name in ("ours", "peer"):
            source.execute("select pg_copy_logical_replication_slot('ours_0', %s)", f"{name}_{number}")


def _receive(source: Source, pipeline: Pipeline, end: LSN) -> float:
    (confirmed,) = source.fetch(
        "select confirmed_flush_lsn from pg_replication_slots where slot_name = %s", pipeline.slot
    )
    pipelines.begin_changelog(source.dsn, pipeline, LSN.parse(confirmed))
    started = time.perf_counter()
    with pipelines.receiving(source.dsn, pipeline) as receiver:
        pipelines.wait_received(receiver, end)
        return time.perf_counter() - started


def _peer(source: Source, pipeline: Pipeline, number: int, end: LSN) -> float:
    options = ["proto_version=1", f"publication_names={pipeline.publication}", "messages=true"]
    return source.time_program(
        "pg_recvlogical",
        "-d",
        source.dsn,
        "--start",
        "--no-loop",
        f"--slot=peer_{number}",
        f"--endpos={end}",
        "-f",
        "/dev/null",
        *(part for option in options for part in ("-o", option)),
    )
