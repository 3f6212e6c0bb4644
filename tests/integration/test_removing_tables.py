"""Tables leave a pipeline: state, publication, and lake tables if wanted, while any other app is at work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from airflow_provider_pgrepl.errors import BusyError, ConfigError, LakeError, Retry, SnapshotError
from airflow_provider_pgrepl.replication.app import snapshot_tables
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from airflow_provider_pgrepl.replication.app.snapshot_tables import TableSnapshotter
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.read import consistent_arrow
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.preflight.selection import RequestedTables
from airflow_provider_pgrepl.replication.source.publication import read_publication
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.conftest import closing_connection
from tests.support.kept import A, B, Kept, kept_tables
from tests.support.replicated import execute, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def kept(dsn, tmp_path):
    return kept_tables(dsn, tmp_path)


def published(kept: Kept) -> set[str]:
    with kept.source() as source:
        found = read_publication(source, kept.pipeline.publication)
    assert found is not None
    return {str(table) for table in found.tables}


def place(kept: Kept, table: str) -> Path:
    return Path(kept.lake_path(table))


def test_a_removed_table_leaves_the_publication_and_its_lake_table_stays(kept):
    remove_tables(kept.access, [A])
    assert (kept.record(A).state, kept.record(A).membership) == (TableState.REMOVED, "removed")
    assert published(kept) == {B}
    assert DeltaTable(kept.lake_path(A)).version() == 0
    since = kept.record(A).since
    remove_tables(kept.access, [A])
    assert kept.record(A).since == since
    assert kept.states()[B] == "streaming"


@pytest.mark.thorough("test_a_removed_table_leaves_the_publication_and_its_lake_table_stays")
def test_a_renamed_table_leaves_the_publication_unless_it_was_taken_under_its_new_name(kept):
    execute(kept.dsn, "alter table a rename to c")
    remove_tables(kept.access, [A])
    assert published(kept) == {B}
    execute(kept.dsn, f"alter publication {kept.pipeline.publication} add table c")
    kept.take("public.c")
    remove_tables(kept.access, [A])
    assert published(kept) == {B, "public.c"}


def test_table_that_has_taken_the_name_of_a_removed_one_stays_published(kept):
    """B streams under the name that A had when it was copied."""
    execute(kept.dsn, "alter table a rename to a_old", "alter table b rename to a")
    kept.fail(A)
    remove_tables(kept.access, [A])
    assert published(kept) == {A}
    assert kept.states() == {A: "removed", B: "streaming"}


def test_table_dropped_at_source_can_be_removed(kept):
    kept.fail(A)
    execute(kept.dsn, "drop table a")
    remove_tables(kept.access, [A])
    assert kept.states()[A] == "removed"


def test_the_last_table_is_not_removed_but_a_removed_one_is_again(kept):
    with pytest.raises(ConfigError, match="no table would be left") as caught:
        remove_tables(kept.access, [A, B])
    assert "teardown" in caught.value.hint
    remove_tables(kept.access, [A])
    with pytest.raises(ConfigError, match="no table would be left"):
        remove_tables(kept.access, [B, A])
    with pytest.raises(ConfigError, match=r"not among the tables of pipeline .*public.nope"):
        remove_tables(kept.access, ["public.nope", A])
    assert kept.states() == {A: "removed", B: "streaming"}


def test_a_publication_that_is_not_ours_is_left_alone(dsn, tmp_path):
    execute(
        dsn,
        "create table a (id int primary key)",
        "create table b (id int primary key)",
        "create publication theirs for table a, b with (publish_via_partition_root)",
    )
    kept = Kept(dsn, tmp_path, ("public.*",), publication="theirs", publication_mode="use")
    kept.take(A, B)
    remove_tables(kept.access, [A])
    assert kept.states()[A] == "removed"
    assert published(kept) == {A, B}


def test_a_lock_at_the_source_is_waited_for_only_so_long_and_then_it_can_be_run_again(kept):
    kept.configure(lock_timeout_s=0.1)
    with closing_connection(kept.dsn) as connection, connection.cursor() as cursor:
        cursor.execute("begin; lock table a in share row exclusive mode")
        with pytest.raises(BusyError, match=r"public.a: not taken out of publication") as caught:
            remove_tables(kept.access, [A])
        assert caught.value.retry is Retry.TIMED
    assert published(kept) == {A, B}
    remove_tables(kept.access, [A])
    assert published(kept) == {B}


def test_a_dropped_lake_table_goes_with_its_history_and_reading_it_says_so(dsn, tmp_path):
    execute(dsn, "create table a (id int primary key)", "create table b (id int primary key)")
    kept = Kept(dsn, tmp_path, ("public.*",))
    kept.take(A, B)
    ours = CommitProperties(
        custom_metadata={"pgrepl": '{"kind": "history"}'},
        app_transactions=[Transaction(f"{kept.pipeline.name}:1", 1)],
    )
    write_deltalake(f"{kept.lake_path(A)}~history", pa.table({"id": [1]}), commit_properties=ours)
    kept.write_point(kept.source_lsn(), A, B)
    remove_tables(kept.access, [A], drop_lake_tables=True)
    assert sorted(path.name for path in place(kept, A).parent.iterdir()) == ["b"]
    view = consistent_arrow(kept.pipeline)
    with pytest.raises(LakeError, match=r"public.a cannot be read any more, or the table is gone"):
        view.table(A)
    assert view.table(B).num_rows == 0
    remove_tables(kept.access, [A], drop_lake_tables=True)
    assert kept.states() == {A: "removed", B: "streaming"}


def test_a_delta_table_that_is_not_ours_is_not_dropped(kept):
    place(kept, A).rename(place(kept, A).parent / "moved")
    write_deltalake(kept.lake_path(A), pa.table({"id": [1]}))
    with pytest.raises(LakeError, match="has not written all of it"):
        remove_tables(kept.access, [A, B][:1], drop_lake_tables=True)
    assert kept.states()[A] == "streaming"
    assert DeltaTable(kept.lake_path(A)).version() == 0


def test_a_lake_table_is_dropped_only_when_no_batch_of_before_can_still_run(kept):
    with kept.access.state_db("replicate") as app:
        app.lock(kept.pipeline.name, "replicate")
        app.write_progress(kept.pipeline.name, idle_at=app.now() + timedelta(hours=-1))
        version = DeltaTable(kept.changelog).version()
        with pytest.raises(BusyError, match=r"their lake tables are not dropped: .* did not end") as caught:
            remove_tables(kept.access, [A], drop_lake_tables=True, timeout_s=0.3)
        assert "run the same command again" in caught.value.hint
        assert kept.states()[A] == "removed"
        assert place(kept, A).exists()
        assert DeltaTable(kept.changelog).version() > version  # so that a batch begins

        remover = threading.Thread(
            target=remove_tables, args=(kept.access, [A]), kwargs={"drop_lake_tables": True}, daemon=True
        )
        version = DeltaTable(kept.changelog).version()
        remover.start()
        wait_until(lambda: DeltaTable(kept.changelog).version() > version, 20)
        assert place(kept, A).exists()
        app.write_progress(kept.pipeline.name, idle_at=app.now())
        remover.join(20)
        assert not remover.is_alive()
    assert not place(kept, A).exists()


def test_a_table_that_is_being_copied_is_not_removed_under_the_copy(kept):
    kept.set_states(A, TableState.SNAPSHOTTING)
    with kept.access.state_db("snapshot") as app:
        app.lock(kept.pipeline.name, "snapshot")
        with pytest.raises(BusyError, match=r"at it already \(snapshot\): pgrepl snapshot"):
            remove_tables(kept.access, [A], timeout_s=0.2)
        assert kept.states()[A] == "snapshotting"
        with pytest.raises(BusyError):
            remove_tables(kept.access, [B], drop_lake_tables=True, timeout_s=0.2)
        assert kept.states()[B] == "streaming"
    remove_tables(kept.access, [A])
    assert kept.states()[A] == "removed"


@pytest.mark.parametrize("purpose", ["maintain", "verify"])
@pytest.mark.thorough("the same test, of maintain", "verify")
def test_no_lake_table_is_dropped_that_is_compacted_or_repaired_meanwhile(kept, purpose):
    """A commit into a dropped folder would keep the table from being added again."""
    with kept.access.state_db(purpose) as other:
        other.lock(kept.pipeline.name, purpose)
        with pytest.raises(BusyError, match=rf"at it already \({purpose}\): pgrepl {purpose}"):
            remove_tables(kept.access, [A], drop_lake_tables=True, timeout_s=0.2)
        assert kept.states()[A] == "streaming"
        remove_tables(kept.access, [A])
        assert kept.states()[A] == "removed"
        assert place(kept, A).exists()
    remove_tables(kept.access, [A], drop_lake_tables=True)
    assert not place(kept, A).exists()


def test_a_lake_that_cannot_be_told_to_be_ours_drops_nothing(kept):
    nowhere = replace(kept.access, pipeline=replace(kept.pipeline, lake=f"{kept.pipeline.lake_root}/none"))
    with pytest.raises(Exception, match="no changelog"):
        remove_tables(nowhere, [A], drop_lake_tables=True)
    assert kept.states()[A] == "streaming"
    assert LSN(kept.begin() - 1) == kept.record(A).position_lsn


def test_table_that_is_taken_again_meanwhile_stays_published(kept):
    """The states are read again once no snapshot can take a table any more."""
    with kept.access.state_db("snapshot") as app:
        app.lock(kept.pipeline.name, "snapshot")
        failed: list[BaseException] = []
        with app.locked(kept.pipeline.name, "publication", 0):
            remover = threading.Thread(target=removing, args=(kept, failed), daemon=True)
            remover.start()
            kept.set_states(A, TableState.SNAPSHOTTING)
        remover.join(30)
    assert [type(error) for error in failed] == [BusyError]
    assert kept.states()[A] == "snapshotting"
    assert published(kept) == {A, B}


def removing(kept: Kept, failed: list[BaseException]) -> None:
    try:
        remove_tables(kept.access, [A], timeout_s=1)
    except BusyError as error:
        failed.append(error)


def test_snapshot_waits_for_a_removal_that_waits_for_the_source(kept, monkeypatch):
    """Otherwise it would find the table in the publication that it is about to leave."""
    kept.configure(lock_timeout_s=0.1)
    with closing_connection(kept.dsn) as connection, connection.cursor() as cursor, taking(kept) as snapshot:
        cursor.execute("begin; lock table a in share row exclusive mode")
        removal = replace(kept.access, pipeline=replace(kept.pipeline, lock_timeout_s=60))
        remover = threading.Thread(target=remove_tables, args=(removal, [A]), daemon=True)
        remover.start()
        wait_until(lambda: kept.states()[A] == "removed", 20)
        with pytest.raises(BusyError, match=r"at it already \(publication\)"):
            snapshot.take([TableName.parse(A)], RequestedTables(), read_epoch(kept.changelog))
        cursor.execute("rollback")
        remover.join(30)
    assert kept.states()[A] == "removed"
    assert published(kept) == {B}


def test_removed_table_whose_copy_fails_leaves_the_publication_again(kept, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise SnapshotError("no snapshot could be had")

    remove_tables(kept.access, [A])
    monkeypatch.setattr(snapshot_tables, "export_snapshot", fails)
    with taking(kept) as snapshot, pytest.raises(SnapshotError):
        snapshot.take([TableName.parse(A)], RequestedTables(), read_epoch(kept.changelog))
    assert kept.states()[A] == "removed"
    assert published(kept) == {B}


@contextmanager
def taking(kept: Kept) -> Iterator[TableSnapshotter]:
    """A snapshotter that takes tables, and fails the test where it would copy them."""

    def spark() -> Any:
        raise AssertionError("nothing is copied")

    out = frozenset(TableName.parse(table) for table, state in kept.states().items() if state == "removed")
    with kept.access.state_db("snapshot") as state_db, kept.source() as source:
        yield TableSnapshotter(kept.access, source, state_db, spark, out=out)
