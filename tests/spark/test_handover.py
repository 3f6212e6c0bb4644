"""Snapshot, handover and replication: no gap, no duplicate, whatever happens meanwhile. PGREPL_SEEDS sets how
many seeds random traffic is tried with."""

from __future__ import annotations

import os

import pytest

from airflow_provider_pgrepl.errors import PublicationError
from airflow_provider_pgrepl.replication.app import snapshot_tables
from airflow_provider_pgrepl.replication.app.source_ownership import SourceOwnership
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source.copy import snapshot_holder
from airflow_provider_pgrepl.replication.source.slot import read_slot
from airflow_provider_pgrepl.replication.source.slot_creation import ExportedSnapshot, create_slot
from tests.conftest import closing_connection
from tests.support.in_process import InProcess
from tests.support.replicated import execute, wait_until
from tests.support.traffic import INSERT_ONLY, SETUP, SUMS, TABLES, WHOLE, traffic

FIRST_SEED = int(os.environ.get("PGREPL_FIRST_SEED", "1"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("PGREPL_SEEDS", "2")))


@pytest.mark.thorough(
    "a table that joins later under traffic, below; test_kill: a first snapshot under traffic"
)
@pytest.mark.parametrize("seed", SEEDS)
def test_under_traffic_nothing_is_lost_doubled_or_torn(spark, dsn, tmp_path, seed):
    execute(dsn, *SETUP)
    options = {"flush_interval_s": 0.02, "snapshot_range_bytes": 65536}
    replicated = InProcess(spark, dsn, tmp_path, TABLES, insert_only=INSERT_ONLY, **options)
    with traffic(dsn, seed) as writing:
        writing.wait_for_more(20)
        replicated.snapshot()
        with replicated.replicating() as running:
            writing.wait_for_more(50)
            replicated.resnapshot("public.savings")
            replicated.wait_for_points(3, *TABLES)
            running.wait_for(replicated.source_lsn())
            writing.stop()
    replicated.catch_up()
    replicated.assert_equal(*TABLES)
    sums = replicated.at_every_point(SUMS, *TABLES)
    assert len(sums) >= 2
    assert all(row == WHOLE for row in sums), sums


def test_a_commit_at_the_consistent_point_is_applied_once(spark, dsn, tmp_path, monkeypatch):
    """Such a commit is not in the snapshot: with the point itself as position it would be lost."""
    execute(dsn, "create table t(id int primary key)", "insert into t values (1)")
    replicated = InProcess(spark, dsn, tmp_path, ("public.t",))
    create = create_slot

    def create_where_a_commit_begins(dsn: str, name: str, **options: object) -> ExportedSnapshot:
        exported = create(dsn, name, **options)
        execute(dsn, "insert into t values (2)")
        exported.consistent_point = first_commit(dsn, name)
        return exported

    with monkeypatch.context() as patched:
        patched.setattr(snapshot_tables, "create_slot", create_where_a_commit_begins)
        replicated.snapshot()
    assert replicated.lake_rows("public.t")["id"].to_pylist() == [1]
    replicated.catch_up()
    replicated.assert_equal("public.t")


def test_an_epoch_that_cannot_begin_leaves_no_slot(spark, dsn, tmp_path, monkeypatch):
    execute(dsn, "create table t(id int primary key)")
    replicated = InProcess(spark, dsn, tmp_path, ("public.t",))

    def gone(_self: SourceOwnership) -> int:
        raise PublicationError("the publication is gone")

    with monkeypatch.context() as patched:
        patched.setattr(SourceOwnership, "publication_oid", gone)
        assert replicated.run("snapshot") == 78
    with replicated.source() as source:
        assert read_slot(source, replicated.pipeline.slot) is None
    replicated.snapshot()


def first_commit(dsn: str, slot_name: str) -> LSN:
    """The commit LSN of the first transaction that a slot would send."""
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(
            "select data from pg_logical_slot_peek_binary_changes(%s, null, null, 'proto_version', '1',"
            " 'publication_names', %s)",
            (slot_name, slot_name),
        )
        begin = bytes(cursor.fetchone()[0])
    assert begin[:1] == b"B"
    return LSN(int.from_bytes(begin[1:9], "big"))


@pytest.mark.parametrize(
    "ddl",
    [
        "alter table t alter v type bigint",
        pytest.param(
            "alter table t add w int default 7",
            marks=pytest.mark.thorough("the same test, of an ALTER that rewrites the table"),
        ),
    ],
)
def test_ddl_between_export_and_copy_takes_another_snapshot(spark, dsn, tmp_path, monkeypatch, ddl):
    """A snapshot older than a rewriting ALTER would show an empty table."""
    execute(
        dsn,
        "create table t(id int primary key, v int)",
        "insert into t select g, g from generate_series(1, 100) g",
    )
    replicated = InProcess(spark, dsn, tmp_path, ("public.t",))
    keep, kept = snapshot_holder.keep, []

    def keep_after_ddl(*arguments: object, **named: object) -> snapshot_holder.SnapshotHolder:
        kept.append(arguments)
        if len(kept) == 1:
            execute(dsn, ddl)
        return keep(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(snapshot_holder, "keep", keep_after_ddl)
        replicated.snapshot()
    assert len(kept) == 2
    replicated.assert_equal("public.t")
    execute(dsn, "update t set v = -v")
    replicated.catch_up()
    replicated.assert_equal("public.t")


@pytest.mark.differs_by_major(
    "14 makes slots by another grammar; walsenders before 18 may not notice that a table was added to their"
    " publication, and are ended then",
    since=(15, 18),
)
def test_a_table_that_joins_later_is_handed_over_while_the_others_go_on(spark, dsn, tmp_path):
    execute(dsn, *SETUP, "create table late(id int primary key)", "insert into late values (1)")
    replicated = InProcess(spark, dsn, tmp_path, TABLES, insert_only=INSERT_ONLY)
    replicated.snapshot()
    with traffic(dsn, 99) as writing, replicated.replicating() as running:
        wider = InProcess(
            spark,
            dsn,
            tmp_path,
            (*TABLES, "public.late"),
            insert_only=INSERT_ONLY,
            name=replicated.pipeline.name,
        )
        execute(dsn, "insert into late values (2)")
        wider.snapshot()
        execute(dsn, "insert into late values (3)")
        wait_until(lambda: str(replicated.states()["public.late"].state) == "streaming")
        writing.wait_for_more(20)
        running.wait_for(replicated.source_lsn())
    wider.catch_up()
    wider.assert_equal(*TABLES, "public.late")
    assert all(row == WHOLE for row in wider.at_every_point(SUMS, *TABLES))
