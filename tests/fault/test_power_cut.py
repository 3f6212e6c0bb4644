"""The power of the lake's disk is cut while the receiver writes: only what is there was confirmed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.changelog.writer import find_torn_changelog
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from tests.conftest import Connection
from tests.support.loop_disk import Disk, disk
from tests.support.received import Received
from tests.support.replicated import wait_until


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path) as made:
        yield made


class Traffic:
    """Transactions of some rows, one after the other, until it is ended."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        connection = psycopg2.connect(self._dsn)
        with closing(connection), connection.cursor() as cursor:
            while not self._ending.is_set():
                cursor.execute("insert into t (v) select repeat('x', 300) from generate_series(1, 20)")
                connection.commit()
                self._ending.wait(0.002)


@pytest.mark.parametrize(
    "part_bytes", [1 << 15, pytest.param(32 << 20, marks=pytest.mark.thorough("parts of 32 KiB"))]
)
def test_slot_was_told_only_what_is_on_disk_when_power_is_cut(
    drive: Disk, dsn: str, pg: Connection, part_bytes: int
) -> None:
    pg.cursor().execute("create table t (id bigint generated always as identity primary key, v text)")
    one = Received(dsn, drive.folder, ("public.t",), part_bytes=part_bytes)
    told = one.begin()
    for _ in range(3):
        told = cut_while_receiving(one, drive, told)
        find_torn_changelog(one.changelog).set_aside()
        assert one.durable_lsn >= told
    one.receive()
    with pg.cursor() as cursor:
        cursor.execute("select id from t order by id")
        expected = [str(key) for (key,) in cursor.fetchall()]
    assert [row["new"][0] for row in one.changelog_rows("I")] == expected


def cut_while_receiving(one: Received, drive: Disk, told: LSN) -> LSN:
    """Cut the power once the slot has moved; return the LSN that the slot has confirmed in the end."""
    with Traffic(one.dsn), pytest.raises(PgReplError), one.receiving() as receiver:
        wait_until(lambda: receiver.progress.confirmed_lsn > told + (1 << 19), what="the slot to have moved")
        drive.cut_power()
        assert receiver.failed.wait(300)
    drive.power_on()
    return one.slot().confirmed_flush_lsn or LSN(0)
