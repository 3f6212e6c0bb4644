"""Logical messages, which any connected session can emit: limited in size, and selected by prefix."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.changelog.messages import MESSAGE_SCHEMA, read_messages
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver
from airflow_provider_pgrepl.replication.source.stream import ReplicationStream
from tests.support.received import Received
from tests.support.replicated import execute, wait_until


def begun(dsn: str, folder: Path, **options: object) -> Received:
    execute(dsn, "create table t(id int primary key)")
    received = Received(dsn, folder, ("public.t",), flush_interval_s=0.05, **options)
    received.begin()
    return received


def emit(prefix: str, content: str, *, transactional: bool = True) -> str:
    return f"select pg_logical_emit_message({transactional}, {prefix}, {content})"


def found(received: Received) -> list[tuple[str, int | None, int]]:
    rows = read_messages(received.pipeline).to_pylist()
    return [(r["prefix"], None if r["content"] is None else len(r["content"]), r["size"]) for r in rows]


def test_oversized_message_keeps_prefix_and_size_and_warns_once_per_prefix(
    dsn: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    received = begun(dsn, tmp_path, message_bytes=1000)
    execute(
        dsn,
        emit("'ü'", "repeat('x', 1000)"),
        emit("'ü'", "repeat('x', 1001)"),
        emit("E'a\\nb'", "repeat('x', 30000000)", transactional=False),
        "begin; insert into t values (1); " + emit("'ü'", "repeat('y', 5000)") + "; commit",
        emit("repeat('é', 3000)", "'short'"),
        emit("''", "''"),
    )
    with caplog.at_level(logging.WARNING):
        received.receive()
    cut = "é" * 500 + "…"
    assert found(received) == [
        ("ü", 1000, 1000),
        ("ü", None, 1001),
        ("a\nb", None, 30_000_000),
        ("ü", None, 5000),
        (cut, None, 5),
        ("", 0, 0),
    ]
    assert read_messages(received.pipeline).schema == MESSAGE_SCHEMA
    said = [record.getMessage() for record in caplog.records if "was not stored" in record.getMessage()]
    assert len(said) == 3
    assert not any("\n" in line for line in said)
    assert [row["new"] for row in received.changelog_rows("M")][1] == ["ü", None, "1001"]
    assert len(received.changelog_rows("I")) == 1


def test_a_large_one_is_let_go_of_as_it_is_read(dsn: str, tmp_path: Path) -> None:
    received = begun(dsn, tmp_path)
    execute(dsn, emit("'p'", "repeat('x', 20000000)"))
    with ReplicationStream(
        dsn, received.pipeline.slot, received.pipeline.publication, message_bytes=1000
    ) as stream:
        sizes = [stream.read(1, 1 << 20).size for _ in range(5)]
    assert 0 < sum(sizes) < 1000


def test_only_those_of_the_prefixes_are_kept(dsn: str, tmp_path: Path) -> None:
    received = begun(dsn, tmp_path, message_prefixes=("orders", "log"))
    for prefix in ("orders", "other", "order", "orders.", "log", "*"):
        execute(dsn, emit(f"'{prefix}'", "'x'"), emit(f"'{prefix}'", "'x'", transactional=False))
    received.receive()
    assert [prefix for prefix, _, _ in found(received)] == ["orders", "orders", "log", "log"]


@pytest.mark.parametrize(
    ("before", "after"), [(("*",), ()), ((), ("*",)), (("p",), ("q",)), (("q",), ("p",))]
)
@pytest.mark.thorough(
    "the same test, of all prefixes, then none", "before1-after1", "before2-after2", "before3-after3"
)
def test_another_choice_holds_from_where_the_receiver_goes_on(
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[str, ...],
    after: tuple[str, ...],
) -> None:
    """Transactions that are sent again are durable already, with or without the rows of the new setting."""
    received = begun(dsn, tmp_path, message_prefixes=before)
    execute(dsn, "insert into t values (1)", emit("'p'", "'1'"), emit("'p'", "'2'", transactional=False))
    execute(dsn, "begin; insert into t values (2); " + emit("'p'", "'3'") + "; commit", emit("'p'", "'4'"))
    with monkeypatch.context() as patched:
        patched.setattr(Receiver, "_send_status", lambda self: None)
        with received.receiving() as receiver:
            wait_until(lambda: len(received.changelog_rows("I")) == 2)
            assert receiver.error is None
    held = len(found(received))
    received.configure(message_prefixes=after)
    execute(dsn, "insert into t values (3)", emit("'p'", "'5'"))
    received.receive()
    assert [row["new"] for row in received.changelog_rows("I")] == [["1"], ["2"], ["3"]]
    assert len(found(received)) == held + (1 if set(after) & {"*", "p"} else 0)
