"""storage/durable.py: everything confirmed is on the disk, and whole after any power cut."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyroaring import BitMap64

from airflow_provider_pgrepl.errors import LakeUnavailableError, PgReplError
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.maintenance import drop_expired
from airflow_provider_pgrepl.replication.changelog.reader import live_files, open_changelog
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.changelog.writer import (
    ChangelogWriter,
    begin_epoch,
    describe,
    mark,
    replace_files,
)
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.commit import commit_properties
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import ParquetFiles
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table, read_position
from airflow_provider_pgrepl.replication.lake.files.compaction import compact
from airflow_provider_pgrepl.replication.lake.files.merge_on_read import replace_rows
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.maintenance import Maintenance
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.storage import durable
from tests.support.announced import relation
from tests.support.changelogs import Written, epoch_record, new_changelog
from tests.support.recorded_disk import RecordedDisk, opened_path
from tests.unit.test_lake_table import write
from tests.unit.test_maintenance import eager, overwrite, overwrite_each, pipeline, soon

APP = app_id("p", Epoch(1))
IDS = pa.schema([("id", pa.int64())])


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedDisk:
    (tmp_path / "disk").mkdir()
    return RecordedDisk(tmp_path / "disk").install(monkeypatch)


def ids(uri: str, version: int | None = None) -> list[int]:
    table = DeltaTable(uri, version=version)
    found = pa.table(QueryBuilder().register("t", table).execute("select id from t").read_all())
    return sorted(found["id"].to_pylist())


def copied(lake: Path, *values: int) -> str:
    """A lake table as a snapshot makes it."""
    with ParquetFiles(str(lake), "public/t", IDS) as files:
        files.write(pa.record_batch([pa.array(values, pa.int64())], schema=IDS))
        written = files.finish()
    commit_snapshot(f"{lake}/public/t", IDS, written, LSN(10), "p", Epoch(1))
    return f"{lake}/public/t"


# The changelog.


def test_transactions_up_to_durable_lsn_survive_power_cut(disk: RecordedDisk, tmp_path: Path) -> None:
    one = Written(new_changelog(disk.folder), part_bytes=64)
    for number, lsn in enumerate((100, 200, 300)):
        one.transaction(lsn, r7=40)
        one.flush()
        left = DeltaTable(str(disk.cut_to(tmp_path / str(number)) / "changelog"))
        assert left.transaction_version("pgrepl-durable-lsn") == one.writer.durable_lsn == lsn + 8
        rows = pa.table(
            QueryBuilder().register("t", left).execute("select * from t where op = 'I'").read_all()
        )
        assert rows.num_rows == 40 * (number + 1)


def test_parts_of_a_transaction_that_is_open_are_on_the_disk_before_it_is_committed(
    disk: RecordedDisk, tmp_path: Path
) -> None:
    one = Written(new_changelog(disk.folder), part_bytes=64)
    one.take(one.begin(100), *one.insert(7, *range(50)))
    one.take(*one.insert(7, *range(50, 100)))
    assert list((disk.cut_to(tmp_path / "open") / "changelog").rglob("*.parquet"))
    one.take(one.commit(100))
    one.flush()
    left = DeltaTable(str(disk.cut_to(tmp_path / "whole") / "changelog"))
    assert (
        len(live_files(left, Epoch(1), LSN(0))) == len(live_files(DeltaTable(one.uri), Epoch(1), LSN(0))) > 1
    )


def test_parts_come_before_the_commit_that_names_them(disk: RecordedDisk) -> None:
    flushed: list[str] = []
    one = Written(new_changelog(disk.folder))
    disk.on_flush = lambda path: flushed.append(path.name)
    one.transaction(100, r7=3)
    one.flush()
    (part,) = [name for name in flushed if name.endswith(".parquet")]
    (commit,) = [name for name in flushed if name.endswith(".json")]
    hour = next(name for name in flushed if "T" in name and not name.endswith((".parquet", ".json")))
    order = [flushed.index(name) for name in (part, hour, commit)]
    assert order == sorted(order)
    assert flushed[-1] == "_delta_log"


def test_a_writer_takes_over_what_a_dead_one_left_unflushed(
    disk: RecordedDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Written(new_changelog(disk.folder))
    with monkeypatch.context() as dead:
        dead.setattr(os, "fsync", lambda _: None)
        one.transaction(100, r7=3)
        one.flush()
    successor = ChangelogWriter(one.uri)
    assert successor.durable_lsn == 108
    folder = disk.cut_to(tmp_path / "left") / "changelog"
    left = DeltaTable(str(folder))
    assert left.transaction_version("pgrepl-durable-lsn") == 108
    # The fence says this LSN too: what the dead writer wrote has to be whole as well.
    files = [file for file in Path(one.uri).rglob("*.*") if file.suffix in (".json", ".parquet")]
    assert len(files) == 1 + left.version() + 1
    assert all((folder / file.relative_to(one.uri)).read_bytes() == file.read_bytes() for file in files)


def test_a_commit_is_durable_with_all_before_it_whoever_made_them(disk: RecordedDisk, tmp_path: Path) -> None:
    one = Written(new_changelog(disk.folder))
    for _ in range(3):
        mark(one.uri)
    one.transaction(100, r7=3)
    one.flush()
    left = DeltaTable(str(disk.cut_to(tmp_path / "left") / "changelog"))
    assert left.version() == one.writer.version == 5


def test_failed_commit_fsync_keeps_durable_lsn_and_sets_commit_aside(
    disk: RecordedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed flush the page cache still shows the file as if it had been written."""
    one = Written(new_changelog(disk.folder))
    version, lsn = one.writer.version, one.writer.durable_lsn

    def refuse(descriptor: int) -> None:
        if opened_path(descriptor).suffix == ".json":
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", refuse)
        one.transaction(100, r7=3)
        with pytest.raises(LakeUnavailableError):
            one.flush()
    assert one.writer.durable_lsn == lsn
    assert DeltaTable(one.uri).version() == version
    assert ChangelogWriter(one.uri).durable_lsn == lsn


@pytest.mark.parametrize(
    "commit",
    [
        lambda lake: mark(changelog_uri(str(lake))),
        lambda lake: describe(changelog_uri(str(lake)), epoch_record(1, 100)),
        lambda lake: begin_epoch(changelog_uri(str(lake)), epoch_record(2, 700)),
        lambda lake: replace_files(open_changelog(changelog_uri(str(lake))), [], metadata={}),
        lambda lake: RelationIndex(relations_uri(str(lake))).forget(Epoch(1), 7),
    ],
    ids=["mark", "describe", "begin epoch", "replace files", "index a relation"],
)
def test_commit_of_deltalake_that_cannot_be_flushed_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: Callable[[Path], object]
) -> None:
    """The next flush would succeed, although the disk does not have the commit."""
    (tmp_path / "_pgrepl").mkdir()
    one = Written(new_changelog(tmp_path / "_pgrepl"))
    one.transaction(100, r7=3)
    one.flush()
    RelationIndex(relations_uri(str(tmp_path))).forget(Epoch(1), 1)
    before, good = log_files(tmp_path), os.fsync

    def refuse_new(descriptor: int) -> None:
        if opened_path(descriptor).suffix == ".json" and opened_path(descriptor) not in before:
            raise OSError(errno.EIO, "Input/output error")
        good(descriptor)

    with monkeypatch.context() as broken, pytest.raises(PgReplError):
        broken.setattr(os, "fsync", refuse_new)
        commit(tmp_path)
    assert log_files(tmp_path) == before


def log_files(lake: Path) -> set[Path]:
    return set(lake.rglob("[!.]*.json"))


def test_a_new_epoch_is_on_the_disk(disk: RecordedDisk, tmp_path: Path) -> None:
    uri = new_changelog(disk.folder)
    begin_epoch(uri, epoch_record(2, 700))
    left = DeltaTable(str(disk.cut_to(tmp_path / "left") / "changelog"))
    assert left.transaction_version("pgrepl-epoch") == 2


def test_the_relation_index_is_on_the_disk_before_the_changelog_refers_to_it(
    disk: RecordedDisk, tmp_path: Path
) -> None:
    uri = relations_uri(str(disk.folder))
    record = RelationRecord.of_catalog(relation(7, "k", "v"))
    RelationIndex(uri).add(Epoch(1), record)
    left = RelationIndex(relations_uri(str(disk.cut_to(tmp_path / "left"))))
    assert left.find(7, record.version) == record


def test_hours_that_were_dropped_are_dropped_on_the_disk(disk: RecordedDisk, tmp_path: Path) -> None:
    lake = disk.folder
    (lake / "_pgrepl").mkdir()
    one = Written(new_changelog(lake / "_pgrepl"))
    one.transaction(100, r7=3)
    one.flush()
    later = datetime.now(UTC) + timedelta(days=2)
    assert drop_expired(str(lake), 1, {1: 1_000}, later).files == 1
    left = DeltaTable(str(disk.cut_to(tmp_path / "left") / "_pgrepl/changelog"))
    assert left.transaction_version("pgrepl-floor-lsn:1") == 100


# Lake tables and points.


def test_a_snapshot_is_on_the_disk_when_it_is_committed(disk: RecordedDisk, tmp_path: Path) -> None:
    copied(disk.folder, 1, 2)
    assert ids(f"{disk.cut_to(tmp_path / 'left')}/public/t") == [1, 2]


def test_a_files_rows_are_on_the_disk_when_it_is_handed_over(disk: RecordedDisk, tmp_path: Path) -> None:
    """The process that commits the file may be on another host."""
    with ParquetFiles(str(disk.folder), "public/t", IDS) as files:
        files.write(pa.record_batch([pa.array([1, 2], pa.int64())], schema=IDS))
        (written,) = files.finish()
    disk._record_folder(disk.folder)
    disk._record_folder(disk.folder / "public")
    left = disk.cut_to(tmp_path / "left") / "public/t" / written.path
    assert left.stat().st_size == written.size


def test_each_commit_of_a_lake_table_is_on_the_disk(disk: RecordedDisk, tmp_path: Path) -> None:
    uri = copied(disk.folder, 1, 2)
    table = open_table(uri)
    for position in range(20, 55):
        write(table, pa.table({"id": pa.array([position], pa.int64())}), APP, LSN(position))
    left = f"{disk.cut_to(tmp_path / 'left')}/public/t"
    assert ids(left) == ids(uri)
    assert read_position(open_table(left), APP) == 54
    assert compact(table, APP) > 30
    left = f"{disk.cut_to(tmp_path / 'compacted')}/public/t"
    assert DeltaTable(left).version() == table.version()
    assert ids(left) == ids(uri)


def test_deletion_vector_is_on_the_disk_when_its_commit_is(disk: RecordedDisk, tmp_path: Path) -> None:
    table = open_table(copied(disk.folder, 1, 2, 3))
    properties = commit_properties(APP, LSN(20), "changes")
    replace_rows(table, APP, LSN(20), FileRows(table), {0: BitMap64([1])}, [], properties)
    left = FileRows(open_table(f"{disk.cut_to(tmp_path / 'left')}/public/t"))
    assert left.files[0].vector is not None
    assert [value for rows in left.all_of(0) for value in rows["id"].to_pylist()] == [1, 3]


def test_checkpoints_are_on_the_disk(disk: RecordedDisk, tmp_path: Path) -> None:
    table = open_table(copied(disk.folder, 1))
    for position in range(20, 125):
        write(table, pa.table({"id": pa.array([position], pa.int64())}), APP, LSN(position))
    log = disk.cut_to(tmp_path / "left") / "public/t/_delta_log"
    (checkpoint,) = (disk.folder / "public/t/_delta_log").glob("*.checkpoint.parquet")
    assert (log / checkpoint.name).read_bytes() == checkpoint.read_bytes()
    assert (log / "_last_checkpoint").read_bytes()


def test_points_are_on_the_disk(disk: RecordedDisk, tmp_path: Path) -> None:
    points = ConsistentPoints(str(disk.folder))
    made = [ConsistentPoint(1, lsn, datetime.now(UTC), {"public.t": lsn}) for lsn in (1, 2, 3)]
    for number, point in enumerate(made):
        points.append(point)
        left = ConsistentPoints(str(disk.cut_to(tmp_path / str(number))))
        assert list(left.all()) == made[: number + 1]
    assert points.thin(datetime.now(UTC) + timedelta(hours=2), 1, 100, 10) == 2
    assert ConsistentPoints(str(disk.cut_to(tmp_path / "thinned"))).all() == (made[2],)


def test_maintenance_deletes_nothing_that_the_disk_still_needs(disk: RecordedDisk, tmp_path: Path) -> None:
    """The commit that replaced a file may be visible to readers before it is on the disk."""
    for value in (1, 2):
        overwrite(disk.folder, value)
        durable.flush_commits(f"{disk.folder}/public/a", value - 2, value - 1)
    overwrite(disk.folder, 3)
    assert eager(disk.folder).run(soon()).files == 2
    left = DeltaTable(f"{disk.cut_to(tmp_path / 'left')}/public/a")
    assert left.version() == 2
    read = pa.table(QueryBuilder().register("t", left).execute("select n from t").read_all())
    assert read["n"].to_pylist() == [3]


def test_maintenance_deletes_no_log_that_a_checkpoint_in_the_cache_replaces(
    disk: RecordedDisk, tmp_path: Path
) -> None:
    overwrite(disk.folder, 0)
    durable.flush_newest(f"{disk.folder}/public/a")
    overwrite_each(disk.folder, *range(1, 205))
    maintenance = Maintenance(pipeline(disk.folder), grace=timedelta(0), log_age=timedelta(0))
    assert maintenance.run(soon()).log_entries
    assert DeltaTable(f"{disk.cut_to(tmp_path / 'left')}/public/a").version() == 204


def test_an_object_store_needs_no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("nothing is opened"))
    durable.flush_commits("s3://bucket/lake/public/t", -1, 3)
    durable.flush_files("s3://bucket/lake/public/t", ["a.parquet"])
    durable.flush_newest("s3://bucket/lake/public/t")


def test_a_file_system_that_cannot_flush_folders_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        if opened_path(descriptor).is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    copied(tmp_path, 1)
    assert ids(f"{tmp_path}/public/t") == [1]
