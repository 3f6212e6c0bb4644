"""A NATS that dies, stalls or is full, and a publisher that is killed: every change arrives."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.errors import NotFoundError

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.creek.stream_reading import last_message
from airflow_provider_pgrepl.replication.events.reader import ChangeReader
from demo.nats import NatsServer
from tests.support.jetstream import CreekMessage, CreekStream, creek_applied, running_nats
from tests.support.publishing import (
    IMPATIENT,
    changing,
    connected,
    finish,
    killed_amid_sending,
    published,
    published_above,
    published_more,
    publishing,
    suffer_each_fault,
    wait_for_failures,
)
from tests.support.received import Received
from tests.support.replicated import execute, wait_until
from tests.support.silent_proxy import SilentProxy
from tests.support.toxiproxy import running_toxiproxy

USERS = """
authorization { users = [
  {user: good, password: good}
  {user: poor, password: poor, permissions: {publish: {deny: "CREEK_wal_db.>"}}}
] }
"""


@pytest.fixture
def jetstream() -> Iterator[NatsServer]:
    with running_nats() as server:
        yield server


@pytest.fixture
def received(dsn: str, tmp_path: Path, jetstream: NatsServer, monkeypatch: pytest.MonkeyPatch) -> Received:
    monkeypatch.setenv(TARGET_VARIABLE, jetstream.uri)
    execute(dsn, "create table t(id int primary key, v int)", "create table other(id int primary key, v int)")
    received = Received(dsn, tmp_path, ("public.t", "public.other"), flush_interval_s=0.05)
    received.begin()
    received.configure(publishers={"events": {"target": "nats", "database": "db"}})
    return received


def assert_all_arrived(received: Received, uri: str) -> None:
    """Check that each change arrived, in order from generation to generation.

    A consumer that applies the messages by the rule has the source's rows.
    """
    messages = CreekStream(uri, "db").messages()
    changes = [change for batch in ChangeReader(received.pipeline).read() for change in batch]
    stamps = [message.stamp for message in messages]
    assert stamps == sorted(set(stamps))
    assert_each_generation_is_whole(
        [(message.generation, message.id) for message in messages], [change.id for change in changes]
    )
    assert_copies_equal(received, creek_applied(messages))


def assert_each_generation_is_whole(sent: list[tuple[int, str]], wanted: list[str]) -> None:
    """Check that each generation has its changes without gaps, and each change once."""
    assert {id_ for _, id_ in sent} == set(wanted)
    for _, of_one in itertools.groupby(sent, lambda one: one[0]):
        ids = [id_ for _, id_ in of_one]
        first = wanted.index(ids[0])
        assert ids == wanted[first : first + len(ids)]


def assert_copies_equal(received: Received, messages: list[CreekMessage]) -> None:
    copies: dict[str, dict[int, int]] = {"t": {}, "other": {}}
    for message in messages:
        rows, value = copies[message.subject.rpartition(".")[2]], message.value
        if message.op in ("d", "u_pk"):
            rows.pop(value["before"]["id"], None)
        if value["after"] is not None:
            rows[value["after"]["id"]] = value["after"]["v"]
    for table, rows in copies.items():
        with connected(received.dsn) as cursor:
            cursor.execute(f"select id, v from {table}")
            assert rows == dict(cursor.fetchall())


@pytest.mark.real_kill
@pytest.mark.thorough("test_every_change_arrives_when_connection_stalls; test_consuming: kills")
def test_every_change_arrives_when_publisher_is_killed_again_and_again(received, jetstream):
    chance = random.Random(2)
    with changing(received) as made:
        for _ in range(6):
            killed_amid_sending(received, made, chance)
    finish(received)
    assert_all_arrived(received, jetstream.uri)


@pytest.mark.real_kill
@pytest.mark.thorough("test_every_change_arrives_when_connection_stalls; test_consuming: kills")
def test_every_json_message_arrives_when_publisher_and_server_are_killed(received, jetstream):
    given = {"target": "nats", "format": "json", "stream": "plain"}
    received.configure(publishers={"events": given})
    chance = random.Random(3)
    with changing(received) as made:
        for _ in range(2):
            killed_amid_sending(received, made, chance)
        with publishing(received):
            published_more(received, 50)
            jetstream.kill()
            jetstream.start()
            published_more(received, 50)
    finish(received)
    messages = [one.headers for one in CreekStream(jetstream.uri, "").raw("plain")]
    changes = [change for batch in ChangeReader(received.pipeline).read() for change in batch]
    assert_each_generation_is_whole(
        [(int(one["Pgrepl-Generation"]), one["Pgrepl-Id"]) for one in messages],
        [change.id for change in changes],
    )


@pytest.mark.real_kill
@pytest.mark.thorough("test_every_change_arrives_when_connection_stalls; test_consuming: kills")
def test_every_change_arrives_when_server_is_killed_and_away_for_a_while(received, jetstream):
    with changing(received), publishing(received):
        for failures in (0, 2):
            published_more(received, 50)
            jetstream.kill()
            wait_for_failures(received, failures)
            jetstream.start()
        published_more(received, 50)
    finish(received)
    assert_all_arrived(received, jetstream.uri)


def test_every_change_arrives_when_connection_stalls(received, jetstream, monkeypatch):
    proxy = SilentProxy(jetstream.port)
    monkeypatch.setenv(TARGET_VARIABLE, f"nats://127.0.0.1:{proxy.port}")
    with closing(proxy), changing(received), publishing(received, IMPATIENT):
        published_more(received, 50)
        proxy.fall_silent()
        # Its pings are not answered: it gives the connection up, and tries others.
        wait_until(lambda: "sent again" in received.log_tail(), what="the publisher to notice")
        proxy.speak_again()
        published_more(received, 50)
    monkeypatch.setenv(TARGET_VARIABLE, jetstream.uri)
    finish(received)
    assert_all_arrived(received, jetstream.uri)


@pytest.mark.thorough("test_every_change_arrives_when_connection_stalls")
def test_every_change_arrives_under_faults_of_network(received, jetstream, monkeypatch):
    with running_toxiproxy() as proxy:
        link = proxy.link("nats", jetstream.port)
        monkeypatch.setenv(TARGET_VARIABLE, f"nats://127.0.0.1:{link.port}")
        with changing(received) as changes, publishing(received, IMPATIENT):
            published_more(received, 50)
            suffer_each_fault(received, link, changes)
    monkeypatch.setenv(TARGET_VARIABLE, jetstream.uri)
    finish(received)
    assert_all_arrived(received, jetstream.uri)


def test_full_stream_holds_publisher(received, jetstream):
    stream = CreekStream(jetstream.uri, "db")
    stream.make(max_msgs=40, discard="new")
    with changing(received), publishing(received):
        wait_until(lambda: "maximum messages exceeded" in received.log_tail(), what="the stream to be full")
        kept = stream.messages()
        # Read before there is room: the stream may be full again at once, and then nothing more is published.
        before = published(received)
        stream.purge()
        published_above(received, before, 20)
    assert len(kept) == 40


@pytest.mark.thorough("test_second_publisher_is_refused_and_replaced_one_ends at RabbitMQ")
def test_second_publisher_is_refused(received, jetstream):
    with changing(received), publishing(received):
        published_more(received, 20)
        assert received.run("publish", "--publisher", "events") == process.RETRY_MAY_HELP
    finish(received)
    assert_all_arrived(received, jetstream.uri)


def test_rejected_login_exits_78_and_does_not_log_password(received, monkeypatch):
    cases = {"bad:geheim": "the login of bad was refused", "poor:poor": "the user lacks a right"}
    execute(received.dsn, "insert into t values (1, 1)")
    received.receive()
    with running_nats(USERS) as server:
        for login, says in cases.items():
            monkeypatch.setenv(TARGET_VARIABLE, f"nats://{login}@127.0.0.1:{server.port}")
            code = received.run("publish", "--publisher", "events", "--until", "caught-up")
            assert code == process.WILL_NOT_HELP, f"{login}: {received.log_tail()}"
            assert says in received.log_tail(), login
            assert "geheim" not in received.log_tail(), login


@pytest.mark.thorough("test_every_change_arrives_when_connection_stalls; test_consuming: kills")
def test_publisher_waits_for_server_that_is_not_there(received, monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, "nats://127.0.0.1:1")
    with publishing(received):
        wait_until(lambda: "tried again in" in received.log_tail(), what="the publisher to wait")


@pytest.mark.real_kill
@pytest.mark.thorough("test_every_change_arrives_when_connection_stalls; test_consuming: kills")
def test_publisher_finds_the_one_server_of_several_that_comes_back(received, jetstream, monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, f"nats://127.0.0.1:1,{jetstream.uri}")
    with changing(received), publishing(received):
        published_more(received, 20)
        jetstream.kill()
        wait_for_failures(received, 2)
        jetstream.start()
        published_more(received, 20)
    finish(received)
    assert_all_arrived(received, jetstream.uri)


@pytest.mark.thorough("integration/test_snapshots_to_nats: schemas are found by the client")
def test_anybody_may_ask_for_a_schema_and_nobody_is_answered_into_a_stream(received, jetstream):
    stream = CreekStream(jetstream.uri, "db")
    with changing(received), publishing(received):
        published_more(received, 20)
        (first, *_) = stream.schemas()
        assert stream.ask(first["fingerprint"]) == first
        fingerprint = first["fingerprint"].encode()
        for reply in (f"{stream.wal}.public.t", f"{stream.schema}.public.t", "$JS.API.INFO"):
            stream.put(stream.schema, fingerprint, reply)
        published_more(received, 20)
    finish(received)
    assert len(stream.schemas()) == 2
    assert_all_arrived(received, jetstream.uri)


async def asked_while_made(uri: str) -> None:
    """Streams are made and deleted, and asked for their last message all the while."""
    maker, *askers = [await nats.connect(uri) for _ in range(5)]
    names = ["none"]

    async def ask(client: Any) -> None:
        while names:
            with suppress(NotFoundError):
                await last_message(client.jetstream(), names[-1], ">")

    tasks = [asyncio.create_task(ask(client)) for client in askers]
    for number in range(400):
        names.append(f"S{number}")
        await maker.jetstream().add_stream(name=names[-1], subjects=[f"{names[-1]}.>"])
        await maker.jetstream().delete_stream(names[-1])
    names.clear()
    await asyncio.gather(*tasks)
    for client in (maker, *askers):
        await client.close()


def test_a_server_that_is_making_a_stream_is_not_crashed_by_who_waits_for_it(jetstream):
    """A request for a message of a stream that has no store yet crashes nats-server 2.9.10."""
    asyncio.run(asyncio.wait_for(asked_while_made(jetstream.uri), 300))
    assert jetstream.answers()
