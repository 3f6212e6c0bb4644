"""The pipeline's own tables in a publication that holds all tables: they are not replicated."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.changelog.reader import open_changelog
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.publication import read_publication
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from tests.support.received import Received, wait_until_seen
from tests.support.replicated import execute


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Received:
    execute(
        dsn,
        "create table t(id int primary key)",
        "create publication everything for all tables with (publish_via_partition_root = true)",
    )
    pipeline = Received(
        dsn,
        tmp_path,
        ("public.t",),
        publication_mode="use",
        publication="everything",
        flush_interval_s=0.05,
    )
    with StateDatabase(dsn, "test") as state_db:
        state_db.migrate()
        state_db.register(pipeline.pipeline, "1", True, False)
    pipeline.begin()
    return pipeline


def write_progress(received: Received, times: int = 5) -> None:
    with StateDatabase(received.dsn, "test") as state_db:
        for _ in range(times):
            state_db.write_progress(
                received.pipeline.name,
                received_lsn=LSN(1),
                durable_lsn=LSN(1),
                confirmed_lsn=LSN(1),
                applied_lsn=LSN(1),
                applied_commit_ts=None,
                changes_per_s=0.0,
                holder="test",
                idle_at=None,
            )


@pytest.mark.differs_by_major("before 15 the server sends transactions that are empty", since=(15,))
def test_writing_progress_is_no_change(received: Received) -> None:
    write_progress(received)
    with received.receiving() as receiver:
        wait_until_seen(receiver, received.source_lsn())
        version = open_changelog(received.changelog).version()
        for _ in range(5):
            write_progress(received, 1)
            wait_until_seen(receiver, received.source_lsn())
        assert open_changelog(received.changelog).version() == version
        assert receiver.progress.changes == 0
    assert not received.changelog_rows()


@pytest.mark.differs_by_major("before 15 the server sends transactions that are empty", since=(15,))
def test_in_one_transaction_with_others_only_theirs_count(received: Received) -> None:
    write_progress(received, 1)
    execute(
        received.dsn,
        "begin; update _pgrepl.progress set holder = 'x'; insert into t values (1);"
        " update _pgrepl.progress set holder = 'y'; insert into t values (2); commit",
        "begin; truncate _pgrepl.progress, t; insert into t values (3); commit",
    )
    received.receive()
    assert [(row["op"], row["new"]) for row in received.changelog_rows("I", "U", "T")] == [
        ("I", ["1"]),
        ("I", ["2"]),
        ("T", [""]),
        ("I", ["3"]),
    ]
    assert {row["relation_id"] for row in received.changelog_rows()} == {
        row["relation_id"] for row in received.changelog_rows("T")
    }


def test_a_table_that_was_replicated_before_it_was_moved_there_is_told_of(received: Received) -> None:
    execute(received.dsn, "insert into t values (1)", "alter table t set schema _pgrepl")
    received.receive()
    execute(received.dsn, "insert into _pgrepl.t values (2)")
    received.receive()
    assert [row["new"] for row in received.changelog_rows("I")] == [["1"], ["2"]]


def test_they_are_none_of_the_publications_tables(received: Received) -> None:
    with received.source() as source:
        found = read_publication(source, "everything")
    assert found is not None
    assert TableName("public", "t") in found.tables
    assert not [table for table in found.tables if table.schema == "_pgrepl"]
