"""After a server crash the slot is at its last saved position: old changes come again, kept or not."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deltalake.transaction import RemoveAction

from airflow_provider_pgrepl.errors import RewoundError
from airflow_provider_pgrepl.replication.app.needed_changes import retention_lsn
from airflow_provider_pgrepl.replication.changelog.layout import PARTITION
from airflow_provider_pgrepl.replication.changelog.maintenance import drop_expired
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from demo.postgres import Server
from tests.conftest import closing_connection
from tests.support.own_server import running_server
from tests.support.received import Received
from tests.support.replicated import execute

pytestmark = pytest.mark.slow

EVERYTHING = LSN(2**62)
LATER = datetime.now(UTC) + timedelta(hours=3)


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that a test may crash."""
    with running_server(max_prepared_transactions="5", checkpoint_timeout="1h") as server:
        yield server


@pytest.fixture
def received(own_server: Server, tmp_path: Path) -> Received:
    execute(own_server.dsn(), "create database t_crashed")
    dsn = own_server.dsn("t_crashed")
    execute(dsn, "create table t(id int primary key, v text)", "create table other(id int)")
    one = Received(dsn, tmp_path, ("public.t",), flush_interval_s=0.05)
    one.begin()
    return one


def ids(received: Received) -> list[int]:
    return sorted(int(row["new"][0]) for row in received.changelog_rows("I"))


def fill(received: Received, first: int, last: int) -> None:
    """Commit and receive transactions, each into a file of its own, and confirm them to the slot."""
    for number in range(first, last + 1):
        execute(received.dsn, f"insert into t values ({number}, 'x')", "select pg_log_standby_snapshot()")
        received.receive()


@pytest.mark.parametrize("kind", ["open", "prepared"])
@pytest.mark.thorough("the same test, of an open transaction", "prepared")
def test_changes_that_retention_dropped_come_again_and_are_not_missed(
    own_server: Server, received: Received, kind: str
) -> None:
    """The transaction that began long ago is why the server has not saved the slot's position."""
    with closing_connection(received.dsn) as old:
        old.cursor().execute("begin; insert into other values (1)")
        if kind == "prepared":
            old.cursor().execute("prepare transaction 'long'")
        fill(received, 1, 3)
        told = received.slot().confirmed_flush_lsn
        assert drop_expired(received.pipeline.lake_root, 1, {1: EVERYTHING}, LATER).files >= 3
        assert ids(received) == []
        fill(received, 4, 5)
        own_server.stop(immediate=True)
    own_server.start()
    confirmed = received.slot().confirmed_flush_lsn
    assert confirmed is not None
    assert told is not None
    assert confirmed < told, "it was not saved"
    execute(received.dsn, "insert into t values (6, 'x')")
    received.receive()
    assert ids(received) == [4, 5, 6]


def test_missing_transaction_above_retention_floor_raises_rewound_error(
    own_server: Server, received: Received
) -> None:
    """Above the retention floor, a missing transaction means a source restored to an earlier state."""
    with closing_connection(received.dsn) as old:
        old.cursor().execute("begin; insert into other values (1)")
        fill(received, 1, 2)
        drop_expired(received.pipeline.lake_root, 1, {1: EVERYTHING}, LATER)
        fill(received, 3, 4)
        forget(received, received.changelog_rows("I")[0]["file"])
        own_server.stop(immediate=True)
    own_server.start()
    with pytest.raises(RewoundError, match="is not in the changelog"):
        received.receive()


def forget(received: Received, path: str) -> None:
    """Take a file out of the changelog without raising its floor, as no maintenance does."""
    table = open_changelog(received.changelog)
    remove = RemoveAction(path, False, 0, 0, {PARTITION: path.split("/", maxsplit=1)[0]})
    table.create_write_transaction([remove], "append", table.schema(), partition_by=[PARTITION])


def test_retention_keeps_what_the_server_may_send_again(own_server: Server, received: Received) -> None:
    with closing_connection(received.dsn) as old:
        old.cursor().execute("begin; insert into other values (1)")
        fill(received, 1, 3)
        restart = received.slot().restart_lsn
        needed = retention_lsn(received.dsn, received.pipeline, EVERYTHING)
        assert needed == restart
        assert needed is not None
        assert drop_expired(received.pipeline.lake_root, 1, {1: needed}, LATER).files == 0
        old.cursor().execute("commit")
    number = 3
    while needed == restart:
        number += 1
        fill(received, number, number)
        needed = retention_lsn(received.dsn, received.pipeline, EVERYTHING)
    assert retention_lsn(received.dsn, received.pipeline, LSN(7)) == 7
    assert retention_lsn(received.dsn, received.pipeline, None) is None
    own_server.stop()
    assert retention_lsn(received.dsn, received.pipeline, EVERYTHING) is None
