"""creek's own producer as a peer. PGREPL_CREEKD names its program, which is built from its repository."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nats
from nats.js.errors import NotFoundError

from benchmarks import workload
from benchmarks.source import Source
from demo.postgres import free_port

_VARIABLE = "PGREPL_CREEKD"
_NAMESPACE, _SLOT, _PUBLICATION = "PEER", "creek_peer", "creek_peer"
_INSERTS = 30_000
_WAIT_S = 120.0


def rate(source: Source, uri: str, folder: Path) -> float | None:
    """Return acknowledged changes per second, read from its slot. None if PGREPL_CREEKD is not set."""
    program = os.environ.get(_VARIABLE, "")
    if not program:
        return None
    source.execute("create table peer (like bench including all)")
    # Start the program once to create its slot: it publishes only changes after the slot's creation.
    with _running(program, source, uri, folder):
        _until(
            lambda: source.fetch("select count(*) from pg_replication_slots where slot_name = %s", _SLOT)[0]
        )
    for first in range(1, _INSERTS, workload.ROWS_A_TRANSACTION):
        workload.insert(source, first, first + workload.ROWS_A_TRANSACTION - 1, "peer")
    stream = f"{_NAMESPACE}_wal_{source.fetch('select current_database()')[0]}"
    with _running(program, source, uri, folder):
        _until(lambda: asyncio.run(_messages(uri, stream)) > 0)
        begun, started = asyncio.run(_messages(uri, stream)), time.perf_counter()
        _until(lambda: asyncio.run(_messages(uri, stream)) >= _INSERTS)
        taken = time.perf_counter() - started
    source.execute(f"select pg_drop_replication_slot('{_SLOT}')")
    return (_INSERTS - begun) / taken


@contextmanager
def _running(program: str, source: Source, uri: str, folder: Path) -> Iterator[None]:
    server = source.server
    database = source.fetch("select current_database()")[0]
    environment = {
        "PG_URI": f"postgres://postgres@127.0.0.1:{server.port}/{database}?sslmode=disable",
        "PG_PUBLICATION_NAME": _PUBLICATION,
        "PG_PUBLICATION_SLOT": _SLOT,
        "PG_TABLES": "public.peer",
        "NATS_URI": uri,
        "NATS_NAMESPACE": _NAMESPACE,
        "PROMETHEUS_PORT": str(free_port()),
        "LOG_LEVEL": "error",
    }
    with (folder / "creekd.log").open("ab") as log:
        running = subprocess.Popen([program], env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        _until(lambda: not source.fetch("select bool_or(active) from pg_replication_slots")[0])


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("creek's producer did not get there")
        time.sleep(0.1)


async def _messages(uri: str, stream: str) -> int:
    client = await nats.connect(uri)
    try:
        return int((await client.jetstream().stream_info(stream)).state.messages)
    except NotFoundError:
        return 0
    finally:
        await client.close()
