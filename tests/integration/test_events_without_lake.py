"""`lake_tables: none`: changelog and publisher in one process, without Spark and lake tables."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import psycopg2
import pytest

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.errors import ConfigError, LakeUnavailableError, RewoundError, TargetError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift
from airflow_provider_pgrepl.replication.app.operations.tables import pause_tables, retry_tables
from airflow_provider_pgrepl.replication.app.process import DSN_VARIABLE, TARGET_VARIABLE
from airflow_provider_pgrepl.replication.app.snapshot import resync
from airflow_provider_pgrepl.replication.app.source_snapshots import SourceSnapshots
from airflow_provider_pgrepl.replication.creek.client import CreekClient, Snapshot
from airflow_provider_pgrepl.replication.creek.messages import Row
from airflow_provider_pgrepl.replication.events.publish.record import read_record
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.postgres.names import TableName
from demo.nats import NatsServer
from tests.conftest import fresh_database
from tests.support.events_only import EventsOnly
from tests.support.installed import environment
from tests.support.jetstream import creek_applied
from tests.support.kafka import KafkaTopics
from tests.support.kept import A, B, kept_tables
from tests.support.rabbitmq import Queue
from tests.support.replicated import execute, kill, wait_until
from tests.support.without_spark import BLOCKED

IDLE_BYTES = 250 << 20
CLIENTS = {"nats": "nats", "rabbitmq": "pika", "kafka": "confluent_kafka"}
"""The module of a broker's client, by extra."""


@pytest.fixture
def begin(
    dsn: str, tmp_path: Path, jetstream: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., EventsOnly]:
    monkeypatch.setenv(TARGET_VARIABLE, jetstream.uri)
    monkeypatch.setenv(DSN_VARIABLE, dsn)

    def make(*tables: str, **options: Any) -> EventsOnly:
        return EventsOnly(dsn, tmp_path, tables, jetstream.uri, **options)

    return make


@pytest.fixture
def events(dsn: str, begin: Callable[..., EventsOnly]) -> EventsOnly:
    execute(
        dsn,
        "create table t (id int primary key, v text)",
        "create table other (id int primary key, v text)",
        "insert into t values (1, 'before')",
    )
    return begin("public.t", "public.other")


def test_one_small_process_without_spark_publishes_what_comes(events):
    running = events.launch("snapshot")
    assert running.wait(120) == process.DONE, events.log_tail()
    assert set(events.states().values()) == {"catching_up"}
    with events.at_work() as running:
        execute(events.dsn, "insert into t values (2, 'a')", "update t set v = 'b' where id = 2")
        events.wait_for(("t", "c", 2), ("t", "u", 2))
        wait_until(lambda: set(events.states().values()) == {"streaming"})
        one = psutil.Process(running.pid)
        assert one.children(recursive=True) == []
        wait_until(lambda: one.memory_info().rss <= IDLE_BYTES, 60, "memory that is not used to be free")
    assert events.seen() == [("t", "c", 2), ("t", "u", 2)]
    assert [path.name for path in Path(events.pipeline.lake_root).iterdir()] == ["_pgrepl"]


@pytest.mark.thorough("the test above; unit/test_packaging: programs import without the client of any broker")
def test_extra_of_a_broker_is_all_that_needs_to_be_installed(events, tmp_path):
    run_with_extra(events, tmp_path, "nats", events.uri)
    assert events.seen() == [("t", "c", 2), ("t", "d", 1)]


@pytest.mark.thorough("the same as above")
def test_extra_of_rabbitmq_is_all_that_needs_to_be_installed(events, broker, tmp_path):
    name = events.pipeline.name
    queue = Queue(broker.uri, f"pgrepl.{name}", f"q-{name}")
    events.configure(publishers={"events": {"target": "rabbitmq"}})
    run_with_extra(events, tmp_path, "rabbitmq", broker.uri)
    assert [message.event["op"] for message in queue.take()] == ["insert", "delete"]


def test_extra_of_kafka_is_all_that_needs_to_be_installed(events, kafka, tmp_path):
    topics = KafkaTopics(kafka.servers, events.pipeline.name)
    events.configure(publishers={"events": {"target": "kafka"}})
    run_with_extra(events, tmp_path, "kafka", kafka.uri)
    found = [message.value["op"] for message in topics.messages() if message.value]
    assert sorted(found) == ["delete", "insert"]


def run_with_extra(events: EventsOnly, folder: Path, extra: str, uri: str) -> None:
    """Publish an INSERT and a DELETE without pyspark, pandas, Airflow and Java, by the how-to's commands."""
    python = environment(folder / "venv", extra)
    env = {"PATH": str(python.parent), DSN_VARIABLE: events.dsn, TARGET_VARIABLE: uri}

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [str(python), "-P", *arguments]
        return subprocess.Popen(
            command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder
        )

    others = {*BLOCKED, *CLIENTS.values()} - {CLIENTS[extra]}
    missing = f"import importlib.util as u; print([n for n in {sorted(others)!r} if u.find_spec(n)])"
    assert start("-c", missing).communicate()[0] == "[]\n"
    for command in (["snapshot"], ["replicate", "--publish", "events", "--until", "caught-up"], ["status"]):
        running = start("-m", "airflow_provider_pgrepl", command[0], str(events.file), *command[1:])
        said, _ = running.communicate(timeout=300)
        assert running.returncode == process.DONE, said
        if command == ["snapshot"]:
            execute(events.dsn, "insert into t values (2, 'a')", "delete from t where id = 1")
    assert "2 streaming" in said


@pytest.mark.thorough("test_recorded_history: transitions, errors and schema changes are recorded once")
def test_course_of_a_pipeline_is_recorded(events):
    """Snapshot, start, DDL that is followed, DDL that is refused, stop: as the apps record them."""
    events.take()
    with events.at_work():
        wait_until(lambda: set(events.states().values()) == {"streaming"})
        execute(events.dsn, "alter table t add column w int", "insert into t values (2, 'a', 1)")
        wait_until(lambda: "schema_changed" in kinds(events, "t"))
        execute(events.dsn, "alter table other alter v type int using 1", "insert into other values (1, 1)")
        wait_until(lambda: events.states()["public.other"] == "errored")
    assert kinds(events, "t") == [
        *("pending", "snapshotting", "snapshot_taken", "catching_up", "streaming", "schema_changed")
    ]
    assert kinds(events, "other")[-1] == "errored"
    assert kinds(events)[-2:] == ["started", "stopped"]
    assert "epoch_begun" in kinds(events)
    with events.access.state_db("test") as state_db:
        found = state_db.read_events(events.pipeline.name, limit=1000)
    added = next(one for one in found if one.kind == "schema_changed")
    assert added.details == {"added": ["w"]}
    assert added.lsn is not None
    assert added.actor.startswith("pgrepl replicate on ")
    refused = next(one for one in found if one.to_state == "errored")
    assert (refused.error, refused.lsn is None) == ("DriftError", False)
    assert refused.hint


def kinds(events: EventsOnly, table: str | None = None) -> list[str]:
    """The recorded events of a table, or of the pipeline: the new state, or the kind."""
    with events.access.state_db("test") as state_db:
        found = state_db.read_events(events.pipeline.name, limit=1000)
    return [one.to_state or one.kind for one in found if (one.table.name if one.table else None) == table]


@pytest.mark.real_kill
@pytest.mark.parametrize("kills", [1, 2])
@pytest.mark.thorough(
    "fault/test_publishing_faults kills a publisher; test_consuming: a copy is exact whoever is killed"
)
def test_killed_at_any_moment_it_publishes_each_change_to_who_applies_by_the_rule(events, kills):
    events.take()
    over = threading.Event()

    def write() -> None:
        connection = psycopg2.connect(events.dsn)
        connection.autocommit = True
        with connection.cursor() as cursor:
            for number in range(100, 100_000):
                if over.wait(0.02):
                    break
                cursor.execute("insert into t values (%s, 'x')", (number,))
        connection.close()

    writing = threading.Thread(target=write)
    writing.start()
    chance = random.Random(7)
    try:
        for _ in range(kills):
            before = events.durable_lsn
            running = events.launch("replicate", "--publish", "events")
            try:
                wait_until(
                    lambda before=before: events.durable_lsn > before, what="a commit of the changelog"
                )
                over.wait(chance.random() * 2)
            finally:
                kill(running)
    finally:
        over.set()
        writing.join()
    events.catch_up()
    with events.source() as source, source.cursor() as cursor:
        cursor.execute("select id from public.t where id >= 100 order by id")
        # Events that may not have arrived come again, with the same id.
        keys = {one.id: one.value["after"]["id"] for one in events.stream.messages()}
        assert list(keys.values()) == [key for (key,) in cursor.fetchall()]


def snapshot(events: EventsOnly, table: str) -> tuple[Snapshot, list[Row]]:
    async def take() -> tuple[Snapshot, list[Row]]:
        async with CreekClient(events.uri, events.pipeline.name) as creek:
            found = await creek.snapshot("public", table, 120)
            return found, [row async for row in found]

    return asyncio.run(take())


def test_a_snapshot_on_request_comes_from_the_source_as_of_a_place_in_the_stream(events, dsn):
    execute(
        dsn,
        "create table wide (id int primary key, secret text, mail text, n numeric, d date, v text)",
        "insert into wide select g, 'hidden', 'a@b.example', 1.50, 'infinity', repeat('€\"\n', g % 50)"
        " from generate_series(1, 20000) g",
        "insert into wide values (0, null, null, 'NaN', null, null)",
    )
    events.configure(
        tables=("public.t", "public.other", "public.wide"),
        exclude_columns=("public.wide.secret",),
        per_table={"public.other": {"on_rename": "follow"}},
    )
    events.publisher(mask_columns=["public.wide.mail"])
    events.take()
    with events.at_work():
        execute(dsn, "insert into wide (id) values (-1)")
        events.wait_for(("wide", "c", -1))
        taken, rows = snapshot(events, "wide")
        execute(dsn, "delete from wide where id = 5", "insert into t values (7, 'after')")
        events.wait_for(("wide", "d", 5), ("t", "c", 7))
        execute(dsn, "alter table other rename to renamed", "insert into renamed values (1, 'x')")
        events.wait_for(("other", "c", 1))
        _, others = snapshot(events, "other")
    assert others == [{"id": 1, "v": "x"}]
    assert len(rows) == 20_002
    assert set(rows[0]) == {"id", "mail", "n", "d", "v"}
    by_id = {row["id"]: row for row in rows}
    assert (by_id[49]["mail"], by_id[49]["n"], by_id[49]["v"]) == ("***", "1.50", '€"\n' * 49)
    assert (by_id[0]["mail"], by_id[0]["n"], by_id[0]["v"]) == (None, "NaN", None)
    later = [
        one
        for one in creek_applied(events.stream.messages())
        if one.subject.endswith(".wide") and one.stamp > taken.header.lsn
    ]
    assert [(one.op, one.value["before"]["id"]) for one in later] == [("d", 5)]


def test_no_snapshot_is_made_from_another_source_than_the_pipelines(events, dsn, server, monkeypatch):
    events.take()
    events.catch_up()
    at = read_record(events.pipeline.lake_root, "events")
    with fresh_database(server) as elsewhere:
        execute(
            elsewhere,
            "create table t (id int primary key, v text)",
            "insert into t values (1, 'staging')",
            f"create publication {events.pipeline.publication} for table t",
        )
        monkeypatch.setenv(DSN_VARIABLE, elsewhere)
        settings = events.pipeline.publisher("events")
        snapshots = SourceSnapshots(events.pipeline, settings, [events.uri], lambda _: at)
        monkeypatch.setenv(process.STATE_DSN_VARIABLE, dsn)
        with pytest.raises(RewoundError, match=r"was written from .* leads to another database"):
            snapshots.send(TableName.parse("public.t"), "CREEK.snap.unasked", threading.Event())
        monkeypatch.delenv(process.STATE_DSN_VARIABLE)
        with pytest.raises(RewoundError, match=r"was written from .* leads to another database"):
            snapshots.send(TableName.parse("public.t"), "CREEK.snap.unasked", threading.Event())


def test_nothing_is_sent_into_the_streams_of_another_lake(events, server, tmp_path, monkeypatch):
    events.take()
    execute(events.dsn, "insert into t values (2, 'a')")
    events.catch_up()
    with fresh_database(server) as elsewhere:
        execute(elsewhere, "create table t (id int primary key, v text)", "insert into t values (1, 'x')")
        (tmp_path / "staging").mkdir()
        staging = EventsOnly(elsewhere, tmp_path / "staging", ("public.t",), events.uri)
        staging.publisher(database=events.pipeline.name)
        staging.take()
        execute(elsewhere, "insert into t values (2, 'staging')")
        code = staging.run_here("replicate", "--publish", "events", "--until", "caught-up")
        assert code == process.WILL_NOT_HELP
        assert "is of another lake" in staging.log_tail()
        monkeypatch.setenv(DSN_VARIABLE, elsewhere)
        at = read_record(events.pipeline.lake_root, "events")
        snapshots = SourceSnapshots(
            staging.pipeline, staging.pipeline.publisher("events"), [events.uri], lambda _: at
        )
        with pytest.raises(TargetError, match="is of another lake"):
            snapshots.send(TableName.parse("public.t"), "CREEK_snap", threading.Event())
        assert main(["teardown", str(staging.file), "--drop-lake", "--yes"]) == process.DONE
    monkeypatch.setenv(DSN_VARIABLE, events.dsn)
    execute(events.dsn, "insert into t values (3, 'b')")
    events.catch_up()
    assert events.seen() == [("t", "c", 2), ("t", "c", 3)]


def test_nothing_is_sent_from_a_lake_that_was_put_back(events, tmp_path):
    events.take()
    lake = Path(events.pipeline.lake_root)
    shutil.copytree(lake, tmp_path / "backup")
    execute(events.dsn, "insert into t values (2, 'a')")
    events.catch_up()
    shutil.rmtree(lake)
    shutil.copytree(tmp_path / "backup", lake)
    running = events.launch("publish", "--publisher", "events")
    try:
        wait_until(lambda: "beyond what this lake has" in events.log_tail(), 60, "the publisher to wait")
    finally:
        kill(running)
    assert events.seen() == [("t", "c", 2)]


def test_temporarily_unpublished_table_stops_but_table_with_safe_ddl_continues(events):
    events.take()
    publication = events.pipeline.publication
    execute(events.dsn, "alter table other add more int", "insert into other values (1, 'x', 5)")
    events.catch_up()
    assert events.states() == {"public.t": "streaming", "public.other": "streaming"}
    assert [one.name for one in events.records()["public.other"].relation.columns] == ["id", "v", "more"]
    execute(
        events.dsn,
        f"alter publication {publication} drop table t",
        "insert into t values (2, 'not published')",
        f"alter publication {publication} add table t",
        "insert into t values (3, 'published')",
        "insert into other values (2, 'y', 6)",
    )
    code = events.run_here("replicate", "--publish", "events", "--until", "caught-up")
    assert code == process.WILL_NOT_HELP
    assert events.states() == {"public.t": "errored", "public.other": "streaming"}
    assert ("other", "c", 2) in events.seen()
    (found,) = retry_tables(events.access)
    assert found.refused is not None
    # It would read no row: what is missing in the events stays missing.
    events.take()
    assert events.states() == {"public.t": "errored", "public.other": "streaming"}
    assert "table public.t stays errored" in events.log_tail()
    events.take("--tables", "public.t")
    execute(events.dsn, "insert into t values (4, 'again')")
    events.catch_up()
    assert events.states() == {"public.t": "streaming", "public.other": "streaming"}
    assert ("t", "c", 4) in events.seen()


def test_an_update_that_lacks_a_value_stops_its_table_and_sends_no_null(events):
    execute(
        events.dsn,
        "alter table t alter v set storage external",
        "update t set v = repeat('x', 5000) where id = 1",
    )
    events.take()
    execute(events.dsn, "update t set id = 10 where id = 1", "insert into other values (1, 'x')")
    code = events.run_here("replicate", "--publish", "events", "--until", "caught-up")
    assert code == process.WILL_NOT_HELP
    assert events.seen() == [("other", "c", 1)]
    record = read_record(events.pipeline.lake_root, "events")
    assert [one.table for one in record.stopped.values()] == ["public.t"]


def supplied(events: EventsOnly, target: str, arrived: Callable[[], list[dict[str, Any] | None]]) -> None:
    """Changes arrive at a broker, also those of a second run."""
    events.configure(publishers={"events": {"target": target}})
    events.take()
    execute(events.dsn, "insert into t values (2, 'a')", "delete from t where id = 1")
    events.catch_up()
    execute(events.dsn, "insert into other values (3, 'b')")
    events.catch_up()
    found = [(change["op"], (change["data"] or change["old"])["id"]) for change in arrived() if change]
    assert sorted(found) == [("delete", 1), ("insert", 2), ("insert", 3)]


@pytest.mark.thorough("NATS is supplied without a lake; test_publishing: RabbitMQ with one")
def test_rabbitmq_is_supplied_without_a_lake(events, broker, monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, broker.uri)
    name = events.pipeline.name
    queue = Queue(broker.uri, f"pgrepl.{name}", f"q-{name}")
    supplied(events, "rabbitmq", lambda: [message.event for message in queue.take()])


def test_kafka_is_supplied_without_a_lake(events, kafka, monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, kafka.uri)
    topics = KafkaTopics(kafka.servers, events.pipeline.name)
    supplied(events, "kafka", lambda: [message.value for message in topics.messages()])


def test_commands_do_what_there_is_to_do_or_refuse_by_name(events, capsys):
    events.take()
    execute(events.dsn, "insert into t values (2, 'a')")
    events.catch_up()
    with pytest.raises(ConfigError, match=r"pause: pipeline \w+ has no lake tables"):
        pause_tables(events.access, ["public.t"])
    with pytest.raises(ConfigError, match=r"resync: pipeline \w+ has no lake tables"):
        resync(events.access)
    report = check_drift(events.access)
    assert (report.checked, report.tables) == (2, ())
    file = str(events.file)
    for refused in (
        ["catalog", file],
        ["maintain", file, "--tables", "public.t"],
        ["resume", file, "public.t"],
    ):
        assert main(refused) == process.WILL_NOT_HELP
        assert "has no lake tables" in capsys.readouterr().err
    assert main(["maintain", file]) == process.DONE
    assert main(["status", file]) == process.DONE
    said = capsys.readouterr().out
    assert "without lake tables" in said
    assert "checked: the changelog has all" in said
    assert main(["remove", file, "public.other"]) == process.DONE
    execute(events.dsn, "insert into other values (5, 'not seen')", "insert into t values (3, 'b')")
    events.catch_up()
    assert events.seen() == [("t", "c", 2), ("t", "c", 3)]
    assert main(["teardown", file, "--drop-lake", "--yes"]) == process.DONE
    assert not Path(events.pipeline.lake_root, "_pgrepl").exists()


@pytest.mark.thorough("test_a_lake_is_left_and_taken_again_only_by_a_snapshot")
def test_a_lake_that_took_no_point_is_left_by_the_next_snapshot(dsn, tmp_path, begin, monkeypatch):
    kept = kept_tables(dsn, tmp_path)
    kept.write_point(kept.begin(), A, B)
    events = begin("public.*", name=kept.pipeline.name)

    def refuse(*_: object) -> None:
        raise LakeUnavailableError("the store is busy")

    with monkeypatch.context() as patched:
        patched.setattr(ConsistentPoints, "append", refuse)
        assert events.run_here("snapshot") == process.RETRY_MAY_HELP
    events.take()
    assert ConsistentPoints(kept.pipeline.lake_root).latest().tables == {}


def test_a_lake_is_left_and_taken_again_only_by_a_snapshot(dsn, tmp_path, jetstream, begin, capsys):
    kept = kept_tables(dsn, tmp_path)
    kept.write_point(kept.begin(), A, B)
    events = begin("public.*", name=kept.pipeline.name)
    assert events.run_here("replicate", "--until", "caught-up") == process.WILL_NOT_HELP
    assert "2 tables have lake tables, which would not be kept: public.a, public.b" in events.log_tail()
    assert main(["status", str(events.file)]) == process.DONE
    assert "which would not be kept" in " ".join(capsys.readouterr().out.split())
    events.take()
    assert ConsistentPoints(kept.pipeline.lake_root).latest().tables == {}
    execute(dsn, "insert into a values (1)")
    events.catch_up()
    assert events.seen() == [("a", "c", 1)]
    assert events.states() == {A: "streaming", B: "streaming"}
    events.configure(lake_tables="all")
    assert events.run_here("replicate", "--until", "caught-up") == process.WILL_NOT_HELP
    assert "2 tables have no lake table: they were taken with none: public.a, public.b" in events.log_tail()
