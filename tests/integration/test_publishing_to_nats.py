"""Every committed change arrives at JetStream on creek's wire: in order, each with a stamp of its own."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.app.publish import main
from airflow_provider_pgrepl.replication.events.publish.record import read_record
from demo.nats import NatsServer
from demo.postgres import free_port
from tests.conftest import closing_connection
from tests.support.certificates import make_certificate
from tests.support.jetstream import CreekMessage, CreekStream, creek_applied, running_nats
from tests.support.publishing import publishing_in_thread
from tests.support.received import Received
from tests.support.replicated import execute, wait_until


class Published(Received):
    """A pipeline with one publisher to NATS, whose app is run in the test's process."""

    stream: CreekStream

    def publish(self, *arguments: str, code: int = process.DONE) -> list[CreekMessage]:
        """All that the stream holds after a run."""
        assert self.run_publisher(*arguments) == code
        return self.stream.messages()

    def run_publisher(self, *arguments: str) -> int:
        return main(
            ["--pipeline", str(self.file), "--publisher", "events", "--until", "caught-up", *arguments]
        )

    def changed(self, *statements: str) -> list[CreekMessage]:
        """Run statements, receive and publish them, and return the messages that this adds."""
        before = len(self.stream.messages())
        execute(self.dsn, *statements)
        self.receive()
        return self.publish()[before:]

    def publisher(self, **settings: Any) -> None:
        given = {"target": "nats", "database": self.pipeline.name, **settings}
        self.configure(publishers={"events": given})


TABLES = ("public.t", "public.other")


@pytest.fixture
def published(dsn: str, tmp_path: Path, jetstream: NatsServer, monkeypatch: pytest.MonkeyPatch) -> Published:
    monkeypatch.setenv("PGREPL_DSN", dsn)
    monkeypatch.setenv(TARGET_VARIABLE, jetstream.uri)
    execute(
        dsn,
        "create table t(id int primary key, v text, n numeric, j jsonb, big text)",
        "alter table t alter big set storage external",
        "create table other(id int primary key, v text)",
    )
    pipeline = Published(dsn, tmp_path, TABLES, flush_interval_s=0.05)
    pipeline.begin()
    pipeline.publisher()
    pipeline.stream = CreekStream(jetstream.uri, pipeline.pipeline.name)
    return pipeline


def assert_stamps_grow(messages: list[CreekMessage]) -> None:
    stamps = [message.stamp for message in messages]
    assert stamps == sorted(set(stamps))
    assert len({message.id for message in messages}) == len(messages)
    assert all(message.stamp >= message.position.commit_lsn for message in messages)


def test_changes_arrive_as_creek_says_them(published):
    began = datetime.now(UTC)
    first, changed, moved, gone, emptied = published.changed(
        "insert into other values (1, 'test')",
        "update other set v = 'cool'",
        "update other set id = 2",
        "delete from other",
        "truncate other",
    )
    assert first.subject == f"{published.stream.wal}.public.other"
    assert (first.op, first.value["before"], first.value["after"]) == ("c", None, {"id": 1, "v": "test"})
    assert (changed.op, changed.value["before"]) == ("u", {"id": 1})
    assert changed.value["after"] == {"id": 1, "v": "cool"}
    assert (moved.op, moved.value["before"]) == ("u_pk", {"id": 1})
    assert (gone.op, gone.value["before"], gone.value["after"]) == ("d", {"id": 2}, None)
    assert (emptied.op, emptied.value["before"], emptied.value["after"]) == ("t", None, None)
    source = first.value["source"]
    assert (source["name"], source["db"]) == ("dummy", published.pipeline.name)
    assert (source["schema"], source["table"]) == ("public", "other")
    assert first.value["sent_at"] >= source["tx_at"] >= began
    assert_stamps_grow([first, changed, moved, gone, emptied])


def test_schemas_are_published_once_a_version_and_answered_by_fingerprint(published):
    published.changed("insert into other values (1, 'a')")
    published.changed("insert into other values (2, 'b')")
    (first,) = published.stream.schemas()
    published.changed("alter table other add w date", "insert into other values (3, 'c', '2024-02-29')")
    published.changed("alter table other drop w", "insert into other values (4, 'd')")
    schemas = published.stream.schemas()
    assert [one["source"] for one in schemas] == ["public.other"] * 3
    assert schemas[0] == first == schemas[2], "also when it was made"
    assert schemas[1]["fingerprint"] != first["fingerprint"]
    assert [message.value["after"] for message in published.stream.messages()][2:] == [
        {"id": 3, "v": "c", "w": date(2024, 2, 29)},
        {"id": 4, "v": "d"},
    ]


# --- what creek loses ---


def test_rows_of_one_copy_all_arrive(published, dsn):
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.copy_expert("copy other from stdin", StringIO("".join(f"{i}\tx\n" for i in range(100))))
    published.receive()
    messages = published.publish()
    assert [message.value["after"]["id"] for message in messages] == [*range(100)]
    assert_stamps_grow(messages)


def test_interleaved_transactions_all_arrive_in_the_order_of_their_commits(published, dsn):
    with closing_connection(dsn) as one, closing_connection(dsn) as two:
        for connection in (one, two):
            connection.autocommit = False
        cursors = one.cursor(), two.cursor()
        for number in range(50):
            for place, cursor in enumerate(cursors):
                cursor.execute("insert into other values (%s, 'x')", (1_000 * place + number,))
        two.commit()
        one.commit()
    published.receive()
    messages = published.publish()
    assert [message.value["after"]["id"] for message in messages] == [*range(1_000, 1_050), *range(50)]
    assert_stamps_grow(messages)


def test_large_values_that_an_update_does_not_touch_are_said_to_be_missing(published):
    published.changed("insert into t select g, 'a', g, null, repeat('x', 9000) from generate_series(1, 10) g")
    updates = published.changed("update t set v = 'b'")
    assert [message.value["after"]["v"] for message in updates] == ["b"] * 10
    assert {message.headers["Creek-Unchanged"] for message in updates} == {"big"}
    published.changed("alter table t replica identity full", "update t set v = 'c' where id = 1")
    (whole,) = published.changed("update t set v = 'd' where id = 1")
    assert "Creek-Unchanged" not in whole.headers
    assert (whole.op, whole.value["after"]["big"]) == ("u_pk", "x" * 9000)
    assert whole.value["before"]["big"] == "x" * 9000


def test_no_null_is_sent_for_a_value_that_is_not_known_where_that_is_required(published, dsn):
    published.changed("insert into t select g, 'a', g, null, repeat('x', 9000) from generate_series(1, 10) g")
    published.publisher(unchanged="require", on_error="skip_and_record")
    assert published.changed("update t set v = 'b' where id < 3") == []
    (sent,) = published.changed("update t set v = 'c', big = 'y' where id = 3")
    assert sent.value["after"]["big"] == "y"
    published.publisher(unchanged="require")
    before = len(published.stream.messages())
    execute(dsn, "update t set v = 'd' where id = 4", "insert into other values (1, 'a')")
    published.receive()
    (other,) = published.publish(code=process.WILL_NOT_HELP)[before:]
    assert other.subject.endswith(".other")
    record = read_record(published.pipeline.lake_root, "events")
    assert record is not None
    (stopped,) = record.stopped.values()
    assert "neither the changelog nor the lake can tell its value" in stopped.reason


def test_json_and_numerics_arrive_exactly(published):
    texts = ['{"b": 12345678901234567890, "a": "<&>"}', "[1, 2]", '"s"', "5", "null"]
    rows = ", ".join(f"({place}, 'v', 1e30 / 3, '{text}')" for place, text in enumerate(texts))
    messages = published.changed(f"insert into t values {rows}, (9, 'v', 'NaN', null)")
    found = [message.value["after"]["j"] for message in messages]
    assert [json.loads(text) for text in found[:-1]] == [json.loads(text) for text in texts]
    assert b"12345678901234567890" in found[0]
    assert found[-1] is None
    numbers = [message.value["after"]["n"] for message in messages]
    assert numbers[0] == "333333333333333333333333333333.33333333333333333333"[: len(numbers[0])]
    assert numbers[-1] == "NaN"


def test_a_truncate_of_two_tables_is_two_messages(published):
    messages = published.changed("truncate t, other")
    assert {message.subject.rpartition(".")[2] for message in messages} == {"t", "other"}
    assert {message.op for message in messages} == {"t"}
    assert_stamps_grow(messages)


# --- what goes wrong ---


def test_value_avro_cannot_encode_stops_only_its_table_until_text_column(published, dsn):
    execute(dsn, "alter table other add a int[]")
    execute(dsn, "insert into other values (1, 'x', '{1,NULL}')", "insert into t(id) values (1)")
    published.receive()
    (message,) = published.publish(code=process.WILL_NOT_HELP)
    assert message.subject.endswith(".t")
    record = read_record(published.pipeline.lake_root, "events")
    assert record is not None
    (stopped,) = record.stopped.values()
    assert 'column "a" of public.other' in stopped.reason
    published.configure(text_columns=("public.other.a",))
    *_, late = published.publish()
    assert late.value["after"] == {"id": 1, "v": "x", "a": "{1,NULL}"}


def test_an_event_that_is_larger_than_the_server_takes_stops_its_table(published, dsn):
    execute(
        dsn, "insert into t(id, big) values (1, repeat('x', 300000))", "insert into other values (1, 'a')"
    )
    published.receive()
    (message,) = published.publish(code=process.WILL_NOT_HELP)
    assert message.subject.endswith(".other")


@pytest.mark.thorough("test_an_event_that_is_larger_than_the_server_takes_stops_its_table")
def test_a_stream_that_takes_less_than_the_server_says_so_of_one_event(published, dsn):
    published.stream.make(max_msg_size=5_000)
    execute(dsn, "insert into t(id, big) values (1, repeat('x', 9000))", "insert into other values (1, 'a')")
    published.receive()
    (message,) = published.publish(code=process.WILL_NOT_HELP)
    assert message.subject.endswith(".other")


@pytest.mark.parametrize("last", ["nothing", "somebody else's"])
@pytest.mark.thorough("the same test, with somebody else's messages", "nothing")
def test_stamps_go_on_growing_whatever_became_of_the_stream(published, last):
    messages = published.changed("insert into other select g, 'x' from generate_series(1, 3000) g")
    published.stream.purge()
    if last != "nothing":
        published.stream.put(f"{published.stream.wal}.public.other", b"x")
        published.stream.put(f"{published.stream.schema}.public.other", b"")
    execute(published.dsn, "insert into other values (0, 'y')")
    published.receive()
    assert published.run_publisher() == process.DONE
    published.stream.put(f"{published.stream.wal}.public.other", b"x")
    later = [one for one in published.stream.raw(published.stream.wal) if len(one.data) > 6]
    (message,) = published.stream.decoded(later)
    assert message.value["after"]["id"] == 0
    assert_stamps_grow([*messages, message])


def test_oversized_event_accepted_later_does_not_override_newer_value(published, dsn):
    published.publisher(max_event_bytes=5000)
    execute(
        dsn,
        "insert into other values (1, 'first')",
        "update other set v = repeat('x', 9000)",
        "update other set v = 'final'",
    )
    published.receive()
    published.publish(code=process.WILL_NOT_HELP)
    published.publisher()
    *_, last = creek_applied(published.publish())
    assert last.value["after"]["v"] == "final"


def test_creek_client_applies_republished_events_again(published):
    published.changed("insert into other select g, 'x' from generate_series(1, 100) g")
    messages = published.publish("--after", "0/1")
    assert len({message.id for message in messages}) == 100
    assert [message.value["after"]["id"] for message in creek_applied(messages)] == [*range(1, 101)] * 2


@pytest.mark.thorough("test_an_event_that_is_larger_than_the_server_takes_stops_its_table")
def test_a_table_whose_schema_is_too_large_stops_alone(published, dsn):
    columns = ", ".join(
        f"a_column_with_a_long_name_that_goes_on_and_on_{number} text" for number in range(1500)
    )
    execute(dsn, f"create table wide(id int primary key, {columns})")
    execute(dsn, f"alter publication {published.pipeline.publication} add table wide")
    published.configure(tables=(*TABLES, "public.wide"))
    execute(dsn, "insert into wide values (1)", "insert into other values (1, 'a')")
    published.receive()
    (message,) = published.publish(code=process.WILL_NOT_HELP)
    assert message.subject.endswith(".other")


def test_a_schema_stream_that_has_other_things_too_does_no_harm(published):
    published.stream.make(published.stream.schema, subjects=[f"{published.stream.schema}.>", "foo"])
    published.stream.put("foo", b"x")
    assert len(published.changed("insert into other values (1, 'a')")) == 1


def test_names_that_subjects_and_avro_do_not_allow(published, dsn):
    execute(dsn, 'create schema "S.1"', 'create table "S.1"."a *b"("x y" int primary key, "x_y" text)')
    execute(dsn, f'alter publication {published.pipeline.publication} add table "S.1"."a *b"')
    published.configure(tables=(*TABLES, '"S.1"."a *b"'))
    (message,) = published.changed('insert into "S.1"."a *b" values (1, \'v\')')
    assert message.subject == f"{published.stream.wal}.S%2E1.a%20%2Ab"
    assert message.value["after"] == {"x_y_2": 1, "x_y": "v"}
    assert message.value["source"]["table"] == "a *b"


def test_a_uri_that_cannot_be_read_is_not_shown(published, monkeypatch, caplog):
    for uri in ("amqp://x", "nats://", "", "geheim", "nats://a:geheim@h:x", "nats://a:b#geheim@h"):
        monkeypatch.setenv(TARGET_VARIABLE, uri)
        assert published.run_publisher() == process.WILL_NOT_HELP, uri
        assert "geheim" not in caplog.text, uri


@pytest.mark.thorough("test_consuming: a copy is exact; test_snapshots_to_nats")
def test_random_changes_rebuild_the_tables(published, dsn):
    """The oracle is PostgreSQL: who applies what arrives has the source's rows."""
    chance = random.Random(7)
    for _ in range(6):
        for _ in range(40):
            key = chance.randrange(20)
            execute(
                dsn,
                chance.choice(
                    [
                        f"insert into other values ({key}, 'i{chance.random()}') on conflict do nothing",
                        f"update other set v = 'u{chance.random()}' where id = {key}",
                        f"delete from other where id = {key}",
                        f"update other set id = id + 100 where id = {key}"
                        f" and not exists (select from other where id = {key + 100})",
                    ]
                ),
            )
        published.receive()
        messages = published.publish()
    rows: dict[int, Any] = {}
    for message in messages:
        before, after = message.value["before"], message.value["after"]
        if message.op in ("u_pk", "d"):
            rows.pop(before["id"])
        if after is not None:
            rows[after["id"]] = after["v"]
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select id, v from other")
        assert rows == dict(cursor.fetchall())
    assert_stamps_grow(messages)


def test_dashboards_made_for_creek_show_the_publisher(published):
    port = free_port()
    published.publisher(metrics=f"127.0.0.1:{port}")
    execute(published.dsn, "insert into t values (1), (2)", "update other set v = 'x'", "delete from t")
    published.receive()

    def shown() -> str:
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                return answer.read().decode()
        except URLError:
            return ""

    labels = 'creek_pg_source="public.t",creek_producer_pg_op="%s",creek_stream_type="wal"'
    read = f"creek_producer_pg_reads{{{labels}}} 2.0"

    def counted() -> str | None:
        """Reads are counted before the position of their batch."""
        found = shown()
        return found if read % "delete" in found and "creek_producer_pg_behind_bytes 0.0" in found else None

    with publishing_in_thread(published):
        lines = wait_until(counted, what="the changes to be counted")
    assert read % "insert" in lines
    for line in (
        "creek_producer_wal_subscriptions 1.0",
        "creek_producer_pg_behind_bytes 0.0",
        "creek_producer_pg_behind_time 0.0",
        'log_messages_total{application="creek_producer",level="error"} 0.0',
        'pgrepl_publisher_target_up{pipeline="',
    ):
        assert line in lines, line
    position = next(line for line in lines.splitlines() if line.startswith("creek_producer_lsn "))
    assert float(position.split()[1]) >= published.durable_lsn


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder / "server.crt", folder / "server.key")
    return folder / "server.crt"


@pytest.fixture(scope="module")
def guarded(trusted: Path) -> Iterator[NatsServer]:
    """A server that requires TLS and a login."""
    key = trusted.with_suffix(".key")
    tls = f'tls {{ cert_file: "{trusted}", key_file: "{key}" }}'
    with running_nats(f"{tls}\nauthorization {{ user: someone, password: geheim }}") as server:
        yield server


def test_publisher_sends_events_to_trusted_nats_server(published, guarded, trusted, monkeypatch):
    uri = f"tls://someone:geheim@localhost:{guarded.port}"
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    monkeypatch.setenv(TARGET_VARIABLE, uri)
    published.stream = CreekStream(uri, published.pipeline.name)
    found = published.changed("insert into t(id) select generate_series(1, 100)")
    assert [message.value["after"]["id"] for message in found] == [*range(1, 101)]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        pytest.param("127.0.0.1", marks=pytest.mark.thorough("with localhost it is refused, too")),
    ],
)
def test_publisher_exits_78_on_untrusted_or_wrong_name_nats_certificate(
    published, guarded, trusted, monkeypatch, caplog, host
):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    if host != "localhost":
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    monkeypatch.setenv(TARGET_VARIABLE, f"tls://someone:geheim@{host}:{guarded.port}")
    execute(published.dsn, "insert into t(id) values (1)")
    published.receive()
    assert published.run_publisher() == process.WILL_NOT_HELP
    assert "its certificate was refused" in caplog.text
    assert ("self-signed" if host == "localhost" else "IP address mismatch") in caplog.text
    assert "geheim" not in caplog.text


def test_a_password_that_is_refused_ends_the_publisher(published, guarded, trusted, monkeypatch, caplog):
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    monkeypatch.setenv(TARGET_VARIABLE, f"tls://someone:falsch@localhost:{guarded.port}")
    assert published.run_publisher() == process.WILL_NOT_HELP
    assert "was refused" in caplog.text
    assert "falsch" not in caplog.text


@pytest.mark.thorough("test_stamps_go_on_growing_whatever_became_of_the_stream")
def test_a_publisher_under_another_name_goes_on_above_the_stamps_that_are_there(published):
    published.changed("insert into t(id) values (1)")
    published.changed("insert into t(id) values (2)")
    given = {"target": "nats", "database": published.pipeline.name, "begin": "newest"}
    published.configure(publishers={"renamed": given})
    renamed = ["--pipeline", str(published.file), "--publisher", "renamed", "--until", "caught-up"]
    execute(published.dsn, "insert into t(id) values (3)")
    published.receive()
    assert main([*renamed, "--after", published.stream.messages()[-1].id]) == process.DONE
    messages = published.stream.messages()
    assert [message.value["after"]["id"] for message in messages] == [1, 2, 3]
    assert_stamps_grow(messages)
