"""A publisher that would publish nothing, or elsewhere than it did, says so before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.changelog.relation_index import relations_uri
from airflow_provider_pgrepl.replication.events.publish.record import read_record
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.overview import OverviewRecords
from tests.conftest import closing_connection, fresh_database
from tests.support.rabbitmq import Queue
from tests.support.replicated import execute


def test_tables_that_there_never_were_are_refused_at_the_start(published, dsn, caplog):
    execute(dsn, "insert into t values (1)")
    published.receive()
    for given, says in (
        ({"tables": ["public.odrers", "public.t"]}, "names public.odrers, which the pipeline does not"),
        ({"tables": ["elsewhere.*"]}, "names elsewhere.*, which"),
        ({"outbox": {"table": "public.outbox"}}, "names public.outbox, which"),
        ({"transform": {"public.tt": "json:dumps"}}, "names public.tt, which"),
    ):
        published.publisher(**given)
        assert published.run_publisher() == process.WILL_NOT_HELP, given
        assert says in caplog.text
        assert published.queue.take() == [], given


def test_publisher_of_a_lake_other_than_the_recorded_one_is_rejected(published, dsn, tmp_path, caplog):
    """It would send the changes of another pipeline of the same name, and write its record there."""
    execute(dsn, "insert into t values (1)")
    published.receive()
    own = published.pipeline
    with StateDatabase(dsn, "test") as state_db:
        state_db.migrate()
        with closing_connection(dsn) as source:
            identifier = read_server(source).system_identifier
        state_db.register(own, identifier, slot_owned=True, publication_owned=True, lake_id="own")
    assert published.run_publisher() == process.WILL_NOT_HELP
    assert "that path now holds another lake" in caplog.text
    execute(dsn, "update _pgrepl.pipelines set lake = '/own'")
    assert published.run_publisher() == process.WILL_NOT_HELP
    assert f"the file names {own.lake_root}, which is another lake" in caplog.text
    assert published.queue.take() == []
    assert read_record(own.lake_root, "events") is None


def test_publisher_at_another_database_than_the_lakes_sends_nothing(
    published, dsn, server, monkeypatch, caplog
):
    """A staging database may be a dump of the source, with the record of the pipeline in it."""
    execute(dsn, "insert into t values (1)")
    published.receive()
    with fresh_database(server) as elsewhere:
        monkeypatch.setenv(process.DSN_VARIABLE, elsewhere)
        for state in (dsn, elsewhere):
            monkeypatch.setenv(process.STATE_DSN_VARIABLE, state)
            caplog.clear()
            assert published.run_publisher() == process.WILL_NOT_HELP
            assert "the connection leads to another database of that server" in caplog.text
    assert published.queue.take() == []
    assert read_record(published.pipeline.lake_root, "events") is None


def test_a_lake_that_cannot_be_read_just_now_is_tried_again(published, dsn, tmp_path):
    execute(dsn, "insert into t values (1)")
    published.receive()
    log = Path(relations_uri(published.pipeline.lake_root)) / "_delta_log"
    log.rename(tmp_path / "away")
    log.write_text("in its place")
    assert published.run_publisher() == process.RETRY_MAY_HELP
    log.unlink()
    (tmp_path / "away").rename(log)
    assert published.run_publisher() == process.DONE


def test_a_table_that_may_yet_come_under_a_pattern_is_waited_for_aloud(published, dsn, caplog):
    published.configure(tables=(*published.pipeline.tables, "public.*"))
    published.publisher(tables=["public.later", "public.t"])
    execute(dsn, "insert into t values (1)")
    published.receive()
    assert [m.event["table"] for m in published.publish()] == ["public.t"]
    assert "table public.later is not in the changelog yet" in caplog.text


def test_a_table_that_was_renamed_away_may_still_be_named(published, dsn):
    execute(dsn, "insert into t values (1)", "alter table t rename to t_old")
    published.receive()
    published.configure(tables=("public.t_old", "public.other"))
    published.publisher(tables=["public.t"])
    assert [m.event["data"]["id"] for m in published.publish()] == [1]


def test_a_new_column_waits_for_a_rule_where_new_columns_stop(published, dsn):
    execute(dsn, "insert into t values (1, 'a')", "insert into other values (1, 'a')")
    published.receive()
    published.publisher(new_columns="stop")
    assert {m.event["table"] for m in published.publish()} == {"public.t", "public.other"}
    execute(dsn, "alter table t add ssn text", "insert into t(id, ssn) values (2, 'classified')")
    execute(dsn, "insert into other values (2, 'b')")
    published.receive()
    assert [m.event["table"] for m in published.publish(code=process.WILL_NOT_HELP)] == ["public.other"]
    (stopped,) = published.record.stopped.values()
    assert (stopped.error, "(new_columns): ssn" in stopped.reason) == ("DriftError", True)
    published.publisher(new_columns="stop", mask_columns=["public.t.ssn"])
    (event,) = (m.event["data"] for m in published.publish())
    assert (event["id"], event["ssn"]) == (2, "***")


@pytest.mark.thorough(
    "test_a_new_column_waits_for_a_rule_where_new_columns_stop; test_publishing: begins again"
)
def test_beginning_again_takes_the_columns_of_then(published, dsn):
    published.publisher(new_columns="stop")
    execute(dsn, "insert into t values (1, 'a')")
    published.receive()
    published.publish()
    execute(dsn, "alter table t add note text", "insert into t(id, note) values (2, 'n')")
    published.receive()
    assert published.publish(code=process.WILL_NOT_HELP) == []
    after = str(published.record.needed_after)
    assert [m.event["data"]["note"] for m in published.publish("--after", after)] == ["n"]


def test_another_exchange_under_the_same_name_is_refused_and_begun_where_it_is_told(
    published, dsn, broker, caplog
):
    execute(dsn, "insert into t values (1)")
    published.receive()
    (first,) = published.publish()
    execute(dsn, "insert into t values (2)")
    published.receive()
    before = published.record
    published.publisher(exchange="elsewhere")
    there = Queue(broker.uri, "elsewhere", "elsewhere.all", "#")
    assert published.run_publisher() == process.WILL_NOT_HELP
    exchange = f"pgrepl.{published.pipeline.name}"
    assert f"has sent its events to rabbitmq: exchange {exchange}, and its settings now name" in caplog.text
    assert (published.record, there.take()) == (before, [])
    assert f"--after {before.needed_after}" in caplog.text
    assert published.run_publisher("--after", str(before.needed_after)) == process.DONE
    assert [m.event["data"]["id"] for m in there.take()] == [2]
    # From then on that exchange is its recorded destination.
    assert published.run_publisher() == process.DONE
    assert published.record.place == "rabbitmq: exchange elsewhere"
    assert first.event["data"]["id"] == 1


def test_publisher_reports_its_position_and_stopped_tables_to_the_state(published, dsn):
    with StateDatabase(dsn, "test") as state_db:
        state_db.migrate()
        with closing_connection(dsn) as source:
            identifier = read_server(source).system_identifier
        state_db.register(published.pipeline, identifier, slot_owned=True, publication_owned=True)
    execute(dsn, "insert into t values (1)")
    published.receive()
    published.publisher(tables=["public.t"])
    assert published.run_publisher() == process.DONE
    with OverviewRecords(dsn, 10) as records:
        [report] = records.read_publishers(published.pipeline.name)
    record = read_record(published.pipeline.lake_root, "events")
    assert (report.name, report.target, report.tables) == ("events", "rabbitmq", ("public.t",))
    assert report.published_lsn == record.position.commit_lsn > 0
    assert report.stopped == ()
