"""A promoted standby continues the epoch if that is proven, and is rejected otherwise."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import BusyError, PgReplError, RewoundError, SlotError
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_epoch, read_token
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.changelog_feed import KeepaliveRule
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver, ReconnectingReceiver
from demo.postgres import Server
from tests.selection import MAJORS
from tests.support.received import Received, wait_until_seen
from tests.support.replicated import execute, wait_until
from tests.support.standby import both_hosts, failover_pair, promote, wait_until_synced

pytestmark = pytest.mark.slow


@pytest.fixture
def pair(major: int) -> Iterator[tuple[Server, Server]]:
    with failover_pair(major) as servers:
        yield servers


@pytest.fixture
def received(pair: tuple[Server, Server], tmp_path: Path) -> Received:
    """A pipeline whose connection names both servers."""
    execute(pair[0].dsn(), "create table t(id int primary key, v text)")
    one = Received(both_hosts(*pair), tmp_path, ("public.t",), flush_interval_s=0.05, reconnect_s=120)
    one.begin()
    assert one.slot().failover, "the standby is recognized"
    return one


@contextmanager
def receiving(received: Received, forks: list[LSN] | None = None) -> Iterator[ReconnectingReceiver]:
    follow = [].append if forks is None else forks.append
    reception = ReconnectingReceiver(received.dsn, received.pipeline, follow_promotion=follow)
    reception.start()
    try:
        yield reception
    finally:
        reception.stop()


@contextmanager
def traffic(dsn: str) -> Iterator[list[int]]:
    """Sessions that insert rows, each into a transaction of its own, and connect again when they are ended.

    Yields the numbers of those whose commit was confirmed.
    """
    confirmed: list[int] = []
    is_over = threading.Event()

    def write(first: int) -> None:
        number = first
        while not is_over.is_set():
            with contextlib.suppress(psycopg2.Error), contextlib.closing(psycopg2.connect(dsn)) as connection:
                connection.autocommit = True
                while not is_over.wait(0.02):
                    number += 2
                    with connection.cursor() as cursor:
                        cursor.execute("insert into t values (%s, 'x')", (number,))
                    confirmed.append(number)
            is_over.wait(0.05)

    writers = [threading.Thread(target=write, args=(first,)) for first in range(2)]
    for writer in writers:
        writer.start()
    try:
        yield confirmed
    finally:
        is_over.set()
        for writer in writers:
            writer.join()


def ids(dsn: str) -> list[int]:
    with contextlib.closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
        cursor.execute("select id from t order by id")
        return [number for (number,) in cursor.fetchall()]


def received_ids(received: Received) -> list[int]:
    return sorted(int(row["new"][0]) for row in received.changelog_rows("I"))


def tokens(dsn: str) -> set[int]:
    with contextlib.closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
        cursor.execute("select token from _pgrepl.source_tokens")
        return {token for (token,) in cursor.fetchall()}


def token_and_version(received: Received) -> tuple[int, int]:
    changelog = open_changelog(received.changelog)
    return read_token(changelog), int(changelog.version())


def fail_over(pair: tuple[Server, Server], order: str) -> None:
    primary, standby = pair
    if order == "kill, then promote":
        primary.stop(immediate=True)
        promote(standby)
    else:
        promote(standby)
        primary.stop()


@pytest.mark.parametrize("major", [one for one in MAJORS if int(one) >= 17], indirect=True)
@pytest.mark.parametrize(
    "order",
    [
        "kill, then promote",
        pytest.param("promote, then stop", marks=pytest.mark.thorough("the other order of the same steps")),
    ],
)
def test_receiver_continues_from_a_promoted_standby(pair, received, order):
    """The same receiver, under traffic: each row of the new primary is in the changelog exactly once."""
    forks: list[LSN] = []
    with receiving(received, forks) as reception:
        with traffic(received.dsn) as confirmed:
            wait_until(lambda: len(confirmed) > 50)
            wait_until_synced(pair[1], received.pipeline.slot)
            fail_over(pair, order)
            before = len(confirmed)
            wait_until(lambda: len(confirmed) > before + 50, what="writes to the new primary")
            wait_until(lambda: reception.error or reception.progress.reconnects)
        wait_until_seen(reception, received.source_lsn(), 300)
    assert received_ids(received) == ids(pair[1].dsn())
    assert len(forks) == 1
    record = read_epoch(received.changelog)
    assert (record.epoch, record.timeline) == (1, 2)
    assert received.slot().active_pid is None
    # The next start, and a copy of a later timeline, are compared with the recorded one.
    with receiving(received, forks) as reception:
        wait_until_seen(reception, received.source_lsn(), 300)
    assert len(forks) == 1


def start_error(received: Received) -> PgReplError:
    reception = ReconnectingReceiver(received.dsn, received.pipeline, follow_promotion=[].append)
    with pytest.raises(PgReplError) as caught:
        reception.start()
    return caught.value


@pytest.fixture
def synced(pair: tuple[Server, Server], received: Received) -> Received:
    """A pipeline with received rows, whose slot the standby has."""
    with receiving(received) as reception, traffic(received.dsn) as confirmed:
        wait_until(lambda: len(confirmed) > 20)
        wait_until_synced(pair[1], received.pipeline.slot)
        wait_until_seen(reception, received.source_lsn(), 300)
    return received


@pytest.mark.thorough(
    "unit/test_timelines: a changelog past the fork; test_continuity: another timeline; the first test"
)
def test_promoted_standby_that_lacks_received_transactions_is_rejected(pair, synced):
    """Without synchronized_standby_slots the receiver may be ahead of the standby."""
    primary, standby = pair
    primary.settings = {**primary.settings, "synchronized_standby_slots": ""}
    primary.stop()
    primary.start()
    standby.stop()
    with receiving(synced) as reception:
        execute(primary.dsn(), "insert into t values (-1, 'lost')")
        wait_until_seen(reception, synced.source_lsn(), 300)
        primary.stop(immediate=True)
        standby.start()
        promote(standby)
        execute(standby.dsn(), "insert into t values (-2, 'after')")
        assert reception.failed.wait(120)
        error = reception.error
    assert isinstance(error, RewoundError)
    fork = error.message.split("timeline 1 at ")[1].split(",")[0]
    assert LSN.parse(fork) < synced.durable_lsn
    assert f"were received up to {synced.durable_lsn}" in error.message
    assert "--new-epoch" in error.hint
    assert "--give-up" in error.hint
    assert -2 not in received_ids(synced)
    assert read_epoch(synced.changelog).timeline == 1


@pytest.mark.parametrize(
    "is_created_again",
    [
        pytest.param(False, id="missing", marks=pytest.mark.thorough("test_wrong_place: a missing slot")),
        pytest.param(
            True,
            id="created again",
            marks=pytest.mark.thorough("test_continuity: a slot beyond what is durable"),
        ),
    ],
)
def test_promoted_standby_without_the_synchronized_slot_is_rejected(pair, synced, is_created_again):
    primary, standby = pair
    primary.stop(immediate=True)
    promote(standby)
    slot = synced.pipeline.slot
    execute(standby.dsn(), f"select pg_drop_replication_slot('{slot}')")
    if is_created_again:
        execute(
            standby.dsn(),
            f"select pg_create_logical_replication_slot('{slot}', 'pgoutput', false, false, true)",
        )
    execute(standby.dsn(), "insert into t values (-1, 'after')")
    error = start_error(synced)
    assert isinstance(error, SlotError)
    assert ("has confirmed" if is_created_again else "there is no replication slot") in error.message
    assert -1 not in received_ids(synced)


@pytest.mark.thorough("a receiver that connects again waits for the promotion in the first test")
def test_standby_is_waited_for_until_it_is_promoted(pair, synced):
    """A connection that leads to the standby, as a name that moves during a failover."""
    primary, standby = pair
    synced.dsn = standby.dsn()
    error = start_error(synced)
    assert isinstance(error, BusyError)
    assert "target_session_attrs=read-write" in error.hint
    primary.stop(immediate=True)
    promote(standby)
    with receiving(synced) as reception:
        wait_until_seen(reception, synced.source_lsn(), 300)
    assert received_ids(synced) == ids(standby.dsn())


@pytest.mark.thorough(
    "the first test continues by a token; unit/test_timelines and test_source_tokens show what one is for"
)
def test_token_is_recorded_only_when_the_standby_has_it(pair, synced):
    """A failover right after a renewal must not look like a copy of the source that lacks the token."""
    primary, standby = pair
    reception = Receiver(synced.dsn, synced.pipeline, KeepaliveRule(renew_s=2), None, [].append)
    reception.start()
    try:
        first, version = token_and_version(synced)
        wait_until(lambda: first in tokens(standby.dsn()), what="the first token at the standby")
        standby.stop()
        first, version = token_and_version(synced)
        known = tokens(primary.dsn())
        wait_until(lambda: tokens(primary.dsn()) - known, what="a new token at the source")
        wait_until(lambda: token_and_version(synced)[1] > version + 1, what="signs of life")
        assert token_and_version(synced)[0] == first
    finally:
        primary.stop(immediate=True)
        reception.stop()
    standby.start()
    promote(standby)
    assert first in tokens(standby.dsn())
