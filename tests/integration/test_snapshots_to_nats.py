"""Snapshots on request over NATS: with the later stream of changes, a late consumer has the table."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import psycopg2
import pytest
from nats.aio.msg import Msg

from airflow_provider_pgrepl.errors import TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.creek import publish_snapshot
from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.creek import client as creek_client
from airflow_provider_pgrepl.replication.creek import stream_reading
from airflow_provider_pgrepl.replication.creek.client import CreekClient, Snapshot
from airflow_provider_pgrepl.replication.creek.messages import Row, WalChange
from airflow_provider_pgrepl.replication.creek.snapshot_requests import LakeSnapshots, SnapshotRequests
from airflow_provider_pgrepl.replication.creek.stream_reading import STAMP, StreamPosition, place_of
from airflow_provider_pgrepl.replication.creek.wire import Version, Wire, framed
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.record import read_record
from airflow_provider_pgrepl.replication.events.targets.base import NATS_ID
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from demo.nats import NatsServer
from tests.support.every_type import NESTED, PLAIN, literal
from tests.support.jetstream import CreekStream
from tests.support.landed import Landed
from tests.support.publishing import changing, finish, generation, publishing, publishing_in_thread
from tests.support.replicated import execute, wait_until

TABLES = ("public.t", "public.other", "public.soft")
Work = Callable[[CreekClient], Coroutine[Any, Any, Any]]


class Published(Landed):
    """A pipeline with a lake and a publisher to NATS."""

    uri: str
    wire: Version = "v2"

    def publisher(self, **settings: Any) -> None:
        given = {"target": "nats", "database": self.pipeline.name, "wire": self.wire, **settings}
        self.configure(publishers={"events": given})

    def client(self, work: Work) -> Any:
        async def with_client() -> Any:
            async with CreekClient(self.uri, self.pipeline.name, wire=self.wire) as creek:
                return await work(creek)

        return asyncio.run(with_client())

    def snapshot(self, table: str) -> tuple[Snapshot, list[Row]]:
        async def whole(creek: CreekClient) -> tuple[Snapshot, list[Row]]:
            found = await creek.snapshot("public", table, 240)
            return found, [row async for row in found]

        found: tuple[Snapshot, list[Row]] = self.client(whole)
        return found

    def changes(self, table: str, snapshot: Snapshot | None = None) -> list[WalChange]:
        """All that the stream has of a table, from a snapshot on."""
        server, wire = CreekStream(self.uri, self.pipeline.name), Wire("CREEK", self.pipeline.name, self.wire)
        server.schema = wire.stream("schema")
        newest = server.newest(wire.stream("wal"), wire.subject("wal", f"public.{table}"))
        if newest is None or (snapshot is not None and newest.stamp <= snapshot.header.lsn):
            return []

        async def read(creek: CreekClient) -> list[WalChange]:
            if snapshot is None:
                changes = creek.stream_wal("public", table)
            else:
                # As creek's own clients do, which know stamps alone.
                header = snapshot.header
                changes = creek.stream_wal_from("public", table, header.at, header.lsn)
            found: list[WalChange] = []
            while not found or found[-1].lsn < newest.stamp:
                found.append(await asyncio.wait_for(anext(changes), 150))
            return found

        found: list[WalChange] = self.client(read)
        return found


@pytest.fixture
def begin(
    dsn: str, tmp_path: Path, jetstream: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Published]:
    """A pipeline of some tables, begun."""
    monkeypatch.setenv("PGREPL_DSN", dsn)
    monkeypatch.setenv(TARGET_VARIABLE, jetstream.uri)

    def make(*tables: str, **options: Any) -> Published:
        pipeline = Published(dsn, tmp_path, tables, flush_interval_s=0.05, **options)
        pipeline.begin()
        pipeline.publisher()
        pipeline.uri = jetstream.uri
        return pipeline

    return make


@pytest.fixture
def published(dsn: str, begin: Callable[..., Published]) -> Published:
    named = [name.removeprefix("public.") for name in TABLES]
    execute(
        dsn,
        *(f"create table {name}(id int primary key, v text)" for name in named),
        "alter table other alter v set storage external",
    )
    return begin(*TABLES, per_table={"public.soft": {"deletes": "soft"}})


def rebuilt(rows: list[Row], changes: list[WalChange]) -> dict[Any, Any]:
    """A table as a consumer keeps it that applies each change, by the rule for creek's messages."""
    table = {row["id"]: row["v"] for row in rows}
    for change in changes:
        if change.op == "t":
            table.clear()
        if change.before is not None and change.op in ("d", "u_pk"):
            table.pop(change.before["id"], None)
        if change.after is not None:
            table[change.after["id"]] = change.after["v"]
    return table


def shown(dsn: str, table: str) -> dict[Any, Any]:
    connection = psycopg2.connect(dsn)
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"select id, v from {table}")
            return dict(cursor.fetchall())
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("wire", "at_work"),
    [
        pytest.param("v1", publishing, marks=pytest.mark.thorough("with v2 and fewer processes")),
        ("v2", publishing_in_thread),
    ],
    ids=["v1", "v2"],
)
def test_snapshot_and_later_changes_rebuild_each_table(published, wire, at_work):
    published.wire = wire
    published.publisher()
    execute(published.dsn, "insert into t select g, 'old' from generate_series(1, 6000) g")
    published.receive()
    published.apply()
    execute(published.dsn, "update t set v = 'not applied' where id <= 300")
    with at_work(published):
        wait_until(lambda: is_connected(published), 150, "the publisher to be connected")
        with changing(published):
            taken = {table: published.snapshot(table) for table in ("t", "other")}
            again = published.snapshot("t")
    finish(published)
    for table, (snapshot, rows) in {**taken, "t ": again}.items():
        name = table.strip()
        changes = published.changes(name, snapshot)
        assert not any(snapshot.header.has(change) for change in changes), "none comes twice"
        assert rebuilt(rows, changes) == shown(published.dsn, name), name
        assert snapshot.header.approx_rows == len(rows)
        assert snapshot.header.keys == ("id",)
    assert again[0].header.topic > taken["t"][0].header.topic
    assert changes, "some came after the last snapshot"


def is_connected(published: Published) -> bool:
    """The stream of snapshots is the last that a publisher makes."""

    async def subjects(creek: CreekClient) -> list[str]:
        streams = await creek._jetstream.streams_info()
        return [subject for info in streams for subject in info.config.subjects or ()]

    wire = Wire("CREEK", published.pipeline.name, published.wire)
    return wire.all_subjects("snap") in published.client(subjects)


def test_snapshots_are_listed_and_read_again(published):
    execute(published.dsn, "insert into other values (1, 'a'), (2, null)")
    published.receive()
    finish(published)
    with publishing_in_thread(published):
        wait_until(lambda: is_answered(published), 150, "the publisher to answer")
        first, rows = published.snapshot("other")
        _, nothing = published.snapshot("t")
    assert nothing == []
    assert sorted(rows, key=lambda row: row["id"]) == [{"id": 1, "v": "a"}, {"id": 2, "v": None}]

    async def again(creek: CreekClient) -> Any:
        listed = await creek.list_snapshots("public", "other")
        found = await creek.get_snapshot(listed[-1].topic)
        return listed, found.header, [row async for row in found]

    listed, header, read = published.client(again)
    assert (listed[-1].topic, listed[-1].rows, header, read) == (first.header.topic, 2, first.header, rows)
    assert all(one.rows == 2 for one in listed)


def is_answered(published: Published) -> bool:
    try:
        published.snapshot("other")
    except TargetUnavailableError:
        return False
    return True


def test_a_row_of_a_snapshot_is_what_its_change_said(dsn, begin):
    columns = PLAIN | {name: of for name, of in NESTED.items() if name != "c_list"}
    declared = ", ".join(f"{name} {of[0]}" for name, of in columns.items())
    literals = [[literal(name, of[1 + which]) for name, of in PLAIN.items()] for which in (0, 1)]
    nested = [of[1] for name, of in NESTED.items() if name != "c_list"]
    execute(
        dsn,
        "create type part as (a integer, b text)",
        f"create table every(id int primary key, {declared}, l int[], e text[])",
    )
    more = begin("public.every")
    rows = [", ".join([*ones, *nested, "'{1,2}'", "array['a,b', '\"', '']"]) for ones in literals]
    execute(
        more.dsn,
        *(f"insert into every values ({number}, {row})" for number, row in enumerate(rows)),
        "insert into every (id) values (7)",
    )
    more.receive()
    more.apply()
    with publishing_in_thread(more):
        wait_until(lambda: len(CreekStream(more.uri, more.pipeline.name).raw(stream(more))) == 3, 150)
        _, found = more.snapshot("every")
    changed = [change.after for change in more.changes("every")]
    assert sorted(found, key=lambda row: row["id"]) == sorted(changed, key=lambda row: row["id"])


def stream(published: Published) -> str:
    return f"CREEK_wal_{published.pipeline.name}"


def test_rows_that_are_deleted_softly_are_in_no_snapshot(published):
    execute(published.dsn, "insert into soft values (1, 'a'), (2, 'b')")
    published.receive()
    published.apply()
    execute(published.dsn, "delete from soft where id = 1")
    published.receive()
    published.apply()
    execute(published.dsn, "insert into soft values (3, 'c')", "delete from soft where id = 3")
    published.receive()
    finish(published)
    with publishing_in_thread(published):
        wait_until(lambda: is_answered(published), 150, "the publisher to answer")
        _, rows = published.snapshot("soft")
    assert rows == [{"id": 2, "v": "b"}]


@pytest.mark.thorough("the other requests of this file")
def test_nobody_answers_for_what_is_not_published(published):
    published.publisher(tables=["public.other"], on_error="skip_and_record")
    execute(published.dsn, "insert into other values (1, repeat('x', 150000))")
    published.receive()
    with publishing_in_thread(published):
        wait_until(lambda: is_connected(published), 150, "the publisher to be connected")
        wal = CreekStream(published.uri, published.pipeline.name)
        snap = wal.wal.replace("_wal_", "_snap_")
        for request in (b"", b"[]", b'{"database": 1, "namespace": [], "table": {}}', b"\xff"):
            wal.put(snap, request, reply="somebody")
        wrong = {"database": "another", "namespace": "public", "table": "other"}
        wal.put(snap, json.dumps(wrong).encode(), reply="somebody")
        odd = {"database": published.pipeline.name, "namespace": "public", "table": "\x00\ud800"}
        wal.put(snap, json.dumps(odd).encode(), reply="somebody")
        for table in ("t", "missing"):
            with pytest.raises(TargetUnavailableError, match="no publisher answered"):
                published.client(lambda creek, table=table: creek.snapshot("public", table, 3))
        # A row that is too large: the snapshot has a header, and no end.
        with pytest.raises(TargetUnavailableError, match="nothing more"):
            rows = published.client(lambda creek: whole(creek, "other", 20))
            assert rows == []
        execute(published.dsn, "update other set v = 'small'")
        published.receive()
        (updated,) = published.changelog_rows("U")
        wait_until(lambda: is_recorded(published, updated["commit_lsn"]), 150, "the update to be published")
        _, found = published.snapshot("other")
    assert found == [{"id": 1, "v": "small"}]
    log = published.log_tail()
    assert "150,0" in log
    assert "xxxx" not in log


def is_recorded(published: Published, commit_lsn: int) -> bool:
    """Return True if the publisher's record says that a transaction is published."""
    record = read_record(published.pipeline.lake_root, "events")
    return record is not None and record.position.commit_lsn >= commit_lsn


async def whole(creek: CreekClient, table: str, timeout_s: float) -> list[Row]:
    found = await creek.snapshot("public", table, timeout_s)
    return [row async for row in found]


def test_schemas_are_found_by_the_client(published):
    execute(published.dsn, "insert into t values (1, 'a')", "alter table t add w int")
    execute(published.dsn, "insert into t values (2, 'b', 3)")
    published.receive()
    finish(published)
    first, second = published.changes("t")
    assert (first.after, second.after) == ({"id": 1, "v": "a"}, {"id": 2, "v": "b", "w": 3})
    assert (first.op, first.schema, first.table, first.before) == ("c", "public", "t", None)
    last = published.client(lambda creek: creek.get_last_schema("public", "t"))
    assert last.fingerprint == second.fingerprint
    assert published.client(lambda creek: creek.get_last_schema("public", "other")) is None
    with publishing_in_thread(published):
        wait_until(lambda: is_answered(published), 150)
        older = published.client(lambda creek: creek.get_schema(first.fingerprint))
    assert (older.source, older.fingerprint) == ("public.t", first.fingerprint)

    async def after_the_first(creek: CreekClient) -> WalChange:
        return await anext(creek.stream_wal_from("public", "t", first.sent_at, str(LSN(first.lsn))))

    assert published.client(after_the_first) == second


def test_databases_share_the_streams_of_the_first_wire(published, jetstream):
    published.wire = "v1"
    north, south = (f"{word}_{published.pipeline.name}" for word in ("north", "south"))
    for database in (north, south):
        published.publisher(database=database)
        published.receive()
        place = str(EventPosition.after_transaction(Epoch(1), LSN(published.durable_lsn - 1)))
        execute(published.dsn, f"insert into t select count(*), '{database}' from t")
        published.receive()
        finish(published, "--after", place)

    async def read(creek: CreekClient) -> list[Any]:
        changes = creek.stream_wal("public", "t")
        return [(await anext(changes)).after["v"], (await creek.get_last_schema("public", "t")).source]

    async def of(database: str) -> list[Any]:
        async with CreekClient(jetstream.uri, database, wire="v1") as creek:
            return await read(creek)

    assert asyncio.run(of(north)) == [north, "public.t"]
    assert asyncio.run(of(south)) == [south, "public.t"]


def test_a_snapshot_needs_no_request(published, capsys, monkeypatch):
    # Long enough for a table that the lake is about to hold.
    monkeypatch.setattr(publish_snapshot, "_PATIENCE_S", 1.0)
    execute(published.dsn, "insert into other values (1, 'a'), (2, null)")
    published.receive()
    published.apply()
    finish(published)
    given = ["--pipeline", str(published.file), "--publisher", "events"]
    assert publish_snapshot.main([*given, "--table", "public.other"]) == process.DONE
    subject = capsys.readouterr().out.strip()

    async def read(creek: CreekClient) -> list[Row]:
        return [row async for row in await creek.get_snapshot(subject)]

    assert sorted(published.client(read), key=lambda row: row["id"]) == [
        {"id": 1, "v": "a"},
        {"id": 2, "v": None},
    ]
    for table in ("other", "public.missing", "else.where"):
        assert publish_snapshot.main([*given, "--table", table]) == process.WILL_NOT_HELP
    published.configure(publishers={"events": {"target": "rabbitmq"}})
    assert publish_snapshot.main([*given, "--table", "public.other"]) == process.WILL_NOT_HELP


def test_messages_that_arrive_late_are_not_taken_for_the_end_of_the_stream(jetstream, monkeypatch):
    """The server may take longer than a look, or answer nothing while it elects a leader."""
    consumed, last_message, failures = stream_reading._consumed, stream_reading.last_message, [TimeoutError()]

    async def late(*given: Any) -> AsyncIterator[list[Msg]]:
        yield []
        yield []
        async for messages in consumed(*given):
            yield messages

    async def failing_once(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return await last_message(*given)

    async def places(creek: CreekClient) -> tuple[int | None, int | None, StreamPosition]:
        link, wire = creek._jetstream, Wire("CREEK", "late")
        stream, subject = wire.stream("wal"), wire.subject("wal", "public.t")
        await link.add_stream(name=stream, subjects=[wire.all_subjects("wal")])
        for number in (1, 2, 3):
            headers = {NATS_ID: f"1:0/{number}:0", STAMP: f"0/{number}0"}
            await link.publish(subject, b"", headers=headers)
        second, third = [(await link.get_msg(stream, number)).time for number in (2, 3)]
        monkeypatch.setattr(stream_reading, "_consumed", late)
        place = await place_of(link, wire, "public.t", EventPosition.parse("1:0/2:0"), third)
        monkeypatch.setattr(stream_reading, "last_message", failing_once)
        after = third + timedelta(seconds=1)
        return await creek.sequence_before(second), await creek.sequence_before(after), place

    async def with_client() -> tuple[int | None, int | None, StreamPosition]:
        async with CreekClient(jetstream.uri, "late") as creek:
            return await places(creek)

    before, after_all, place = asyncio.run(with_client())
    assert (before, after_all, place.stamp) == (1, None, LSN.parse("0/20"))
    assert not failures


def test_messages_that_the_stream_drops_while_its_reader_is_away_are_missed(jetstream):
    """In v1 the numbers of a database's messages have gaps, for those of others."""

    async def read_on() -> None:
        async with CreekClient(jetstream.uri, "shop", "DROPPED", "v1") as creek:
            link, wire = creek._jetstream, Wire("DROPPED", "shop", "v1")
            stream, subject = wire.stream("wal"), wire.subject("wal", "public.t")
            await link.add_stream(name=stream, subjects=[wire.all_subjects("wal")])
            await link.publish(subject, framed(b""))
            changes = creek.changes_after(0, lambda _: False)
            # The first message can take longer than a look.
            while (found := await anext(changes))[1] < 1:
                assert found == ([], 0)
            assert found == ([], 1)
            for _ in range(2):
                await link.publish(subject, framed(b""))
            await link.purge_stream(stream, seq=3)
            # As a server does that was restarted, or was not reached by the reader for long.
            for consumer in await link.consumers_info(stream):
                await link.delete_consumer(stream, consumer.name)
            with pytest.raises(TargetError, match="stream DROPPED_wal has lost its messages 2 to 2"):
                while (await anext(changes))[1] < 3:
                    pass

    asyncio.run(read_on())


def test_a_snapshot_finds_its_place_while_others_go_on(published):
    """The newest message of its table may be from after the snapshot."""
    execute(published.dsn, *(f"insert into other values ({key}, 'a')" for key in range(20)))
    published.receive()
    published.apply()
    finish(published)
    record = read_record(published.pipeline.lake_root, "events")
    assert record is not None
    execute(published.dsn, *(f"insert into other values ({key}, 'b')" for key in range(20, 40)))
    published.receive()
    finish(published)
    (before, *_, last) = published.changes("other")
    after_first = EventPosition.parse(before.id)

    async def places(creek: CreekClient) -> list[StreamPosition]:
        wire = Wire("CREEK", published.pipeline.name)
        return [
            await place_of(creek._jetstream, wire, table, position, record.saved_at)
            for table, position in (
                ("public.other", record.position),
                ("public.other", after_first),
                ("public.other", EventPosition.parse("0:0/0:0")),
                ("public.t", record.position),
                ("public.other", EventPosition.parse("9:0/0:0")),
            )
        ]

    upto, first, none, other, newest = published.client(places)
    stamps = [change.lsn for change in published.changes("other")]
    assert (upto.stamp, first.stamp, newest.stamp) == (stamps[19], stamps[0], last.lsn)
    assert none.stamp < stamps[0]
    assert other.stamp == record.position.commit_lsn
    assert first.at <= upto.at <= newest.at


HELPER = """
import json, os, pathlib, sys, time
gate, done = map(pathlib.Path, sys.argv[1:3])
for line in sys.stdin:
    table = json.loads(line)["table"]
    with done.open("a") as file:
        print(os.getpid(), table, file=file)
    while not gate.exists():
        time.sleep(0.01)
    if table == "public.crashes":
        sys.exit(9)
    print(75 if table == "public.fails" else 0, flush=True)
    if table == "public.last":
        sys.exit(0)
"""
"""A helper that records which table it serves, and answers once there is a gate."""


@pytest.fixture
def helped(published, tmp_path) -> Iterator[tuple[LakeSnapshots, Path, Path]]:
    """Snapshots whose helpers are stand-ins, the gate, and the file of what they served."""
    gate, done = tmp_path / "gate", tmp_path / "served"
    done.touch()
    snapshots = LakeSnapshots(published.pipeline, [sys.executable, "-c", HELPER, str(gate), str(done)])
    yield snapshots, gate, done
    snapshots.close()


def served(done: Path) -> list[tuple[str, str]]:
    """Process and table of each snapshot."""
    return [(pid, table) for pid, table in map(str.split, done.read_text().splitlines())]


def test_two_requests_are_served_at_once_and_others_wait(published, helped):
    settings = published.pipeline.publisher("events")
    snapshots, gate, done = helped

    def request(table: str, database: str = settings.database) -> bytes:
        return json.dumps({"database": database, "namespace": "public", "table": table}).encode()

    with SnapshotRequests(published.pipeline, settings, snapshots) as requests:
        for count in (1, 2):
            assert requests.accept(request("t")) is not None
            wait_until(lambda: len(served(done)) == count, 150, "the request to be begun")  # noqa: B023
        waiting = [requests.accept(request("other")) for _ in range(3)]
        assert len(set(waiting)) == 1, "one that waits serves all"
        for odd in (request("missing"), request("t", "else"), b"[" * 100_000, b"{}", request("x" * 70_000)):
            assert requests.accept(odd) is None
        gate.touch()
        wait_until(lambda: len(served(done)) == 3, 150, "the third to be begun")
    assert [table for _, table in served(done)] == ["public.t", "public.t", "public.other"]
    assert len({pid for pid, _ in served(done)}) == 2, "the third has the process of one that ended"


def test_helper_makes_one_snapshot_after_another_and_is_replaced_where_it_ended(helped):
    snapshots, gate, done = helped
    gate.touch()
    never = threading.Event()
    for table in ("a", "b", "last", "c"):
        snapshots.send(TableName("public", table), "subject", never)
    for table, said in (("fails", "exited with code 75"), ("crashes", "exited with code 9")):
        with pytest.raises(TargetError, match=said):
            snapshots.send(TableName("public", table), "subject", never)
    snapshots.send(TableName("public", "d"), "subject", never)
    pids = {table.removeprefix("public."): pid for pid, table in served(done)}
    assert pids["a"] == pids["b"] == pids["last"]
    assert pids["c"] == pids["fails"] == pids["crashes"], "a snapshot that failed leaves the helper"
    assert len({*pids.values()}) == 3
    assert [*pids] == ["a", "b", "last", "c", "fails", "crashes", "d"], "none is asked for twice"


def test_snapshot_that_is_over_ends_its_helper(helped):
    snapshots, _, done = helped
    over = threading.Event()
    thread = threading.Thread(target=snapshots.send, args=(TableName("public", "t"), "subject", over))
    thread.start()
    wait_until(lambda: served(done), 150, "the request to be begun")
    over.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not psutil.pid_exists(int(served(done)[0][0]))


@pytest.mark.thorough("test_helper_makes_one_snapshot_after_another_and_is_replaced_where_it_ended")
def test_helpers_of_a_publisher_stay_and_end_with_it(published, monkeypatch):
    """In real processes. A client that asks again at once may get a second helper: the first is not free."""
    # It asks again for what has no answer yet, and the first helper can take longer to start.
    monkeypatch.setattr(creek_client, "_ASK_AGAIN_S", 300.0)
    execute(published.dsn, "insert into other values (1, 'a')")
    published.receive()
    published.apply()
    with publishing(published) as running:
        wait_until(lambda: generation(published), what="the publisher to be connected")
        found = list[set[int]]()
        for _ in range(4):
            _, rows = published.snapshot("other")
            assert rows == [{"id": 1, "v": "a"}]
            children = psutil.Process(running.pid).children()
            found.append({one.pid for one in children if "--requests" in one.cmdline()})
    assert len(found[0]) == 1
    assert all(found[0] <= later for later in found), "the first stays"
    assert len(set.union(*found)) <= LakeSnapshots.at_once, "four requests need no more"
    assert not any(map(psutil.pid_exists, set.union(*found)))
