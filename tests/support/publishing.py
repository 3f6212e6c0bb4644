"""A publisher as a process of its own, while its tables are changed."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg2
import psycopg2.extensions

from airflow_provider_pgrepl.replication.events.publishing.publisher_log import read_record
from tests.support.received import Received
from tests.support.replicated import execute, kill, wait_until


@contextmanager
def changing(received: Received) -> Iterator[None]:
    """Both tables are changed, and the changes received, while the block runs."""
    over = threading.Event()
    chance = random.Random(5)

    def change() -> None:
        number = 0
        while not over.wait(0.005):
            table = chance.choice(("t", "other"))
            key = chance.randrange(200)
            execute(
                received.dsn,
                f"insert into {table} values ({key}, {number}) on conflict (id) do update set v = excluded.v",
                f"delete from {table} where id = {chance.randrange(200)}",
            )
            number += 1

    with at_work(received, change, over):
        yield


@contextmanager
def at_work(received: Received, change: Callable[[], None], over: threading.Event) -> Iterator[None]:
    """What changes the source until `over`, and a receiver, at work while the block runs."""
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


def start(received: Received, *arguments: str) -> subprocess.Popen[bytes]:
    return received.start("publish", "--publisher", received.publisher_name, *arguments)


@contextmanager
def publishing(received: Received) -> Iterator[None]:
    """A publisher at work while the block runs, and asked to end after it."""
    running = start(received)
    try:
        yield
    finally:
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0, received.log_tail()


def published_more(received: Received, count: int) -> None:
    """Wait until the publisher has written down that so many more are published."""

    def published() -> int:
        record = read_record(received.pipeline.lake_root, received.publisher_name)
        return record.published if record else 0

    before = published()
    wait_until(lambda: published() >= before + count, 90, f"{count} more to be published")


def finish(received: Received, *arguments: str) -> None:
    given = ("--publisher", received.publisher_name, "--until", "caught-up", *arguments)
    assert received.run("publish", *given) == 0, received.log_tail()


def generation(received: Received) -> int:
    """Of the last connection of its publisher."""
    record = read_record(received.pipeline.lake_root, received.publisher_name)
    return record.generation if record else 0


def killed_amid_sending(received: Received, chance: random.Random) -> None:
    """A publisher that is killed some time after it has connected."""

    before, running = generation(received), start(received)
    try:
        wait_until(lambda: generation(received) > before, 90, "the publisher to be connected")
        time.sleep(2 * chance.random())
    finally:
        kill(running)
