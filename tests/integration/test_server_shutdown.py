"""A server that shuts down does not wait for the lake."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import SourceConnectionError
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver
from demo.postgres import Server
from tests.support.own_server import running_server
from tests.support.received import Received
from tests.support.replicated import execute, wait_until

pytestmark = pytest.mark.slow

MANY = "insert into t select g, repeat('x', 2000) from generate_series(2, 16000) g"
"""More than the receiver buffers, so that the walsender waits for it."""


@pytest.fixture
def own_server() -> Iterator[Server]:
    """One that a test may stop."""
    with running_server(wal_sender_timeout="0") as server:
        yield server


class StuckStorage:
    """The lake's storage takes no commit until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        append = ChangelogWriter.append

        def stuck(*arguments: Any, **more: Any) -> None:
            self.begun.set()
            assert self.go.wait(300)
            append(*arguments, **more)

        monkeypatch.setattr(ChangelogWriter, "append", stuck)


def begun(server: Server, folder: Path, **options: Any) -> Received:
    dsn = server.dsn()
    execute(dsn, "create table t (id int primary key, v text)")
    one = Received(dsn, folder, ("public.t",), **options)
    one.begin()
    return one


def assert_stops(server: Server) -> None:
    try:
        server.stop()
    except subprocess.TimeoutExpired:
        pytest.fail("the server waits for the receiver")


@pytest.mark.parametrize("sql", ["insert into t values (1)", MANY], ids=["caught up", "behind"])
@pytest.mark.thorough("test_shutdown_does_not_wait_for_a_flush_that_is_not_due")
def test_shutdown_does_not_wait_for_a_commit_that_hangs(own_server, tmp_path, monkeypatch, sql):
    received = begun(own_server, tmp_path, flush_interval_s=0.05, receive_buffer_bytes=8 << 20)
    receiver = Receiver(received.dsn, received.pipeline)
    receiver.start()
    storage = StuckStorage(monkeypatch)
    execute(received.dsn, "insert into t values (0)", sql)
    assert storage.begun.wait(120)
    assert_stops(own_server)
    storage.go.set()
    assert receiver.failed.wait(120)
    receiver.stop()
    assert isinstance(receiver.error, SourceConnectionError)
    monkeypatch.undo()
    own_server.start()
    received.receive()
    assert len(received.changelog_rows("I")) == (2 if sql != MANY else 16_000)


def test_shutdown_does_not_wait_for_a_flush_that_is_not_due(own_server, tmp_path):
    received = begun(own_server, tmp_path, flush_interval_s=3600)
    receiver = Receiver(received.dsn, received.pipeline)
    receiver.start()
    execute(received.dsn, "insert into t values (1)")
    wait_until(lambda: receiver.progress.changes)
    assert_stops(own_server)
    assert receiver.failed.wait(120)
    receiver.stop()
    assert isinstance(receiver.error, SourceConnectionError)
