"""receiver/changelog_feed.py: what becomes durable of given chunks of the stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.changelog_feed import ChangelogFeed, ReceiverProgress
from airflow_provider_pgrepl.replication.source.stream import Chunk, Keepalive
from tests.support.received import EAGER, Received
from tests.support.replicated import execute
from tests.support.wire_bytes import put_begin, put_commit, put_message


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Received:
    execute(dsn, "create table t(id int primary key)")
    pipeline = Received(dsn, tmp_path, ("public.t",), message_prefixes=("said",))
    pipeline.begin()
    return pipeline


@pytest.fixture
def progress() -> ReceiverProgress:
    return ReceiverProgress()


@pytest.fixture
def feed(received: Received, progress: ReceiverProgress) -> Iterator[ChangelogFeed]:
    with received.source() as source:
        writer = ChangelogWriter(received.changelog)
        confirmed = received.slot().confirmed_flush_lsn or LSN(0)
        yield ChangelogFeed(
            received.pipeline, source, writer, progress, EAGER, confirmed, lambda token: token
        )


def test_keepalive_inside_a_transaction_moves_nothing_past_its_commit(
    received: Received, feed: ChangelogFeed, progress: ReceiverProgress
) -> None:
    """The server sends keepalives while it sends a large transaction; the rest of it is still to come."""
    before = received.durable_lsn
    commit, end = LSN(before + 100), LSN(before + 200)
    head, tail = (put_message(before + n, "said", b"x", transactional=True) for n in (10, 20))
    feed.take(Chunk([put_begin(commit, 7), head], 100, Keepalive(LSN(before + 1000), wants_reply=False)))
    assert progress.received_lsn == before
    feed.flush_if_due()
    feed.finish()
    assert (progress.durable_lsn, received.durable_lsn) == (before, before)
    feed.take(Chunk([tail, put_commit(commit, end)], 100, Keepalive(LSN(before + 1000), wants_reply=False)))
    feed.finish()
    assert progress.durable_lsn == received.durable_lsn == before + 1000
    assert [row["commit_lsn"] for row in received.changelog_rows("M")] == [commit, commit]
