"""The memory of an idle pipeline without lake tables, compared with the same one with lake tables."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.events.publish.record import read_record
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from benchmarks import pipelines, processes, workload
from benchmarks.figure import Figure
from benchmarks.running_app import App
from benchmarks.source import Source, running_source
from demo.nats import NatsServer

_TABLES = tuple(f"public.bench_{number}" for number in range(1, 6))
_ROWS = 1_000
_SETTLE_S, _SECONDS = 30, 120
_LIMIT_MB = 250
_EVENTS = "events"
_POLL_S = 0.2
_PATIENCE_S = 120


def run(folder: Path, scale: float) -> Figure:
    """Measure idle pipelines. All tables have changed once, and the changes were sent to NATS."""
    server = NatsServer(folder / "nats")
    with running_source() as source:
        for table in _TABLES:
            workload.make_table(source, _ROWS, table)
        server.start()
        dsn = source.replicator_dsn()
        os.environ[TARGET_VARIABLE] = server.uri
        try:
            alone = _pipeline(folder, "events_alone", lake_tables="none")
            ours, cpu = _idle(source, dsn, alone, scale, ("replicate", "--publish", _EVENTS))
            with_tables = _pipeline(folder, "with_tables")
            others, _ = _idle(
                source, dsn, with_tables, scale, ("replicate",), ("publish", "--publisher", _EVENTS)
            )
        finally:
            del os.environ[TARGET_VARIABLE]
            server.stop()
    memory, other = sum(ours.values()), sum(others.values())
    return Figure(
        f"idle: events of {len(_TABLES)} tables to NATS, without lake tables",
        f"{memory:.0f} MB in {len(ours)} process, {cpu:.1f} % of a core",
        f"the same with lake tables: {other:.0f} MB",
        f"{memory / other:.2f}",
        f"≤ {_LIMIT_MB} MB",
        memory <= _LIMIT_MB,
        {"MB": {kind: round(size) for kind, size in others.items()}},
    )


def _pipeline(folder: Path, name: str, **options: str) -> Pipeline:
    given = {_EVENTS: {"target": "nats", "database": name}}
    return pipelines.make_pipeline(folder, name, *_TABLES, publishers=given, **options)


def _idle(
    source: Source, dsn: str, pipeline: Pipeline, scale: float, *apps: Sequence[str]
) -> tuple[dict[str, float], float]:
    """Return MB by kind of process, and percent of a core, for all apps together."""
    App("snapshot", dsn, pipeline).wait(600)
    with ExitStack() as stack:
        running = [App(name, dsn, pipeline, *arguments) for name, *arguments in apps]
        for app in running:
            stack.callback(app.stop)
        lsn = workload.touch(source, _TABLES)
        _wait_sent(running, pipeline, int(lsn))
        time.sleep(_SETTLE_S * max(scale, 0.1))
        used = [stack.enter_context(processes.CpuTime(app.pid)) for app in running]
        began, before = time.monotonic(), sum(one.seconds() for one in used)
        time.sleep(_SECONDS * max(scale, 0.1))
        spent = (sum(one.seconds() for one in used) - before) / (time.monotonic() - began) * 100
        kinds = Counter[str]()
        for app in running:
            kinds.update(processes.proportional_mb(app.pid))
        return dict(kinds), spent


def _wait_sent(apps: Sequence[App], pipeline: Pipeline, lsn: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        record = read_record(pipeline.lake_root, _EVENTS)
        if record is not None and record.position.commit_lsn + 1 >= lsn:
            return
        for app in apps:
            app.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"published up to {record and record.position}, not {lsn}")
        time.sleep(_POLL_S)
