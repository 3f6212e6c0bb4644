"""A slot that the server has invalidated: the error names the reason and the setting, and so do warnings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import SlotError
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.snapshot_tables import TableSnapshotter
from airflow_provider_pgrepl.replication.changelog import writer
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy
from airflow_provider_pgrepl.replication.lake.snapshot.table_queue import CopyResult
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.preflight.check import server_warnings
from airflow_provider_pgrepl.replication.source.server import wal_lsn
from airflow_provider_pgrepl.replication.source.slot import read_slot
from demo.postgres import Server
from tests.conftest import closing_connection
from tests.support.own_server import running_server
from tests.support.received import Received
from tests.support.replicated import execute, wait_until

STANDING = """select invalidation_reason is not null, extract(epoch from clock_timestamp())::float,
    confirmed_flush_lsn::text from pg_replication_slots"""


@pytest.fixture
def impatient() -> Iterator[Server]:
    """A server that invalidates slots after a second without a reader."""
    with running_server(
        idle_replication_slot_timeout="1s", max_slot_wal_keep_size="1GB", checkpoint_timeout="1h"
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
            wait_until(lambda: slot_state()[1] > began + 3, what="three times the timeout to pass")
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


def test_reason_and_setting_are_named_and_warned_of(impatient: Server, tmp_path: Path) -> None:
    dsn = impatient.dsn()
    execute(dsn, "create table t(id int primary key)")
    received = Received(dsn, tmp_path, ("public.t",))
    received.begin()
    connection = connect(dsn, "test")
    with closing_connection(dsn) as looking, looking.cursor() as cursor:

        def invalidated() -> bool:
            cursor.execute("checkpoint")
            cursor.execute("select invalidation_reason is not null from pg_replication_slots")
            return bool(cursor.fetchone()[0])

        wait_until(invalidated, what="the slot to be invalidated")
    with pytest.raises(SlotError) as caught, received.receiving():
        pass
    assert f"slot {received.pipeline.slot} (idle_timeout; idle_replication_slot_timeout is 1s)" in str(
        caught.value
    )
    slot = read_slot(connection, received.pipeline.slot)
    assert slot is not None
    assert slot.held_bytes(wal_lsn(connection)) == 0
    warnings = "\n".join(server_warnings(connection, received.pipeline.slot))
    connection.close()
    assert (
        "idle_replication_slot_timeout is 1s: the server invalidates the slot if no walsender reads it"
        in warnings
    )
    assert "max_slot_wal_keep_size is 1GB" in warnings
