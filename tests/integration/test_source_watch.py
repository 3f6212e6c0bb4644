"""The receiver during DDL: it waits for no lock, and ends when the publication is no longer its own."""

from __future__ import annotations

import time
from pathlib import Path

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import PublicationError, SourceError
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.receiver import changelog_feed, relation_tracker
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.slot import read_slot
from tests.conftest import closing_connection
from tests.support.received import Received, wait_until_seen
from tests.support.replicated import execute, wait_until


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Received:
    execute(dsn, "create table t(id int primary key, v text)", "create table u(id int primary key)")
    pipeline = Received(dsn, tmp_path, ("public.t", "public.u"), flush_interval_s=0.05)
    pipeline.begin()
    return pipeline


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changelog_feed, "_IDLE_LOOK_S", 0.1)


def announced(received: Received) -> list[RelationRecord]:
    return [RelationRecord.from_json(row["new"][0]) for row in received.changelog_rows("R")]


def test_a_relation_is_read_although_an_open_alter_holds_the_table(received: Received, dsn: str) -> None:
    execute(
        dsn,
        "create table part(id int primary key) partition by range (id)",
        "create table leaf partition of part for values from (0) to (100)",
        "create table other(id int primary key)",
        "alter table part attach partition other for values from (100) to (200)",
        f"alter publication {received.pipeline.publication} add table part",
        "insert into t values (1, 'a')",
        "insert into part values (1), (101)",
    )
    target = received.source_lsn()
    ddl = psycopg2.connect(dsn)
    try:
        with ddl.cursor() as cursor:
            cursor.execute("alter table t add w int default 1")
            cursor.execute("lock table part in access exclusive mode")
            cursor.execute(f"alter publication {received.pipeline.publication} set (publish = 'insert')")
            with received.receiving() as receiver:
                wait_until_seen(receiver, target, timeout=20)
    finally:
        ddl.close()
    of_t, *of_part = announced(received)
    assert of_t.agrees
    assert len(of_t.message.columns) == 2
    assert any(
        {part.table.name: part.had_rows for part in record.catalog.partitions}
        == {"leaf": False, "other": True}
        for record in of_part
        if record.catalog
    ), "what cannot be looked into counts"


def test_a_table_whose_catalog_cannot_be_read_stops_no_other(
    received: Received, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = relation_tracker.read_relation  # type: ignore[attr-defined]

    def broken(connection: object, oid: int, publication: str, **more: bool) -> Relation | None:
        found = read(connection, oid, publication, **more)
        if found is not None and found.table.name == "t":
            raise SourceError("reading the catalog: cache lookup failed (SQLSTATE XX000)")
        return found

    monkeypatch.setattr(relation_tracker, "read_relation", broken)
    execute(dsn, "insert into t values (1, 'a')", "insert into u values (1)")
    received.receive()
    of_t, of_u = announced(received)
    assert of_t.catalog is None
    assert of_u.agrees
    assert len(received.changelog_rows("I")) == 2


CHANGES = {
    "dropped": ["drop publication {0}"],
    "made anew": ["drop publication {0}", "create publication {0} for table t, u"],
    "altered": ["alter publication {0} set (publish = 'insert')"],
    "renamed": ["alter publication {0} rename to other"],
}


@pytest.mark.parametrize("writes", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("ddl", CHANGES.values(), ids=CHANGES)
@pytest.mark.usefixtures("often")
@pytest.mark.thorough(
    "the same test, of each change at the other time",
    "altered-busy",
    "made anew-busy",
    "renamed-idle",
    "dropped-idle",
)
def test_a_publication_that_is_no_longer_the_pipelines_ends_the_receiver(
    received: Received, dsn: str, ddl: list[str], writes: bool
) -> None:
    receiver = Receiver(dsn, received.pipeline)
    receiver.start()
    try:
        execute(dsn, "insert into t values (1, 'a')")
        wait_until_seen(receiver, received.source_lsn())
        execute(dsn, *(text.format(received.pipeline.publication) for text in ddl))
        if writes:
            execute(dsn, "insert into t values (2, 'b')", "insert into u values (1)")
        assert receiver.failed.wait(20)
    finally:
        receiver.stop()
    assert isinstance(receiver.error, PublicationError)
    assert "--new-epoch" in receiver.error.hint
    with closing_connection(dsn) as connection:
        # The server's own end of the stream may take a moment.
        wait_until(lambda: not is_read(connection, received.pipeline.slot))
    with pytest.raises(PublicationError):
        Receiver(dsn, received.pipeline).start()


def is_read(connection: Connection, slot: str) -> bool:
    found = read_slot(connection, slot)
    return found is not None and found.active


def test_the_publication_is_looked_at_once_a_flush(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(dsn, "create table t(id int primary key)")
    received = Received(dsn, tmp_path, ("public.t",), flush_interval_s=0.5)
    received.begin()
    looked = []
    look = changelog_feed.PublicationWatch.look
    monkeypatch.setattr(changelog_feed.PublicationWatch, "look", lambda self: (looked.append(1), look(self)))
    began = time.monotonic()
    with received.receiving() as receiver:
        execute(dsn, *(f"insert into t values ({n})" for n in range(200)))
        wait_until_seen(receiver, received.source_lsn())
        seconds = time.monotonic() - began
    assert len(looked) <= seconds / 0.2 + 3
    assert len(received.changelog_rows("I")) == 200
