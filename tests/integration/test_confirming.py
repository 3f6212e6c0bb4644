"""receiver/receiver.py: the LSNs that the slot receives while a changelog commit takes long."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver
from airflow_provider_pgrepl.replication.receiver.redelivery import RedeliveryFilter
from airflow_provider_pgrepl.replication.source.connection import rows
from tests.support.received import Received, wait_until_seen
from tests.support.replicated import execute, wait_until

_WRITTEN = """
SELECT r.write_lsn::text FROM pg_catalog.pg_stat_replication r
    JOIN pg_catalog.pg_replication_slots s ON s.active_pid = r.pid WHERE s.slot_name = %s
"""


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Received:
    execute(dsn, "create table t(id int primary key)")
    pipeline = Received(dsn, tmp_path, ("public.t",), flush_interval_s=0.05)
    pipeline.begin()
    return pipeline


class HeldCommits:
    """Keeps transactions from being committed to the changelog until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        append = ChangelogWriter.append

        def held(writer: ChangelogWriter, *arguments: Any, durable_lsn: LSN, **more: Any) -> None:
            if durable_lsn > writer.durable_lsn:
                self.begun.set()
                assert self.go.wait(120)
            append(writer, *arguments, durable_lsn=durable_lsn, **more)

        monkeypatch.setattr(ChangelogWriter, "append", held)


def written_lsn(received: Received) -> LSN:
    """Return the LSN that the receiver last reported to the server as received."""
    with received.source() as source:
        (text,) = rows(source, _WRITTEN, (received.pipeline.slot,))[0]
    return LSN.parse(text or "0/0")


def test_received_lsn_is_not_confirmed_before_the_changelog_commit(
    received: Received, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has got status messages that say how much was received, and none that confirms it."""
    before = received.durable_lsn
    held = HeldCommits(monkeypatch)
    receiver = Receiver(dsn, received.pipeline)
    receiver.start()
    try:
        execute(dsn, "insert into t select generate_series(1, 100)")
        target = received.source_lsn()
        assert held.begun.wait(120)

        def is_received_lsn_sent() -> bool:
            receiver.request_keepalive()
            return before < receiver.progress.received_lsn <= written_lsn(received)

        wait_until(is_received_lsn_sent, 120, "the server to know what was received")
        assert received.slot().confirmed_flush_lsn <= received.durable_lsn == before
    finally:
        held.go.set()
    wait_until_seen(receiver, target)
    receiver.stop()
    assert receiver.error is None
    assert received.slot().confirmed_flush_lsn == received.durable_lsn > before
    assert len(received.changelog_rows("I")) == 100


def test_durable_lsn_is_not_confirmed_before_redelivered_transactions_are_compared(
    received: Received, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once confirmed, transactions that reveal a source restored to an earlier state are not sent again."""
    with monkeypatch.context() as silent:
        silent.setattr(Receiver, "_send_status", lambda _: None)
        execute(dsn, "insert into t values (1)")
        received.receive()
    confirmed, durable = received.slot().confirmed_flush_lsn, received.durable_lsn
    assert confirmed is not None
    assert confirmed < durable
    compare, drop = threading.Event(), RedeliveryFilter.drop

    def held(check: RedeliveryFilter, *arguments: Any) -> Any:
        assert compare.wait(120)
        return drop(check, *arguments)

    monkeypatch.setattr(RedeliveryFilter, "drop", held)
    receiver = Receiver(dsn, received.pipeline)
    receiver.start()
    try:

        def is_received_lsn_sent() -> bool:
            receiver.request_keepalive()
            return written_lsn(received) >= durable

        wait_until(is_received_lsn_sent, 120, "the server to know what was received before")
        assert received.slot().confirmed_flush_lsn == confirmed
    finally:
        compare.set()
    wait_until_seen(receiver, received.source_lsn())
    receiver.stop()
    assert receiver.error is None
    assert received.slot().confirmed_flush_lsn == received.durable_lsn >= durable
    assert len(received.changelog_rows("I")) == 1
