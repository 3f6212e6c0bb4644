"""`pgrepl consume`: tables of one database, kept in another by what comes over NATS."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from nats import connect
from nats.aio.msg import Msg
from psycopg2.errors import UndefinedTable

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.creek import client
from airflow_provider_pgrepl.replication.creek.consumer import ConsumerSettings
from airflow_provider_pgrepl.replication.creek.wire import Wire
from demo.nats import NatsServer
from tests.conftest import closing_connection
from tests.support.copied import Copied, begun, copying, rows
from tests.support.jetstream import CreekStream, running_nats
from tests.support.pages import wait_until_applied
from tests.support.publishing import finish, generation, publishing_in_thread, run_publisher
from tests.support.replicated import ROOT, execute, kill, wait_until

TABLES = ("public.t", "public.other", "public.heap", 'public."odd %s"')


@pytest.fixture
def copied(
    dsn: str, tmp_path: Path, jetstream: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Copied]:
    monkeypatch.setenv("PGREPL_DSN", dsn)
    monkeypatch.setenv("PGREPL_CONSUMER_DSN", "")
    monkeypatch.setenv(TARGET_VARIABLE, jetstream.uri)
    execute(
        dsn,
        "create table t(id int, part text, v text, n numeric(10,2), at timestamptz, j jsonb, u uuid, d date,"
        " b bool, f float8, a int[], big text, primary key (id, part))",
        "alter table t alter big set storage external",
        "create table other(id int primary key, v text)",
        "create table heap(a int, j json)",
        "alter table heap replica identity full",
        'create table "odd %s"(id int primary key, "a%b" text, "select" int, "ä.ö" text)',
    )
    with copying(dsn, tmp_path, jetstream, TABLES) as pipeline:
        yield pipeline


def statement(chance: random.Random) -> str:
    key, part = chance.randint(1, 30), chance.choice("ab")
    values = f"{key}, '{part}', 'v{chance.random()}', {chance.random():.2f}, now(), '{{\"a\": [1]}}'"
    return chance.choice(
        [
            f"insert into t values ({values}, gen_random_uuid(), '2024-02-29', true, 0.1, '{{1,2}}',"
            f" repeat('{key}', 3000)) on conflict do nothing",
            f"update t set v = 'u{chance.random()}' where id = {key}",
            f"update t set id = id + 100 where id = {key}"
            f" and not exists (select from t where id = {key + 100})",
            f"delete from t where id in ({key}, {key + 100})",
            f"insert into other values ({key}, null) on conflict (id) do update set v = {key}",
            f"delete from other where id = {key}",
            f"insert into heap values ({key % 3}, '[{key % 2}]'), ({key % 3}, null)",
            f"update heap set a = a + 1 where a = {key % 3}",
            f"delete from heap where a > {key % 5}",
            f"insert into \"odd %s\" values ({key}, 'x%s', 1, 'y') on conflict do nothing",
            f'update "odd %s" set "a%b" = \'{key}\', id = id + 50 where id = {key % 5}'
            f' and not exists (select from "odd %s" where id = {key % 5 + 50})',
            f'delete from "odd %s" where id > {key + 20}',
            "truncate t, heap" if chance.random() < 0.1 else "select",
        ]
    )


@pytest.mark.real_kill
@pytest.mark.parametrize("kills", [1, 3])
@pytest.mark.thorough("the parameter 1: more kills, more points in time", "3")
def test_a_copy_is_exact_whoever_is_killed(copied, kills):
    chance = random.Random(7)
    execute(copied.dsn, *(statement(chance) for _ in range(200)))
    copied.receive()
    copied.apply()
    with publishing_in_thread(copied):
        wait_until(lambda: copied.stream.schemas(), 150, "the publisher to be there")
        copied.consume()
    for _ in range(kills):
        since = copied.durable_lsn
        publisher = copied.start("publish", "--publisher", "events")
        consumer = copied.start_consumer()
        try:
            for _ in range(8):
                execute(copied.dsn, *(statement(chance) for _ in range(40)))
                copied.receive()
            wait_until_applied(copied, chance, since, lambda: last_stamp(copied))
        finally:
            kill(publisher)
            kill(consumer)
    finish(copied)
    copied.consume()
    copied.assert_equal()
    copied.consume()
    copied.assert_equal()


def last_stamp(copied: Copied) -> int:
    with closing_connection(copied.copy_dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select coalesce(max(stamp), 0)::bigint from _pgrepl_consumer.tables")
        return int(cursor.fetchone()[0])


def test_a_column_that_comes_later_has_what_the_source_has(copied):
    """No message carries the new column's value in older rows: they get the column's default."""
    begun(copied, "insert into other values (1, 'a')")
    execute(
        copied.dsn,
        "alter table other add w numeric(5,2) default 1.5",
        "insert into other values (2, 'b', 2.5)",
    )
    copied.receive()
    copied.apply()
    with publishing_in_thread(copied):
        wait_until(lambda: len(copied.stream.messages()) == 2, 150, "the change to be published")
        copied.consume()
    with closing_connection(copied.copy_dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select id, v, w::text from copied.other order by id")
        assert cursor.fetchall() == [(1, "a", "1.50"), (2, "b", "2.50")]
        cursor.execute("select format_type(atttypid, atttypmod) from pg_attribute where attname = 'w'")
        assert cursor.fetchall() == [("numeric(5,2)",)]


@pytest.mark.thorough(
    "test_a_column_that_comes_later_has_what_the_source_has; a table that stops alone, below"
)
def test_a_column_that_comes_later_stops_its_table_while_nobody_publishes(copied):
    begun(copied, "insert into other values (1, 'a')", "insert into t values (1, 'a')")
    copied.send("alter table other add w int default 1", "insert into t values (2, 'b')")
    copied.send("insert into other values (2, 'b', 2)")
    copied.consume(code=process.WILL_NOT_HELP)
    copied.assert_equal("public.t")


def test_a_table_that_waits_for_a_snapshot_keeps_no_other_waiting(copied):
    begun(copied, "insert into other values (1, 'a')", "insert into t values (1, 'a')")
    copied.send("alter table other add w int default 1", "insert into other values (2, 'b', 2)")
    wire = Wire("CREEK", copied.pipeline.name)
    # Answer the request, and send no rows.
    accepted = wire.new_snapshot("public.other", datetime.now(UTC))
    with answering(wire.request("snap"), accepted) as has_answered:
        consumer = copied.start_consumer()
        try:
            assert has_answered.wait(150)
            copied.send("insert into t values (2, 'b')")
            wait_until(lambda: len(rows(copied.copy_dsn, "copied.t")) == 2, 150, "the change of t")
        finally:
            kill(consumer)
    before = generation(copied)
    with publishing_in_thread(copied):
        wait_until(lambda: generation(copied) > before, 150, "the publisher to be connected")
        copied.consume()
    copied.assert_equal()


def test_a_table_that_refuses_a_change_stops_alone_and_goes_on_with_it(copied):
    begun(copied, "insert into other values (1, 'a')", "insert into t values (1, 'a')")
    execute(copied.copy_dsn, "alter table copied.other add check (v <> 'geheim')")
    copied.send(
        "insert into other values (2, 'b')",
        "insert into other values (3, 'geheim')",
        "insert into t values (2, 'a')",
        "insert into other values (4, 'd')",
    )
    copied.consume(code=process.WILL_NOT_HELP)
    copied.assert_equal("public.t", "public.heap")
    assert "copied.other rejected a change: CheckViolation (other_v_check)" in copied.log_tail()
    assert "geheim" not in copied.log_tail()
    copied.send("insert into other values (5, 'e')", "insert into t values (3, 'a')")
    execute(copied.copy_dsn, "alter table copied.other drop constraint other_v_check")
    copied.consume()
    copied.assert_equal()


@pytest.mark.thorough(
    "test_a_stream_that_was_made_anew_is_not_taken_for_the_one_before; test_consuming_attacked: lost ones"
)
def test_consumer_exits_78_on_missing_messages_and_resnapshot_repairs_copy(copied):
    begun(copied, "insert into other values (1, 'a')", "insert into t values (1, 'a')")
    copied.send("insert into other values (2, 'b')")
    copied.stream.purge()
    copied.send("insert into other values (3, 'c')")
    copied.consume(code=process.WILL_NOT_HELP)
    assert "does not hold what comes next" in copied.log_tail()
    copied.apply()
    with publishing_in_thread(copied):
        wait_until(lambda: copied.stream.schemas(), 150, "the publisher to be there")
        wait_until(lambda: resnapshot(copied), 150, "the tables to be taken")
    copied.assert_equal()


def resnapshot(copied: Copied) -> bool:
    return copied.run_consumer("--resnapshot", "all") == process.DONE


def test_change_that_the_stream_rejects_at_first_is_applied_when_it_arrives(copied):
    copied.stream.make(max_msg_size=5_000)
    begun(copied, "insert into other values (1, 'a')", "insert into heap values (1, null)")
    reject(
        copied,
        "insert into other values (2, repeat('x', 9000))",
        "insert into other values (3, 'c')",
        "update other set v = 'd' where id = 3",
        "insert into heap values (2, to_json(repeat('x', 9000)))",
        "insert into heap values (3, null)",
    )
    copied.consume()
    assert rows(copied.copy_dsn, "copied.other") == [("(1,a)",), ("(3,d)",)]
    copied.stream.change(max_msg_size=-1)
    finish(copied)
    copied.consume(code=process.WILL_NOT_HELP)
    copied.assert_equal("public.other")
    assert "copied.heap has no key, and a change of it arrives after later ones" in copied.log_tail()
    copied.apply()
    with publishing_in_thread(copied):
        wait_until(lambda: copied.run_consumer("--resnapshot", "copied.heap") == process.DONE, 150)
    copied.assert_equal()


def reject(copied: Copied, *statements: str) -> None:
    """Execute statements, one of whose changes NATS rejects, and publish the others."""
    execute(copied.dsn, *statements)
    copied.receive()
    assert run_publisher(copied) == process.WILL_NOT_HELP, copied.log_tail()


def test_change_that_the_server_has_no_room_for_is_applied_when_it_has(copied, monkeypatch):
    with running_nats("max_payload: 100000") as server:
        monkeypatch.setenv(TARGET_VARIABLE, server.uri)
        copied.stream = CreekStream(server.uri, copied.pipeline.name)
        begun(copied, "insert into other values (1, 'a')")
        reject(
            copied,
            "insert into other values (2, repeat('x', 200000))",
            "insert into other values (3, 'c')",
            "insert into heap values (1, to_json(repeat('x', 200000)))",
            "insert into heap values (2, null)",
        )
        copied.consume()
        server.stop()
        server.settings = ""
        server.start()
        finish(copied)
        copied.consume()
        copied.assert_equal()


def test_a_second_consumer_of_the_same_name_ends(copied):
    begun(copied, "insert into other values (1, 'a')")
    first, second = copied.start_consumer(), copied.start_consumer()
    try:
        for key in range(10, 30):
            # Until both are connected, one of them alone may apply every change.
            copied.send(f"insert into other values ({key}, 'b')")
            if first.poll() is not None or second.poll() is not None:
                break
        else:
            raise AssertionError("both go on")
    finally:
        kill(first)
        kill(second)
    assert "another process of consumer copy has begun to apply the stream of" in copied.log_tail()
    copied.consume()
    copied.assert_equal()


REFUSED = {
    "[]": "must be a JSON object",
    '{"name": "copy"}': "tables: must be an object",
    '{"name": "copy", "tables": {"public.t": "public.t"}}': "names no tables",
    '{"name": "copy", "tables": {"a.s.t": "c.t", "b.s.t": "c.t"}}': "a target that another has",
    '{"name": "copy", "tables": {"a.s.t": "c.t"}, "wire": "v3"}': "wire: 'v3' must be one of",
    '{"name": "Copy", "tables": {"a.s.t": "c.t"}}': "name: must be",
    '{"name": "copy", "tabels": {}}': "unknown key 'tabels'",
}
"""Texts of a consumer's file, and what is wrong with each."""


def test_a_file_that_says_something_else_is_refused(copied):
    for given, said in REFUSED.items():
        copied.file_of_consumer.write_text(given)
        copied.log.write_text("")
        copied.consume(code=process.WILL_NOT_HELP)
        assert said in copied.log_tail(), given


@pytest.mark.thorough("test_snapshots_to_nats: databases share the streams of the first wire")
def test_two_databases_are_kept_in_one_over_the_older_wire(copied, dsn):
    both = {}
    north, south = (f"{word}_{copied.pipeline.name}" for word in ("north", "south"))
    for database in (north, south):
        copied.publisher_name = database
        copied.configure(publishers={database: {"target": "nats", "database": database, "wire": "v1"}})
        both[f"{database}.public.other"] = f"copied.{database}"
        copied.send(f"insert into other select count(*), '{database}' from other")
        copied.apply()
        copied.configure_copy(both, wire="v1")
        with publishing_in_thread(copied):
            wait_until(lambda: is_served(copied), 150, "the publisher to answer")
    copied.send("insert into other values (9, 'last of the south')")
    copied.consume()
    assert [text for (text,) in rows(copied.copy_dsn, f"copied.{north}")] == [f"(0,{north})"]
    assert len(rows(copied.copy_dsn, f"copied.{south}")) == 3


def is_served(copied: Copied) -> bool:
    code = copied.run_consumer()
    assert code in (process.DONE, process.RETRY_MAY_HELP, process.WILL_NOT_HELP), copied.log_tail()
    return code == process.DONE


@pytest.mark.thorough("test_consuming_attacked: a table made by hand is kept, or stops if it would keep less")
def test_a_table_of_the_users_own_keeps_its_types_and_columns(copied):
    execute(
        copied.copy_dsn,
        "create table copied.other(note text default 'ours', v varchar(40), id bigint primary key)",
        "create table copied.t(id int, part varchar, iv text, b bool, big text, primary key (part, id))",
    )
    begun(
        copied,
        "insert into other values (1, 'a')",
        "insert into t(id, part, b, big) values (1, 'a', true, 'x')",
    )
    copied.send(
        "update other set v = 'b', id = 2", "insert into other values (3, null)", "update t set b = false"
    )
    copied.consume()
    with closing_connection(copied.copy_dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select id, v, note from copied.other order by id")
        assert cursor.fetchall() == [(2, "b", "ours"), (3, None, "ours")]
        cursor.execute("select id, part, b, big, j from copied.t")
        assert cursor.fetchall() == [(1, "a", False, "x", None)]


def test_it_goes_on_when_nats_comes_back(copied, tmp_path, monkeypatch):
    with running_nats() as server:
        monkeypatch.setenv(TARGET_VARIABLE, server.uri)
        copied.stream = CreekStream(server.uri, copied.pipeline.name)
        begun(copied, "insert into other values (1, 'a')")
        consumer = copied.start_consumer()
        try:
            for key in range(2, 5):
                copied.send(f"insert into other values ({key}, 'b')")
                wait_until(lambda key=key: len(rows(copied.copy_dsn, "copied.other")) == key, 150)
                server.kill()
                server.start()
        finally:
            kill(consumer)
    copied.assert_equal("public.other")


def test_the_file_of_the_page_is_a_valid_one():
    page = (ROOT / "docs" / "how-to" / "keep-a-copy.md").read_text()
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    settings = ConsumerSettings.of(json.loads(text))
    assert [str(target) for target in settings.tables["shop"].values()] == ["shop.orders", "shop.customers"]


@pytest.mark.thorough("a resnapshot in test_a_stream_that_was_made_anew_is_not_taken_for_the_one_before")
def test_a_table_that_was_left_out_for_a_while_is_taken_whole(copied):
    database = copied.pipeline.name
    begun(copied, "insert into other values (1, 'a')", "insert into t values (1, 'a')")
    copied.configure_copy({f"{database}.public.t": "copied.t"})
    copied.send("insert into other values (2, 'b')")
    copied.consume()
    copied.configure_copy()
    copied.apply()
    with publishing_in_thread(copied):
        wait_until(lambda: copied.stream.schemas(), 150, "the publisher to be there")
        wait_until(lambda: is_served(copied), 150, "the table to be taken")
    copied.assert_equal()


@pytest.mark.thorough("test_a_table_that_refuses_a_change_stops_alone_and_goes_on_with_it")
def test_a_change_that_cannot_be_read_stops_its_table_alone(copied):
    begun(copied, "insert into other values (1, 'a')", "insert into t values (1, 'a')")
    copied.stream.put(f"{copied.stream.wal}.public.other", b"geheim")
    copied.send("insert into other values (2, 'b')", "insert into t values (2, 'b')")
    copied.consume(code=process.WILL_NOT_HELP)
    copied.assert_equal("public.t")
    assert rows(copied.copy_dsn, "copied.other") == [("(1,a)",)]
    assert "the copy of copied.other is stopped" in copied.log_tail()
    assert "geheim" not in copied.log_tail()


def test_a_stream_that_was_made_anew_is_not_taken_for_the_one_before(copied):
    begun(copied, "insert into other values (1, 'a')")
    copied.stream.delete()
    copied.send("insert into other values (2, 'b')", "insert into other values (3, 'c')")
    copied.consume(code=process.WILL_NOT_HELP)
    assert "recreated since it was read" in copied.log_tail()
    copied.apply()
    with publishing_in_thread(copied):
        wait_until(lambda: copied.stream.schemas(), 150, "the publisher to be there")
        wait_until(lambda: resnapshot(copied), 150, "the tables to be taken")
    copied.send("insert into other values (4, 'd')")
    copied.consume()
    copied.assert_equal()


@contextmanager
def answering(subject: str, answer: str) -> Iterator[threading.Event]:
    """A responder to every request; the event is set once it has answered one."""

    async def answer_until_over() -> None:
        nats = await connect(os.environ[TARGET_VARIABLE])

        async def respond(request: Msg) -> None:
            await request.respond(answer.encode())
            await nats.flush()
            has_answered.set()

        await nats.subscribe(subject, cb=respond)
        await nats.flush()
        is_there.set()
        while not is_over.is_set():
            await asyncio.sleep(0.1)
        await nats.close()

    is_there, is_over, has_answered = threading.Event(), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(answer_until_over()), daemon=True)
    thread.start()
    assert is_there.wait(120)
    try:
        yield has_answered
    finally:
        is_over.set()
        thread.join(30)


@pytest.mark.thorough("test_a_table_that_waits_for_a_snapshot_keeps_no_other_waiting")
def test_a_table_that_is_not_published_is_told_of_and_a_wait_for_one_ends_when_asked(copied, monkeypatch):
    """A publisher does not answer for tables that it does not publish; one that answers may read for long."""
    monkeypatch.setattr(client, "_ANSWER_S", 2.0)
    name = copied.pipeline.name
    begun(copied, "insert into t values (1, 'a')")
    copied.configure_copy({f"{name}.public.t": "copied.t", f"{name}.public.odrers": "copied.odrers"})
    before = generation(copied)
    with publishing_in_thread(copied):
        wait_until(lambda: generation(copied) > before, 150, "the publisher to be connected")
        copied.consume(code=process.WILL_NOT_HELP)
    for said in (
        "a snapshot of public.odrers is not made: the lake does not hold it",
        "no publisher answered",
    ):
        assert said in copied.log_tail()
    # Answer the request, and send no rows.
    copied.configure_copy({f"{name}.public.odrers": "copied.odrers"})
    wire = Wire("CREEK", name)
    with answering(
        wire.request("snap"), wire.new_snapshot("public.odrers", datetime.now(UTC))
    ) as has_answered:
        consumer = copied.start_consumer()
        # From then on it waits for rows.
        assert has_answered.wait(150)
        consumer.terminate()
        assert consumer.wait(120) == process.DONE


@pytest.mark.thorough("test_a_table_that_waits_for_a_snapshot_keeps_no_other_waiting, and is asked for again")
def test_a_snapshot_is_asked_for_again_where_who_accepted_it_has_died(copied):
    consumer = start_waiting(copied)
    try:
        with publishing_in_thread(copied):
            wait_until(lambda: has_again(copied), 150)
    finally:
        kill(consumer)


@pytest.mark.thorough(
    "test_a_table_that_waits_for_a_snapshot_keeps_no_other_waiting; test_it_goes_on_when_nats_comes_back"
)
def test_a_snapshot_is_asked_for_again_when_nats_comes_back(copied, monkeypatch):
    """The request that the server had accepted is lost, as is the connection by which its rows would come."""
    with running_nats() as server:
        monkeypatch.setenv(TARGET_VARIABLE, server.uri)
        copied.stream = CreekStream(server.uri, copied.pipeline.name)
        consumer = start_waiting(copied)
        try:
            server.kill()
            server.start()
            with publishing_in_thread(copied):
                wait_until(lambda: has_again(copied), 150)
            assert consumer.poll() is None
        finally:
            kill(consumer)


def start_waiting(copied: Copied) -> subprocess.Popen[bytes]:
    """Start a consumer, and return once it waits for the rows of a snapshot that no publisher will send."""
    name = copied.pipeline.name
    begun(copied, "insert into other values (1, 'a')")
    copied.configure_copy({f"{name}.public.other": "copied.again"})
    wire = Wire("CREEK", name)
    lost = wire.new_snapshot("public.other", datetime.now(UTC))
    with answering(wire.request("snap"), lost) as has_answered:
        consumer = copied.start_consumer()
        assert has_answered.wait(150)
        wait_until(lambda: copied.stream.is_read(wire.stream("snap"), lost), 150, "the wait for rows")
    return consumer


def has_again(copied: Copied) -> bool:
    with suppress(UndefinedTable):
        return rows(copied.copy_dsn, "copied.again") == [("(1,a)",)]
    return False
