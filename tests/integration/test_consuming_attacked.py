"""`pgrepl consume`: what would have made a copy differ without a word, or stopped all for one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.creek.table_shape import keeps_less
from airflow_provider_pgrepl.replication.creek.wire import framed
from demo.nats import NatsServer
from tests.conftest import closing_connection
from tests.support.copied import Copied, begun, copying
from tests.support.publishing import publishing_in_thread
from tests.support.replicated import execute, kill, wait_until

World = Callable[..., Copied]


@pytest.fixture
def world(
    dsn: str, tmp_path: Path, jetstream: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    monkeypatch.setenv("PGREPL_DSN", dsn)
    monkeypatch.setenv("PGREPL_CONSUMER_DSN", "")
    monkeypatch.setenv(TARGET_VARIABLE, jetstream.uri)
    with ExitStack() as stack:

        def make(tables: dict[str, str], *statements: str, **options: Any) -> Copied:
            execute(
                dsn, *(f"create table {name}({columns})" for name, columns in tables.items()), *statements
            )
            names = tuple(f"public.{name}" for name in tables)
            return stack.enter_context(copying(dsn, tmp_path, jetstream, names, **options))

        yield make


def asked(dsn: str, sql: str) -> list[Any]:
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall()


@pytest.mark.thorough("test_consuming: a copy is exact, of tables with a key and with whole rows")
def test_rows_that_an_index_identifies(world):
    copied = world(
        {"ri": "id int not null, v text"},
        "create unique index ri_i on ri(id)",
        "alter table ri replica identity using index ri_i",
    )
    begun(copied, "insert into ri values (1, 'a'), (2, 'b'), (3, 'c')")
    copied.send("update ri set v = 'A' where id = 1", "update ri set id = 9 where id = 2")
    copied.send("delete from ri where id = 3", "insert into ri values (4, 'd')")
    copied.consume()
    copied.assert_equal()


@pytest.mark.thorough("test_consuming: a copy is exact, of tables with a key and with whole rows")
def test_numbers_below_zero(world):
    copied = world(
        {"whole": "who text, amount int", "least": "a smallint primary key, b int, c bigint"},
        "alter table whole replica identity full",
    )
    begun(copied, "insert into whole values ('a', -5), ('b', 5)")
    copied.send(
        "update whole set amount = -7 where who = 'a'",
        "delete from whole where who = 'b'",
        "insert into least values (-32768, -2147483648, -9223372036854775808)",
    )
    copied.consume()
    copied.assert_equal()


@pytest.mark.parametrize(
    ("source", "target", "less"),
    [
        ('"numeric"(10,4)', "numeric(6,2)", True),
        ('"numeric"(10,2)', "numeric(6,2)", False),
        ('"numeric"', "integer", True),
        ('"float8"', "real", True),
        ('"float4"', "double precision", False),
        ('"int4"', "smallint", False),  # too large is an error
        ('"timestamptz"', "timestamp with time zone", False),
        ('"timestamptz"', "timestamp(0) with time zone", True),
        ('"timestamptz"', "timestamp without time zone", True),
        ('"timestamp"', "date", True),
        ('"timestamp"', "time without time zone", True),
        ('"date"', "timestamp without time zone", False),
        ('"text"', "uuid", False),
        ('"varchar"', "character varying(5)", False),
        ('"_numeric"(10,4)', "numeric(6,2)[]", True),
        ('"_numeric"(6,2)', "numeric(6,2)[]", False),
        ('"_numeric"', "integer[]", True),
        ('"_timestamptz"', "timestamp(0) with time zone[]", True),
        ('"_int4"', "bigint[]", False),
    ],
)
def test_a_type_that_rounds_or_cuts_keeps_less(source, target, less):
    assert keeps_less(f"pg_catalog.{source}", target) is less


def test_a_table_that_would_keep_less_stops(world):
    copied = world({"n": "id int primary key, x numeric(6,2)", "v": "id int primary key, v text"})
    execute(copied.copy_dsn, "create table copied.v(id int primary key, v varchar(5))")
    begun(copied, "insert into n values (1, 1.23)", "insert into v values (1, 'short')")
    copied.send("alter table n alter x type numeric(10,4)", "insert into n values (2, 9.8765)")
    copied.send("insert into v values (2, 'too long')")
    copied.consume(code=process.WILL_NOT_HELP)
    assert "x is numeric(6,2), and keeps less than" in copied.log.read_text()
    assert asked(copied.copy_dsn, "select count(*) from copied.n") == [(1,)]
    assert asked(copied.copy_dsn, "select count(*) from copied.v") == [(1,)]
    execute(
        copied.copy_dsn,
        "alter table copied.n alter x type numeric(10,4)",
        "alter table copied.v alter v type text",
    )
    copied.consume()
    assert asked(copied.copy_dsn, "select x::text from copied.n where id = 2") == [("9.8765",)]
    copied.assert_equal("public.v")


@pytest.mark.thorough("test_consuming: a copy is exact whoever is killed")
def test_a_stop_while_a_table_catches_up_loses_nothing(world):
    copied = world({"bad": "id int primary key, v text", "ok": "id int primary key, v text"})
    begun(copied, "insert into bad values (0, 'x')", "insert into ok values (0, 'x')")
    execute(copied.copy_dsn, "alter table copied.bad add constraint c check (v <> 'no')")
    more = [f"insert into bad select g, 'y' from generate_series({n}02, {n}99) g" for n in range(1, 16)]
    copied.send("insert into bad values (1, 'no')", *more)
    copied.consume(code=process.WILL_NOT_HELP)
    slow = "begin perform pg_sleep(0.002); return new; end"
    execute(
        copied.copy_dsn,
        "alter table copied.bad drop constraint c",
        f"create function copied.slow() returns trigger language plpgsql as $$ {slow} $$",
        "create trigger s before insert on copied.bad for each row execute function copied.slow()",
    )
    consumer = copied.start_consumer()
    wait_until(lambda: asked(copied.copy_dsn, "select count(*) > 1 from copied.bad") == [(True,)])
    consumer.send_signal(signal.SIGTERM)
    assert consumer.wait(150) == process.DONE
    copied.consume()
    copied.assert_equal()


def test_messages_that_the_stream_has_lost_in_between_are_no_end(world):
    copied = world({"quiet": "id int primary key", "busy": "id int primary key"})
    copied.stream.make(max_msgs_per_subject=10)
    begun(copied, "insert into quiet values (1)", "insert into busy values (1)")
    copied.send(*(f"insert into busy values ({key})" for key in range(2, 32)))
    assert copied.run_consumer() == process.WILL_NOT_HELP


FORGETFUL = """
import sys
from airflow_provider_pgrepl.replication.app.publish import main
from airflow_provider_pgrepl.replication.events.publish.publisher import Publisher
Publisher._save_when_due = lambda _: None
sys.exit(main(sys.argv[1:]))
"""
"""A publisher whose lake is slow to record the publisher's position."""


def test_new_consumer_applies_events_beyond_saved_publisher_position(world, tmp_path):
    """A snapshot is taken as of the recorded position, and the stream is ahead of that position."""
    copied = world({"k": "id int primary key"})
    begun(copied, "insert into k values (1)")
    execute(copied.copy_dsn, "drop schema copied, _pgrepl_consumer cascade", "create schema copied")
    script = tmp_path / "forgetful.py"
    script.write_text(FORGETFUL)
    publisher = copied.start("publish", "--publisher", "events", script=script)
    try:
        before = len(copied.stream.messages())
        execute(copied.dsn, "insert into k select generate_series(2, 6)")
        copied.receive()
        copied.apply()
        wait_until(lambda: len(copied.stream.messages()) >= before + 5, 150, "the changes to be published")
        copied.consume()
    finally:
        kill(publisher)
    copied.assert_equal()


@pytest.mark.thorough("test_consuming: a copy is exact, with updates that leave a large value")
def test_an_update_of_a_row_whose_large_value_may_not_be_null(world):
    copied = world(
        {"k": "id int primary key, v text, big text not null"}, "alter table k alter big set storage external"
    )
    execute(copied.copy_dsn, "create table copied.k(id int primary key, v text, big text not null)")
    begun(copied, "insert into k values (1, 'a', repeat('x', 5000))")
    copied.send("update k set v = 'b'")
    copied.consume()
    copied.assert_equal()


def test_a_row_that_is_not_there_stops_a_table_without_a_key(world):
    copied = world(
        {"heap": "a int, v text", "ok": "id int primary key"}, "alter table heap replica identity full"
    )
    begun(copied, "insert into heap values (1, 'a')", "insert into ok values (1)")
    execute(copied.copy_dsn, "update copied.heap set v = 'another'")
    copied.send("delete from heap", "insert into ok values (2)")
    copied.consume(code=process.WILL_NOT_HELP)
    assert "has no row that is as the source says it was" in copied.log.read_text()
    copied.assert_equal("public.ok")


@pytest.mark.thorough("test_consuming keeps some tables of a stream with others")
def test_messages_of_tables_that_are_not_kept_are_nobodys_trouble(world):
    copied = world({"k": "id int primary key"})
    begun(copied, "insert into k values (1)")
    copied.stream.put(f"{copied.stream.wal}.public.nobodys", framed(b"\xc3\x0112345678xx"))
    copied.send("insert into k values (2)")
    copied.consume()
    copied.assert_equal()


@pytest.mark.thorough("test_consuming: a table that refuses a change stops alone")
def test_letters_that_the_copys_encoding_lacks_are_its_tables_trouble(world):
    copied = world({"k": "id int primary key, v text", "ok": "id int primary key"})
    name = copied.copy_dsn.split("dbname=")[1].split()[0]
    execute(
        copied.dsn,
        f"drop database {name} with (force)",
        f"create database {name} template template0 encoding 'LATIN1' lc_collate 'C' lc_ctype 'C'",
    )
    execute(copied.copy_dsn, "create schema copied")
    begun(copied, "insert into k values (1, 'a')", "insert into ok values (1)")
    copied.send("insert into k values (2, '5 €')", "insert into ok values (2)")
    copied.consume(code=process.WILL_NOT_HELP)
    assert "€" not in copied.log.read_text()
    copied.assert_equal("public.ok")


@pytest.mark.parametrize(
    "given",
    [
        "postgresql://reports:SECR%ET@127.0.0.1/x",
        "postgresql//reports:SECRET@127.0.0.1/x",
        "host=a SEC RET=x",
    ],
)
def test_a_connection_string_that_cannot_be_read_is_not_shown(world, monkeypatch, capsys, given):
    copied = world({"k": "id int primary key"})
    monkeypatch.setenv("PGREPL_CONSUMER_DSN", given)
    assert main(["consume", str(copied.file_of_consumer), "--until", "caught-up"]) == process.WILL_NOT_HELP
    said = "".join(capsys.readouterr())
    assert "cannot be read" in said
    assert "SEC" not in said


@pytest.mark.thorough("test_consuming: a second consumer of the same name ends")
def test_two_who_begin_at_once_do_not_both_fill_the_tables(world):
    copied = world({"heap": "a int"}, "alter table heap replica identity full")
    slow = "begin perform pg_sleep(0.001); return new; end"
    execute(
        copied.copy_dsn,
        "create table copied.heap(a int)",
        f"create function copied.slow() returns trigger language plpgsql as $$ {slow} $$",
        "create trigger s before insert on copied.heap for each row execute function copied.slow()",
    )
    execute(copied.dsn, "insert into heap select generate_series(1, 2000)")
    copied.receive()
    copied.apply()
    with publishing_in_thread(copied):
        wait_until(lambda: copied.stream.schemas(), 150, "the publisher to be there")
        both = [copied.start_consumer("--until", "caught-up") for _ in range(2)]
        codes = [one.wait(120) for one in both]
    assert process.DONE in codes
    copied.assert_equal()
