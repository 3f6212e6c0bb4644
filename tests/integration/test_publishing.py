"""events/publishing: every committed change arrives at RabbitMQ, once and in order, or its table stops."""

from __future__ import annotations

import json
import re
import urllib.request
from datetime import UTC, datetime, timedelta

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.metrics.publisher import PublisherCollector
from airflow_provider_pgrepl.replication.app.needed_changes import retention
from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.app.publish import _durable_after, main
from airflow_provider_pgrepl.replication.app.status.status import read_status
from airflow_provider_pgrepl.replication.app.status.text import to_json as to_json_text
from airflow_provider_pgrepl.replication.app.status.text import to_text
from airflow_provider_pgrepl.replication.changelog.gaps import Gap, record_gap
from airflow_provider_pgrepl.replication.changelog.layout import STATUS_ORDINAL
from airflow_provider_pgrepl.replication.changelog.maintenance import drop_expired
from airflow_provider_pgrepl.replication.delta.table import open_delta, query_delta
from airflow_provider_pgrepl.replication.events.formats.json_text import to_json
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.record import (
    PublisherProgress,
    publisher_uri,
    read_record,
)
from airflow_provider_pgrepl.replication.events.reader import ChangeReader
from airflow_provider_pgrepl.replication.pgoutput.columns import TransactionBegin
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.runtime.metrics_endpoint import serve_metrics
from tests.support.rabbitmq import Message, Queue, applied
from tests.support.replicated import execute


def ids(messages: list[Message]) -> list[str]:
    return [message.id for message in messages]


def test_every_change_arrives_in_order_as_the_reader_has_it(published, dsn):
    execute(dsn, "insert into t select g, 'v' || g, g, now() from generate_series(1, 30) g")
    execute(dsn, "update t set v = null where id < 4", "insert into other values (1, 'é')", "delete from t")
    execute(dsn, "truncate t, other", 'insert into "S.1"."a#b" values (1)')
    published.receive()
    found = published.publish()
    expected = [change for batch in ChangeReader(published.pipeline).read() for change in batch]
    assert [message.event for message in found] == [json.loads(to_json(change)) for change in expected]
    assert ids(found) == [change.id for change in expected]
    assert {message.routing_key for message in found} == {
        "public.t.insert",
        "public.t.update",
        "public.t.delete",
        "public.t.truncate",
        "public.other.insert",
        "public.other.truncate",
        "S%2E1.a%23b.insert",
    }
    assert len({message.generation for message in found}) == 1
    assert {message.properties.type for message in found} == {"insert", "update", "delete", "truncate"}
    assert found[0].properties.timestamp == int(expected[0].commit_ts.timestamp())


def test_the_next_run_goes_on_where_the_last_one_ended(published, dsn):
    execute(dsn, "insert into t values (1)")
    published.receive()
    first = published.publish()
    assert published.publish() == []
    execute(dsn, "insert into t values (2)")
    published.receive()
    second = published.publish()
    assert [message.event["data"]["id"] for message in first + second] == [1, 2]
    assert published.record.published == 2


def test_only_the_named_tables_are_published_new_ones_of_a_schema_too(published, dsn):
    published.publisher(tables=["public.other", '"S.1".*'])
    execute(
        dsn, "insert into t values (1)", "insert into other values (1)", 'insert into "S.1"."a#b" values (1)'
    )
    published.receive()
    assert [m.event["table"] for m in published.publish()] == ["public.other", '"S.1"."a#b"']


def test_a_stopped_table_that_is_not_wanted_any_more_stops_nothing(published, dsn, caplog):
    published.publisher(max_event_bytes=500)
    execute(dsn, "insert into t values (1, repeat('x', 600))", "insert into other values (1)")
    published.receive()
    assert len(published.publish(code=process.WILL_NOT_HELP)) == 1
    published.publisher(tables=["public.other"])
    assert published.publish() == []
    assert "public.t, which had stopped, is not of this publisher any more" in caplog.text
    assert published.record.stopped == {}


@pytest.mark.thorough("test_begins_again_where_it_is_told_and_says_what_came_before")
def test_begins_with_what_is_new_where_that_is_asked_for(published, dsn):
    published.publisher(begin="newest")
    execute(dsn, "insert into t values (1)")
    published.receive()
    assert published.publish() == []
    execute(dsn, "insert into t values (2)")
    published.receive()
    assert [m.event["data"]["id"] for m in published.publish()] == [2]


def test_begins_again_where_it_is_told_and_says_what_came_before(published, dsn):
    execute(dsn, *(f"insert into t values ({n})" for n in range(3)))
    published.receive()
    first = published.publish()
    again = published.publish("--after", first[0].id)
    assert ids(again) == ids(first)[1:]
    assert min(message.generation for message in again) > max(message.generation for message in first)


def test_an_unroutable_event_stops_its_table_alone_until_there_is_a_queue(published, dsn, broker):
    published.queue.delete()
    exchange = f"pgrepl.{published.pipeline.name}"
    others = Queue(broker.uri, exchange, f"{exchange}.others", "public.other.*")
    execute(dsn, "insert into t values (1)", "insert into other values (1)", "insert into t values (2)")
    published.receive()
    assert published.run_publisher() == process.WILL_NOT_HELP
    assert [m.event["table"] for m in others.take()] == ["public.other"]
    (stopped,) = published.record.stopped.values()
    assert stopped.table == "public.t"
    assert "has no queue for routing key public.t.insert" in stopped.reason
    execute(dsn, "insert into t values (3)", "insert into other values (2)")
    published.receive()
    all_of_t = Queue(broker.uri, exchange, f"{exchange}.t", "public.t.*")
    assert published.run_publisher() == process.DONE
    assert [m.event["data"]["id"] for m in all_of_t.take()] == [1, 2, 3]
    assert [m.event["data"]["id"] for m in others.take()] == [2]
    assert published.record.stopped == {}


@pytest.mark.thorough("test_an_unroutable_event_stops_its_table_alone_until_there_is_a_queue")
def test_unroutable_events_are_dropped_where_that_is_asked_for(published, dsn, broker):
    published.publisher(unrouted="drop")
    published.queue.delete()
    exchange = f"pgrepl.{published.pipeline.name}"
    others = Queue(broker.uri, exchange, f"{exchange}.others", "public.other.*")
    execute(dsn, "insert into t values (1)", "insert into other values (1)")
    published.receive()
    assert published.run_publisher() == process.DONE
    assert len(others.take()) == 1
    assert published.record.stopped == {}


@pytest.mark.parametrize("limit", [50_000, 16 << 20])
@pytest.mark.thorough(
    "our limit in test_oversized_event_is_skipped_and_recorded_with_skip_and_record", "50000"
)
def test_an_event_that_is_too_large_stops_its_table_whoever_says_so(published, dsn, limit):
    """Ours is below the broker's own limit of 100,000 bytes, or far above it."""
    published.publisher(max_event_bytes=limit)
    execute(dsn, *(f"insert into t values ({n})" for n in range(20)))
    execute(dsn, "insert into t select 20, string_agg(md5(g::text), '') from generate_series(1, 4000) g")
    execute(dsn, *(f"insert into other values ({n})" for n in range(20)), "insert into t values (21)")
    published.receive()
    found = published.publish(code=process.WILL_NOT_HELP)
    of = {table: [m for m in found if m.event["table"] == table] for table in ("public.t", "public.other")}
    assert {m.event["data"]["id"] for m in of["public.other"]} == set(range(20))
    assert {m.event["data"]["id"] for m in of["public.t"]} >= set(range(20))
    assert 20 not in {m.event["data"]["id"] for m in of["public.t"]}
    (stopped,) = published.record.stopped.values()
    assert "bytes" in stopped.reason or "max size" in stopped.reason


def test_oversized_event_is_skipped_and_recorded_with_skip_and_record(published, dsn):
    published.publisher(max_event_bytes=50_000, on_error="skip_and_record")
    execute(dsn, "insert into t values (1)")
    execute(dsn, "insert into t select 2, string_agg(md5(g::text), '') from generate_series(1, 4000) g")
    execute(dsn, "insert into t values (3)")
    published.receive()
    found = published.publish()
    assert [m.event["data"]["id"] for m in found] == [1, 3]
    skipped = query_delta(
        open_delta(publisher_uri(published.pipeline.lake_root, "events")), "select * from it"
    )
    (row,) = skipped.to_pylist()
    assert (row["table"], "bytes" in row["reason"]) == ("public.t", True)
    assert found[0].position < EventPosition.parse(row["id"]) < found[1].position
    assert published.record.skipped == 1


@pytest.mark.thorough("test_a_table_that_takes_the_name_of_a_stopped_one_waits_with_it, by the same value")
def test_a_value_that_no_type_holds_stops_its_table_and_goes_on_once_it_is_a_text(published, dsn):
    execute(dsn, "insert into t values (1)", "insert into t values (2, null, null, 'infinity')")
    execute(dsn, "insert into other values (1)", "insert into t values (3)")
    published.receive()
    found = published.publish(code=process.WILL_NOT_HELP)
    assert [(m.event["table"], m.event["data"]["id"]) for m in found] == [
        ("public.t", 1),
        ("public.other", 1),
    ]
    (stopped,) = published.record.stopped.values()
    assert (stopped.table, stopped.error) == ("public.t", "ValueRangeError")
    published.configure(text_columns=("public.t.at",))
    found = published.publish()
    assert [m.event["data"]["id"] for m in found] == [2, 3]
    assert found[0].event["data"]["at"] == "infinity"


def test_a_publisher_that_missed_changes_says_which_and_begins_again_where_it_is_told(published, dsn, caplog):
    execute(dsn, "insert into t values (1)")
    published.receive()
    published.publish()
    before = published.record.position
    execute(dsn, "insert into t values (2)")
    published.receive()
    later = datetime.now(UTC) + timedelta(hours=400)
    everybody_else = LSN(int(published.durable_lsn))
    kept = retention(published.pipeline, 1, everybody_else)
    retention_h = published.pipeline.changelog_retention_h
    assert drop_expired(published.pipeline.lake_root, retention_h, kept.needed_above, later).files == 0
    ((hours, needed),) = kept.needed_later
    assert (hours, drop_expired(published.pipeline.lake_root, hours, needed, later).files > 0) == (
        336.0,
        True,
    )
    execute(dsn, "insert into t values (3)")
    published.receive()
    assert published.run_publisher() == process.WILL_NOT_HELP
    record = published.record
    assert record.error == "ChangelogError"
    assert f"those after {before} are asked for" in record.reason
    assert "pgrepl publish FILE.json --publisher events --after LSN" in record.hint
    assert "pgrepl publish FILE.json" in caplog.text
    found = published.publish("--after", str(everybody_else))
    assert [m.event["data"]["id"] for m in found] == [3]
    assert published.record.error == ""


def test_status_says_where_publishers_are_and_what_stopped(published, dsn, monkeypatch):
    def text() -> str:
        return to_text(read_status(published.pipeline))

    assert "events     rabbitmq  not begun" in text()
    published.publisher(max_event_bytes=50_000)
    execute(dsn, "insert into other values (1)")
    execute(dsn, "insert into t select 2, string_agg(md5(g::text), '') from generate_series(1, 4000) g")
    published.receive()
    published.publish(code=process.WILL_NOT_HELP)
    shown = text()
    assert f"events     rabbitmq  {published.record.position}" in shown
    assert "publisher events: public.t: TargetError, stopped after 1:" in shown
    (publisher,) = json.loads(to_json_text(read_status(published.pipeline)))["publishers"]
    assert (publisher["published"], publisher["stopped"][0]["table"]) == (1, "public.t")


def test_metrics_are_served_while_it_runs(published, dsn, monkeypatch):
    address = ("127.0.0.1", 0)
    progress = PublisherProgress(published=7, published_lsn=LSN(100), durable_lsn=LSN(201), is_connected=True)
    collector = PublisherCollector("shop", "events", lambda: progress)
    with serve_metrics("metrics", address, collector) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
        taken = serve_metrics("metrics", ("127.0.0.1", port), collector)
        with pytest.raises(ConfigError, match=f"metrics: cannot listen on 127.0.0.1:{port}"):
            taken.__enter__()
    assert 'pgrepl_publisher_events_total{pipeline="shop",publisher="events"} 7.0' in text
    assert 'pgrepl_publisher_lag_bytes{pipeline="shop",publisher="events"} 100.0' in text


def test_a_gap_stops_the_tables_that_it_may_have_changed(published, dsn, pg):
    execute(dsn, "insert into t values (1)", "insert into other values (1)")
    published.receive()
    published.publish()
    with pg.cursor() as cursor:
        cursor.execute("select 't'::regclass::oid")
        ((oid,),) = cursor.fetchall()
    lsn = LSN(published.durable_lsn + 8)
    begun = TransactionBegin(lsn, 99, int(datetime.now(UTC).timestamp() * 1_000_000))
    record_gap(published.pipeline.lake_root, Gap(begun, frozenset({oid}), "too large"), None)
    execute(dsn, "insert into other values (2)", "insert into t values (2)")
    published.receive()
    found = published.publish(code=process.WILL_NOT_HELP)
    assert [m.event["table"] for m in found] == ["public.other"]
    (stopped,) = published.record.stopped.values()
    assert (stopped.table, stopped.error) == ("public.t", "GapError")
    published.publisher(on_error="skip_and_record")
    assert [(m.event["table"], m.event["data"]["id"]) for m in published.publish()] == [("public.t", 2)]
    assert (published.record.stopped, published.record.skipped) == ({}, 1)


def test_table_stop_records_earliest_failing_event_even_if_detected_later(published, dsn):
    """The value that no type holds is found while earlier events, which no queue takes, are on their way."""
    published.queue.delete()
    execute(
        dsn,
        *(f"insert into t values ({n})" for n in range(5)),
        "insert into t values (5, null, null, 'infinity')",
    )
    published.receive()
    assert published.run_publisher() == process.WILL_NOT_HELP
    (first,) = published.record.stopped.values()
    assert "has no queue" in first.reason
    assert published.run_publisher() == process.WILL_NOT_HELP
    assert [*published.record.stopped.values()] == [first]
    published.configure(text_columns=("public.t.at",))
    queue = Queue(
        published.broker.uri, f"pgrepl.{published.pipeline.name}", f"{published.pipeline.name}.again"
    )
    assert published.run_publisher() == process.DONE
    assert [m.event["data"]["id"] for m in queue.take()] == list(range(6))


@pytest.mark.thorough("test_an_event_that_is_too_large_stops_its_table_whoever_says_so, among 40 events")
def test_large_events_that_the_broker_refuses_are_found_among_many(published, dsn):
    published.publisher(on_error="skip_and_record")
    large = "select {}, string_agg(md5(g::text), '') from generate_series(1, 4000) g"
    execute(
        dsn, "insert into t select g from generate_series(1, 9000) g", f"insert into t {large.format(9001)}"
    )
    execute(
        dsn,
        "insert into other select g from generate_series(1, 6000) g",
        f"insert into t {large.format(9002)}",
    )
    execute(dsn, "insert into t values (9003)")
    published.receive()
    found = published.publish()
    assert {m.event["data"]["id"] for m in found if m.event["table"] == "public.t"} == {*range(1, 9001), 9003}
    assert published.record.skipped == 2


def test_a_uri_that_cannot_be_read_is_not_shown(published, monkeypatch, caplog):
    for uri in ("nonsense", "amqp://u:canary@h:1/%2F?ssl_options=(", "http://u:canary@h/x"):
        caplog.clear()
        monkeypatch.setenv(TARGET_VARIABLE, uri)
        assert published.run_publisher() == process.WILL_NOT_HELP, uri
        assert "the URI of RabbitMQ cannot be read" in caplog.text, uri
        assert "canary" not in caplog.text, uri


def test_a_login_that_is_refused_ends_it(published, broker, monkeypatch, caplog):
    monkeypatch.setenv(TARGET_VARIABLE, broker.uri.replace("guest:guest", "guest:canary"))
    assert published.run_publisher() == process.WILL_NOT_HELP
    assert re.search(r"RabbitMQ at \S+:\d+: the login of \w+ was refused", caplog.text)
    assert published.record.error == "TargetError"
    monkeypatch.setenv(TARGET_VARIABLE, broker.uri.replace("%2F", "nowhere"))
    assert published.run_publisher() == process.WILL_NOT_HELP
    assert "the virtual host nowhere was refused to" in caplog.text
    assert "canary" not in caplog.text


def test_a_bad_limit_takes_no_publishers_place(published):
    with pytest.raises(SystemExit) as ended:
        main(["--pipeline", str(published.file), "--publisher", "events", "--until", "now"])
    assert ended.value.code == process.WILL_NOT_HELP
    assert read_record(published.pipeline.lake_root, "events") is None


@pytest.mark.thorough("test_a_login_that_is_refused_ends_it")
def test_publisher_without_write_permission_exits_78_and_records_reason(published, dsn, broker, monkeypatch):
    broker.control("add_user", "reader", "canary")
    broker.control("set_permissions", "reader", "", "", ".*")
    monkeypatch.setenv(TARGET_VARIABLE, broker.uri.replace("guest:guest", "reader:canary"))
    execute(dsn, "insert into t values (1)")
    published.receive()
    assert published.run_publisher() == process.WILL_NOT_HELP
    assert "access to exchange" in published.record.reason
    monkeypatch.setenv(TARGET_VARIABLE, broker.uri)
    assert len(published.publish()) == 1


def test_a_table_that_takes_the_name_of_a_stopped_one_waits_with_it(published, dsn):
    """Consumers know tables by name: what the first one has missed comes before what the other has."""
    execute(dsn, "insert into other values (0)", "insert into t values (1, null, null, 'infinity')")
    published.receive()
    assert len(published.publish(code=process.WILL_NOT_HELP)) == 1
    execute(dsn, "alter table t rename to t_old", "alter table other rename to t", "insert into t values (2)")
    published.receive()
    assert published.run_publisher() == process.WILL_NOT_HELP
    assert published.queue.take() == []
    published.configure(text_columns=("public.t.at",))
    found = published.publish()
    assert [(m.event["table"], m.event["data"]["id"]) for m in found] == [("public.t", 1), ("public.t", 2)]
    assert published.record.stopped == {}


def test_a_stopped_table_whose_changes_are_gone_stays_stopped_alone(published, dsn):
    execute(dsn, "insert into t values (1, null, null, 'infinity')", "insert into other values (1)")
    published.receive()
    published.publish(code=process.WILL_NOT_HELP)
    later = datetime.now(UTC) + timedelta(hours=400)
    drop_expired(published.pipeline.lake_root, 1.0, {1: int(published.durable_lsn)}, later)
    execute(dsn, "insert into other values (2)", "insert into t values (2)")
    published.receive()
    found = published.publish(code=process.WILL_NOT_HELP)
    assert [(m.event["table"], m.event["data"]["id"]) for m in found] == [("public.other", 2)]
    (stopped,) = published.record.stopped.values()
    assert (stopped.error, stopped.is_lost) == ("ChangelogError", True)
    assert published.record.needed_after == published.record.position
    published.publisher(on_error="skip_and_record")
    assert [m.event["data"]["id"] for m in published.publish()] == [2]
    assert (published.record.stopped, published.record.skipped) == ({}, 1)


def large(number: int, of: int) -> str:
    return f"select {number}, string_agg(md5(g::text), '') from generate_series(1, {of // 32}) g"


@pytest.mark.thorough("test_a_table_that_takes_the_name_of_a_stopped_one_waits_with_it")
def test_a_table_that_stops_while_others_catch_up_stops_none_of_them(published, dsn):
    """It has the name of one of them, and so is caught up with them."""
    published.publisher(max_event_bytes=50_000)
    execute(dsn, f"insert into t(id, v) {large(1, 60_000)}", f"insert into other {large(1, 60_000)}")
    published.receive()
    assert published.publish(code=process.WILL_NOT_HELP) == []
    execute(
        dsn,
        "alter table t rename to t_old",
        'alter table "S.1"."a#b" add v text',
        'alter table "S.1"."a#b" set schema public',
        'alter table public."a#b" rename to t',
        f"insert into t {large(7, 90_000)}",
        "insert into other values (2, 'x')",
        "insert into t_old values (3, 'x')",
    )
    published.receive()
    published.publisher(max_event_bytes=80_000)
    found = published.publish(code=process.WILL_NOT_HELP)
    assert [(m.event["table"], m.event["data"]["id"]) for m in found] == [
        ("public.t", 1),
        ("public.other", 1),
        ("public.other", 2),
        ("public.t_old", 3),
    ]
    (stopped,) = published.record.stopped.values()
    assert "public.t" in stopped.names
    published.publisher()
    found = published.publish()
    assert [(m.event["table"], m.event["data"]["id"]) for m in found] == [("public.t", 7)]
    assert published.record.stopped == {}


@pytest.mark.thorough("test_a_table_that_takes_the_name_of_a_stopped_one_waits_with_it")
def test_a_table_that_was_renamed_since_it_stopped_comes_before_who_has_its_name_now(published, dsn):
    published.publisher(max_event_bytes=50_000)
    execute(dsn, f"insert into t(id, v) {large(1, 60_000)}")
    published.receive()
    assert published.publish(code=process.WILL_NOT_HELP) == []
    execute(dsn, "alter table t rename to k", "insert into k values (2, 'of the first')")
    published.receive()
    execute(
        dsn,
        "alter table k rename to k_old",
        "alter table other rename to k",
        "insert into k values (3, 'now')",
    )
    published.receive()
    early = published.publish(code=process.WILL_NOT_HELP)
    published.publisher()
    late = published.publish()
    kept = [(m.event["table"], m.event["data"]["id"]) for m in applied([*early, *late])]
    assert [pair for pair in kept if pair[0] == "public.k"][-2:] == [("public.k", 2), ("public.k", 3)]
    assert ("public.t", 1) in kept


def test_a_place_right_before_what_comes_next_is_not_beyond_the_changelog(published, dsn):
    """A publication status of the receiver has the LSN of the next transaction."""
    execute(dsn, "insert into t values (1, 'v')")
    published.receive()
    durable = published.durable_lsn
    before, amid = (EventPosition(Epoch(1), durable, ordinal) for ordinal in (STATUS_ORDINAL, 0))

    class NeverSet:
        def wait(self, _: float) -> bool:
            return True

    assert _durable_after(published.pipeline, before, NeverSet()) == durable
    reader = ChangeReader(published.pipeline, after=before)
    assert list(reader.read()) == [], "who goes on there is not refused"
    with pytest.raises(ConfigError, match="is beyond"):
        ChangeReader(published.pipeline, after=amid)
    assert _durable_after(published.pipeline, amid, NeverSet()) is None
