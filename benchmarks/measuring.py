"""Metrics and samples during a figure: `python -m benchmarks --metrics receive apply latency`.

The applications of a figure record samples always, and serve metrics with the option. The parts that a figure
runs without an application get both only with the option, and a sample every 2 s instead of every 60 s.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

from airflow_provider_pgrepl.replication.app.metrics.replication import serve_replication
from airflow_provider_pgrepl.replication.app.progress_writer import ProgressWriter, SampleWriter
from airflow_provider_pgrepl.replication.app.status.summary import SourceReading
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.receiver.changelog_feed import ReceiverProgress
from airflow_provider_pgrepl.replication.runtime.metrics_endpoint import LOCAL
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.state.database import StateDatabase

VARIABLE = "PGREPL_BENCH_METRICS"
_SCRAPE_S = 5.0


def is_on() -> bool:
    """Return True if figures are measured with metrics and samples."""
    return bool(os.environ.get(VARIABLE))


@contextmanager
def recorded(
    dsn: str,
    pipeline: Pipeline,
    received: Callable[[], ReceiverProgress] = ReceiverProgress,
    applied: Callable[[], ApplierProgress] = ApplierProgress,
    request_keepalive: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Record samples, serve metrics and scrape them during the block. Does nothing without the option."""
    if not is_on():
        yield
        return
    port = free_port()
    with ExitStack() as stack:
        state_db = stack.enter_context(StateDatabase(dsn, "benchmark samples"))
        state_db.migrate()
        with closing(connect(dsn, "benchmark")) as source:
            identifier = read_server(source).system_identifier
        # Pipelines of a figure may share a publication.
        state_db.register(pipeline, identifier, slot_owned=True, publication_owned=False)
        samples = SampleWriter(
            state_db, pipeline.name, received, applied, lambda: SourceReading(time.monotonic())
        )
        progress = ProgressWriter(state_db, pipeline.name, received, applied, lambda: None, samples)
        progress.start()
        stack.callback(progress.stop)
        serving = serve_replication((LOCAL, port), dsn, dsn, pipeline, received, applied, request_keepalive)
        stack.enter_context(serving)
        stack.enter_context(scraped(port))
        yield
    if progress.error is not None:
        raise progress.error


@contextmanager
def scraped(port: int) -> Iterator[None]:
    """Read the metrics at a port of this host every 5 s during the block."""
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(_SCRAPE_S):
            try:
                with urllib.request.urlopen(f"http://{LOCAL}:{port}/metrics", timeout=60) as answer:
                    answer.read()
            except OSError:  # the application has not begun to listen, or has ended
                continue

    thread = threading.Thread(target=scrape, name="scrapes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def free_port() -> int:
    """Return a port of this host on which nothing listens."""
    with socket.socket() as found:
        found.bind((LOCAL, 0))
        return int(found.getsockname()[1])
