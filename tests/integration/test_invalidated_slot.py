"""A slot that the server has invalidated: error, status and warnings name the reason and the setting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import SlotError
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.snapshot_tables import TableSnapshotter
from airflow_provider_pgrepl.replication.app.status.health import (
    HealthLimits,
    ProblemKind,
    find_health_problems,
)
from airflow_provider_pgrepl.replication.app.status.status import read_status
from airflow_provider_pgrepl.replication.app.status.text import to_text
from airflow_provider_pgrepl.replication.changelog import writer
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy
from airflow_provider_pgrepl.replication.lake.snapshot.table_queue import CopyResult
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.preflight.check import server_warnings
from demo.postgres import Server
from tests.conftest import closing_connection
from tests.support.own_server import running_server
from tests.support.received import Received
from tests.support.replicated import execute, wait_until

STANDING = """select invalidation_reason is not null, extract(epoch from clock_timestamp())::float,
    confirmed_flush_lsn::text from pg_replication_slots"""


@pytest.fixture
def impatient() -> Iterator[Server]:
    """A server that invalidates slots after three seconds without a reader."""
    with running_server(
        idle_replication_slot_timeout="3s", max_slot_wal_keep_size="1GB", checkpoint_timeout="1h"
    ) as server:
        yield server


def test_slot_is_kept_in_use_while_tables_are_copied(
    impatient: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For several times the timeout. Nothing is confirmed by it."""
    dsn = impatient.dsn()
    execute(dsn, "create table t(id int primary key)")
    received = Received(dsn, tmp_path, ("public.t",))
    received.begin()
    with closing_connection(dsn) as looking, looking.cursor() as cursor:

        def slot_state() -> tuple[bool, float, str]:
            cursor.execute("checkpoint")
            cursor.execute(STANDING)
            return cursor.fetchone()

        def copy(_: object) -> CopyResult:
            _, began, confirmed = slot_state()
            wait_until(lambda: slot_state()[1] > began + 9, what="three times the timeout to pass")
            assert slot_state()[0::2] == (False, confirmed)
            return CopyResult()

        monkeypatch.setattr(SnapshotCopy, "__init__", lambda *_: None)
        monkeypatch.setattr(SnapshotCopy, "run", copy)
        monkeypatch.setattr(writer, "mark", lambda _: None)
        access = Access(received.pipeline, dsn, dsn)
        unused: Any = None
        taking = TableSnapshotter(access, unused, unused, lambda: unused)
        keeper: Any = SimpleNamespace(relations=())
        assert taking.copy(keeper, unused, read_epoch(received.changelog), unused) == CopyResult()


IDLE = {"idle_replication_slot_timeout": "1s", "max_slot_wal_keep_size": "1GB"}
BEHIND = {"max_slot_wal_keep_size": "1MB", "wal_keep_size": "0"}


@pytest.mark.parametrize(
    ("settings", "why", "warned"),
    [
        (
            IDLE,
            "idle_timeout; idle_replication_slot_timeout is 1s",
            (
                "idle_replication_slot_timeout is 1s: the server invalidates the slot if no walsender reads",
                "max_slot_wal_keep_size is 1GB",
            ),
        ),
        (BEHIND, "wal_removed; max_slot_wal_keep_size is 1MB", ("max_slot_wal_keep_size is 1MB",)),
    ],
    ids=["idle", "behind"],
)
@pytest.mark.thorough("the same test, of removed WAL; the timeout in the test above", "idle")
def test_reason_and_setting_are_named_and_warned_of(
    tmp_path: Path, settings: dict[str, str], why: str, warned: tuple[str, ...]
) -> None:
    with running_server(checkpoint_timeout="1h", **settings) as server:
        dsn = server.dsn()
        execute(dsn, "create table t(id int primary key)")
        received = Received(dsn, tmp_path, ("public.t",))
        received.begin()
        wait_until(lambda: is_invalidated(dsn), what="the slot to be invalidated")
        sentence = f"slot {received.pipeline.slot} ({why}): it no longer keeps the changes that are missing"
        with pytest.raises(SlotError) as caught, received.receiving():
            pass
        assert sentence in str(caught.value)
        status = read_status(received.pipeline, Access(received.pipeline, dsn, dsn))
        (lost,) = (
            problem
            for problem in find_health_problems(status, HealthLimits()).problems
            if problem.kind is ProblemKind.SLOT_LOST
        )
        assert sentence in lost.reason
        text = to_text(status)
        assert f"{received.pipeline.slot}, lost ({why.partition(';')[0]}), holds no WAL" in text
        assert sentence in " ".join(text.split())
        with closing(connect(dsn, "test")) as connection:
            warnings = "\n".join(server_warnings(connection, received.pipeline.slot))
        assert [each for each in warned if each not in warnings] == []


def is_invalidated(dsn: str) -> bool:
    """Fill a segment of WAL, and have the server look whether it retains more than it may."""
    with closing_connection(dsn) as looking, looking.cursor() as cursor:
        cursor.execute("select pg_logical_emit_message(false, 'test', 'x'), pg_switch_wal()")
        cursor.execute("checkpoint")
        cursor.execute("select invalidation_reason is not null from pg_replication_slots")
        return bool(cursor.fetchone()[0])
