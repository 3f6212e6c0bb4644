"""A publisher in the test's process or in one of its own, while its tables are changed."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2
import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app import publish as publish_app
from airflow_provider_pgrepl.replication.app.creek import publish_snapshot
from airflow_provider_pgrepl.replication.creek.snapshot_requests import LakeSnapshots
from airflow_provider_pgrepl.replication.events.publish.record import read_record
from airflow_provider_pgrepl.replication.postgres.names import TableName
from tests.support.received import Received
from tests.support.replicated import kill, wait_for_end, wait_until
from tests.support.toxiproxy import ENDING, FAULTS, Link

IMPATIENT = Path(__file__).parents[1] / "fault" / "impatient.py"
"""Runs a publisher whose limits of time are seconds."""


class Changes:
    """A counter of the changes that were made to the source."""

    def __init__(self) -> None:
        self.made = 0

    def wait_for_more(self, count: int) -> None:
        wanted = self.made + count
        wait_until(lambda: self.made >= wanted, what=f"{count} more changes of the source")


@contextmanager
def changing(received: Received) -> Iterator[Changes]:
    """Change both tables, and receive the changes, while the block runs."""
    over = threading.Event()
    chance = random.Random(5)
    changes = Changes()

    def change() -> None:
        with connected(received.dsn) as cursor:
            cursor.connection.autocommit = True
            while not over.wait(0.02):
                table, key = chance.choice(("t", "other")), chance.randrange(200)
                cursor.execute(
                    f"insert into {table} values ({key}, {changes.made})"
                    " on conflict (id) do update set v = excluded.v"
                )
                cursor.execute(f"delete from {table} where id = {chance.randrange(200)}")
                changes.made += 1

    with at_work(received, change, over):
        yield changes


@contextmanager
def at_work(received: Received, change: Callable[[], None], over: threading.Event) -> Iterator[None]:
    """Run `change`, which changes the source until `over` is set, and a receiver while the block runs."""
    thread = threading.Thread(target=change)
    with received.receiving():
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
    received.receive()


@contextmanager
def connected(dsn: str) -> Iterator[psycopg2.extensions.cursor]:
    connection = psycopg2.connect(dsn)
    try:
        yield connection.cursor()
    finally:
        connection.close()


def start(received: Received, *arguments: str, script: Path | None = None) -> subprocess.Popen[bytes]:
    given = ("--publisher", received.publisher_name, *arguments)
    return received.start("publish", *(["publish"] if script else []), *given, script=script)


@contextmanager
def publishing(received: Received, script: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A publisher as a process of its own, at work while the block runs, and asked to end after it."""
    running = start(received, script=script)
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        assert wait_for_end(running) == 0, received.log_tail()


class _StopRequest:
    """Takes the place of StopSignal, which handles signals and so works in a main thread only."""

    def __init__(self, asked: threading.Event | None = None) -> None:
        self._asked = asked or threading.Event()

    def __enter__(self) -> _StopRequest:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no signal handler was installed."""

    def ask(self) -> None:
        self._asked.set()

    def wait(self, seconds: float) -> bool:
        return self._asked.wait(seconds)

    @property
    def is_set(self) -> bool:
        return self._asked.is_set()


class _SnapshotsInThread(LakeSnapshots):
    """Sends snapshots from a thread of the test's process: each would be a process of 2 s otherwise."""

    # Two at once would leave each other's patch of the module behind.
    at_once = 1

    def send(self, table: TableName, subject: str, is_over: threading.Event) -> None:
        arguments = [*self._command[3:], f"--table={table}", f"--subject={subject}"]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(publish_snapshot, "StopSignal", lambda: _StopRequest(is_over))
            code = publish_snapshot.main(arguments)
        if code:
            logging.getLogger(publish_snapshot.__name__).error("the snapshot of %s failed (%d)", table, code)


@contextmanager
def publishing_in_thread(received: Received) -> Iterator[None]:
    """A publisher in a thread of the test's process, at work while the block runs, and asked to end after it.

    So are the snapshots that it is asked for. For tests of what is published: a test of how processes start
    or end uses `publishing`.
    """
    stop, codes = _StopRequest(), list[int]()
    arguments = ["--pipeline", str(received.file), "--publisher", received.publisher_name]
    thread = threading.Thread(target=lambda: codes.append(publish_app.main(arguments)))
    with _at_home(received), pytest.MonkeyPatch.context() as patched:
        patched.setattr(publish_app, "StopSignal", lambda: stop)
        patched.setattr(publish_app, "LakeSnapshots", _SnapshotsInThread)
        thread.start()
        try:
            yield
        finally:
            stop.ask()
            thread.join(120)
    assert codes == [process.DONE], received.log_tail()


def run_publisher(received: Received, *arguments: str) -> int:
    """Publish all that is durable, in the test's process; return the app's exit code."""
    given = ["--publisher", received.publisher_name, "--until", "caught-up", *arguments]
    with _at_home(received):
        return publish_app.main(["--pipeline", str(received.file), *given])


@contextmanager
def _at_home(received: Received) -> Iterator[None]:
    """The environment and the log that the app has as a process of its own."""
    ours, handler = logging.getLogger("airflow_provider_pgrepl"), logging.FileHandler(received.log)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(process.DSN_VARIABLE, received.dsn)
        ours.addHandler(handler)
        try:
            yield
        finally:
            ours.removeHandler(handler)
            handler.close()


def wait_for_failures(received: Received, count: int = 1) -> None:
    """Wait until the publisher has failed `count` more times to connect to its target."""

    def failures() -> int:
        return received.log.read_bytes().count(b"tried again in")

    wanted = failures() + count
    try:
        wait_until(lambda: failures() >= wanted, what=f"{count} more failed attempts to connect")
    except AssertionError as error:
        raise AssertionError(f"{error}; the log ends with:\n{received.log_tail()}") from None


def suffer_each_fault(
    received: Received, link: Link, changes: Changes, noticed: Collection[str] = ENDING
) -> None:
    """Apply each fault to the publisher's connection; some more is published after each.

    :param noticed: the faults that last until the publisher logs that it lost the connection; each other one
        lasts while a hundred changes are made
    """

    def losses() -> int:
        return received.log.read_bytes().count(b"sent again")

    for fault in FAULTS:
        before = losses()
        with link.suffering(fault):
            changes.wait_for_more(100)
            if fault in noticed:
                wait_until(lambda: losses() > before, what=f"{fault} to be noticed")  # noqa: B023
        published_more(received, 50)


def published_more(received: Received, count: int) -> None:
    """Wait until the publisher has recorded that `count` more are published."""
    published_above(received, published(received), count)


def published_above(received: Received, before: int, count: int) -> None:
    """Wait until the publisher has recorded that `count` more than `before` are published."""
    wait_until(lambda: published(received) >= before + count, what=f"{count} more to be published")


def published(received: Received) -> int:
    """Return how many messages the publisher has recorded as published."""
    record = read_record(received.pipeline.lake_root, received.publisher_name)
    return record.published if record else 0


def finish(received: Received, *arguments: str) -> None:
    assert run_publisher(received, *arguments) == process.DONE, received.log_tail()


def generation(received: Received) -> int:
    """Return the generation of the publisher's last connection, or 0 if it has no record."""
    record = read_record(received.pipeline.lake_root, received.publisher_name)
    return record.generation if record else 0


def killed_amid_sending(
    received: Received, changes: Changes, chance: random.Random, at_most: int = 100
) -> None:
    """Start a publisher, and kill it once it has connected and some more changes were made."""
    before, running = generation(received), start(received)
    try:
        wait_until(lambda: generation(received) > before, what="the publisher to be connected")
        changes.wait_for_more(chance.randrange(at_most))
    finally:
        kill(running)
