"""The receive rate from the slot into the durable changelog. The peer is pg_recvlogical to /dev/null."""

from __future__ import annotations

import time
from pathlib import Path

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from benchmarks import pipelines, workload
from benchmarks.figure import Figure, compare
from benchmarks.source import Source, running_source
from benchmarks.store import local_folder

_INSERTS, _UPDATES = 1_000_000, 500_000
_REPEAT = 3
_LIMIT = 0.85


def run(folder: Path, scale: float) -> Figure:
    """Measure this package and the peer in turns, on copies of one slot."""
    with running_source() as source:
        first, end, changes = prepare(source, folder, scale, _REPEAT)
        ours, peers = [], []
        for number in range(1, _REPEAT + 1):
            peers.append(changes / peer_seconds(source, f"peer_{number}", first.publication, end))
            ours.append(changes / receive(source, numbered(first, "ours", number), end))
    work = f"receive: slot → durable changelog, {changes / 1e6:g} M changes"
    return compare(work, ours, peers, _LIMIT, "changes/s", "pg_recvlogical to /dev/null")


def prepare(source: Source, folder: Path, scale: float, repeat: int) -> tuple[Pipeline, LSN, int]:
    """Create slots `ours_1`, `peer_1` and so on, and commit the changes that each of them has.

    Returns the pipeline, the LSN at the end of the changes, and their number.
    """
    workload.create_table(source)
    first = pipelines.make_pipeline(folder, "receive", workload.TABLE)
    pipelines.publish(source.dsn, first)
    _make_slots(source, repeat)
    inserts, updates = int(_INSERTS * scale), int(_UPDATES * scale)
    workload.fill(source, inserts, updates)
    source.settle()
    end = source.end_lsn()
    # Receive once before the measurement: it loads compiled code, and reads the WAL files for the first time.
    receive(source, numbered(first, "ours", 0), end)
    return first, end, inserts + updates


def numbered(first: Pipeline, kind: str, number: int) -> Pipeline:
    """Return a pipeline with its own slot and its own lake."""
    return pipelines.make_pipeline(
        local_folder(first.lake_root).parent,
        f"receive_{kind}_{number}",
        workload.TABLE,
        slot=f"{kind}_{number}",
        publication=first.publication,
    )


def _make_slots(source: Source, repeat: int) -> None:
    source.execute("select pg_create_logical_replication_slot('ours_0', 'pgoutput')")
    for number in range(1, repeat + 1):
        for name in ("ours", "peer"):
            source.execute("select pg_copy_logical_replication_slot('ours_0', %s)", f"{name}_{number}")


def receive(source: Source, pipeline: Pipeline, end: LSN) -> float:
    """Return the seconds from connecting until everything up to `end` is durable."""
    (confirmed,) = source.fetch(
        "select confirmed_flush_lsn from pg_replication_slots where slot_name = %s", pipeline.slot
    )
    pipelines.begin_changelog(source.dsn, pipeline, LSN.parse(confirmed))
    started = time.perf_counter()
    with pipelines.receiving(source.dsn, pipeline) as receiver:
        pipelines.wait_received(receiver, end)
        return time.perf_counter() - started


def peer_seconds(source: Source, slot: str, publication: str, end: LSN) -> float:
    """Return the seconds in which pg_recvlogical reads a slot up to `end` and discards the changes."""
    options = ["proto_version=1", f"publication_names={publication}", "messages=true"]
    return source.time_program(
        "pg_recvlogical",
        "-d",
        source.dsn,
        "--start",
        "--no-loop",
        f"--slot={slot}",
        f"--endpos={end}",
        "-f",
        "/dev/null",
        *(part for option in options for part in ("-o", option)),
    )
