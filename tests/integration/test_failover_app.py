"""Failover slots as the apps create, alter and check them; state and lake after a promotion."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import BusyError
from airflow_provider_pgrepl.replication.app.evidence import check_followed, gather, stop_lost_copies
from airflow_provider_pgrepl.replication.app.ownership import check_ours
from airflow_provider_pgrepl.replication.app.start_check import check_replication
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.receiver import ReconnectingReceiver
from airflow_provider_pgrepl.replication.source.connection import connect, server_dsn
from airflow_provider_pgrepl.replication.source.failover import (
    alter_failover,
    failover_warnings,
    set_failover,
)
from demo.postgres import Server
from tests.support.kept import Kept
from tests.support.replicated import execute, wait_until
from tests.support.standby import PHYSICAL_SLOT, both_hosts, failover_pair, promote, wait_until_synced

pytestmark = pytest.mark.slow
A, B = "public.a", "public.b"


@pytest.fixture
def pair() -> Iterator[tuple[Server, Server]]:
    with failover_pair(18) as servers:
        yield servers


@pytest.fixture
def kept(pair: tuple[Server, Server], tmp_path: Path) -> Kept:
    """A pipeline with two streaming tables, whose state is in the source."""
    execute(pair[0].dsn(), "create table a (id int primary key)", "create table b (id int primary key)")
    one = Kept(both_hosts(*pair), tmp_path, ("public.a", "public.b"), flush_interval_s=0.05)
    one.take(A, B)
    return one


@contextlib.contextmanager
def receiving(kept: Kept) -> Iterator[ReconnectingReceiver]:
    """A receiver as the replication app has it, which follows a promoted standby."""

    def follow(fork_lsn: LSN) -> None:
        with kept.access.state_db("test") as state_db:
            stop_lost_copies(kept.pipeline, state_db, read_epoch(kept.changelog), fork_lsn)

    reception = ReconnectingReceiver(kept.dsn, kept.pipeline, follow_promotion=follow)
    reception.start()
    try:
        yield reception
    finally:
        reception.stop()
    assert reception.error is None


def receive(kept: Kept) -> None:
    """Receive what is committed."""
    target = kept.source_lsn()
    with receiving(kept) as reception:

        def has_seen() -> bool:
            reception.request_keepalive()
            return reception.error is not None or reception.progress.seen_lsn >= target

        wait_until(has_seen)


def await_slot(pair: tuple[Server, Server], kept: Kept) -> None:
    """Wait until the standby has the slot, which it takes over only at a position that it can decode from."""
    primary, standby = pair

    def move_slot() -> None:
        write = "insert into b select coalesce(min(id), 0) - 1 from b"
        execute(primary.dsn(), write, "select pg_log_standby_snapshot()")

    with receiving(kept):
        wait_until_synced(standby, kept.pipeline.slot, move_slot)


def check_as_a_command(kept: Kept) -> None:
    with kept.access.state_db("test") as state_db, kept.source() as source:
        evidence = gather(kept.pipeline, state_db, source)
    check_ours(evidence)
    check_followed(evidence)


def test_tables_copied_past_the_promotion_stop_and_others_continue(pair, kept):
    """The copy was read from the former primary after the standby's last WAL: its rows may be lost."""
    primary, standby = pair
    execute(primary.dsn(), "insert into a values (1)", "insert into b values (1)")
    receive(kept)
    await_slot(pair, kept)
    kept.bring_all_forward(A, B)
    standby.stop()
    execute(primary.dsn(), "insert into a values (2)")
    kept.copy_at(LSN(kept.source_lsn() - 1), A)
    primary.stop(immediate=True)
    standby.start()
    promote(standby)
    execute(standby.dsn(), "insert into a values (3)", "insert into b values (3)")
    with pytest.raises(BusyError, match="promoted to timeline 2"):
        check_as_a_command(kept)
    check_replication(kept.access)
    receive(kept)
    check_as_a_command(kept)
    assert kept.states() == {A: "errored", B: "streaming"}
    assert "past" in (kept.record(A).reason or "")
    kept.bring_all_forward(B)
    kept.assert_equal(B)


@pytest.mark.thorough("servers start again; unit/test_timelines.py and the tests above show the decisions")
def test_slot_is_altered_and_what_a_failover_lacks_is_named(pair, kept):
    primary, standby = pair
    dsn, slot = kept.dsn, kept.pipeline.slot
    set_failover(primary.dsn(), slot, is_wanted=False)
    assert not kept.slot().failover
    with contextlib.closing(connect(dsn, "test")) as connection:
        assert server_dsn(connection).count(",") == 0
        (text,) = failover_warnings(connection, slot, "auto")
        assert "is not a failover slot yet" in text
        assert not list(failover_warnings(connection, slot, False))
    alter_failover(dsn, slot, "auto")
    assert kept.slot().failover
    alter_failover(dsn, slot, False)
    assert not kept.slot().failover
    alter_failover(dsn, slot, True)
    await_slot(pair, kept)
    with receiving(kept), contextlib.closing(connect(dsn, "test")) as connection:
        assert not list(failover_warnings(connection, slot, "auto"))
    standby.settings = {**standby.settings, "hot_standby_feedback": "off", "sync_replication_slots": "off"}
    standby.stop()
    primary.settings = {**primary.settings, "synchronized_standby_slots": ""}
    primary.stop()
    primary.start()
    standby.start()
    with contextlib.closing(connect(dsn, "test")) as connection:
        wait_until(lambda: is_read(primary))
        found = "\n".join(failover_warnings(connection, slot, "auto"))
    assert f"SET synchronized_standby_slots = '{PHYSICAL_SLOT}'" in found
    assert f"standby 127.0.0.1:{standby.port}: hot_standby_feedback must be on" in found
    assert "sync_replication_slots must be on" in found
    assert "primary_slot_name must" not in found
    with contextlib.closing(connect(primary.dsn(), "test")) as connection:
        assert "no standby could be checked" in "\n".join(failover_warnings(connection, slot, "auto"))


def is_read(primary: Server) -> bool:
    with contextlib.closing(psycopg2.connect(primary.dsn())) as connection, connection.cursor() as cursor:
        cursor.execute("select active from pg_replication_slots where slot_name = %s", (PHYSICAL_SLOT,))
        return bool((cursor.fetchone() or (False,))[0])
