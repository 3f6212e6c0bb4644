"""lake/maintenance.py and lake/delta/vacuum.py on real Delta tables."""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction, write_deltalake

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA, EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, create_changelog
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.maintenance import (
    Maintenance,
    MaintenanceResult,
    VersionsForPoints,
)
from airflow_provider_pgrepl.replication.lake.read import consistent_arrow
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

NOTHING = timedelta(0)
DAY = timedelta(days=1)
NOBODY = 65534


def pipeline(lake: Path, **settings: float) -> Pipeline:
    """Return a pipeline whose lake has at least one point: without any, maintenance keeps everything."""
    if not ConsistentPoints(str(lake)).all():
        ConsistentPoints(str(lake)).append(
            ConsistentPoint(0, LSN(0), datetime.now(UTC), {"public.of_another_time": 0})
        )
    return Pipeline.from_dict({"name": "shop", "lake": str(lake), "tables": ["public.*"], **settings})


MARKS = tuple(f"pgrepl-path:{path}" for path in ("public/a", "public/b", "other/b"))
OURS = CommitProperties(
    custom_metadata={"pgrepl": '{"kind": "changes"}'},
    app_transactions=[Transaction(app, 1) for app in ("shop:1", *MARKS)],
)


def overwrite(lake: Path, value: int, table: str = "a") -> int:
    """Write a new version that holds only `value`, in a file of its own."""
    rows = pa.table({"n": pa.array([value])})
    write_deltalake(f"{lake}/public/{table}", rows, mode="overwrite", commit_properties=OURS)
    version: int = DeltaTable(f"{lake}/public/{table}").version()
    return version


def overwrite_each(lake: Path, *values: int) -> list[int]:
    """Write a version for each value, through one handle, which does not read the log again each time."""
    first, *more = values
    versions = [overwrite(lake, first)]
    table = DeltaTable(f"{lake}/public/a")
    for value in more:
        write_deltalake(table, pa.table({"n": pa.array([value])}), mode="overwrite", commit_properties=OURS)
        versions.append(table.version())
    return versions


def soon() -> datetime:
    """Return a time after all files just written, whatever a file system rounds times to."""
    return datetime.now(UTC) + timedelta(seconds=5)


def pin(points: ConsistentPoints, lsn: int, version: int, ago: timedelta = NOTHING) -> None:
    points.append(ConsistentPoint(1, LSN(lsn), datetime.now(UTC) - ago, {"public.a": version}))


def parquet_files(folder: Path) -> set[str]:
    return {file.name for file in folder.rglob("*.parquet") if "_delta_log" not in file.parts}


def eager(
    lake: Path, versions_for_points: Callable[[], VersionsForPoints | None] = dict, **settings: float
) -> Maintenance:
    return Maintenance(
        pipeline(lake, **settings),
        versions_for_points=versions_for_points,
        grace=NOTHING,
        changelog_grace=NOTHING,
        orphan_age=DAY,
        log_age=NOTHING,
        hold=NOTHING,
    )


def test_only_files_of_kept_points_and_of_the_newest_version_stay(tmp_path: Path) -> None:
    points = ConsistentPoints(str(tmp_path))
    versions = [overwrite(tmp_path, value) for value in range(8)]
    for lsn in (2, 5):
        pin(points, lsn, versions[lsn])
    done = eager(tmp_path).run(soon())
    assert done == MaintenanceResult(files=5)
    assert len(parquet_files(tmp_path / "public/a")) == 3
    for lsn in (2, 5):
        assert consistent_arrow(str(tmp_path), lsn).table("public.a")["n"].to_pylist() == [lsn]
    assert DeltaTable(f"{tmp_path}/public/a").version() == versions[-1]
    with pytest.raises(Exception, match=r"not found|No such file"):
        DeltaTable(f"{tmp_path}/public/a", version=3).to_pandas()


@pytest.mark.parametrize("hidden", ["consistent_points", "consistent_points/_delta_log"])
def test_nothing_of_a_table_is_deleted_while_the_points_are_out_of_sight(tmp_path: Path, hidden: str) -> None:
    lake, points = tmp_path / "lake", ConsistentPoints(f"{tmp_path}/lake")
    versions = [overwrite(lake, value) for value in range(4)]
    pin(points, 1, versions[1])
    maintenance, folder = eager(lake), lake / "_pgrepl" / hidden
    away = folder.rename(tmp_path / "away")
    for done in (maintenance.run(soon()), maintenance.keep_budget(soon())):
        assert (done.files, done.log_entries, len(parquet_files(lake / "public/a"))) == (0, 0, 4)
    assert (
        "no file of a lake table was deleted"
        in maintenance.run(soon()).left_alone["_pgrepl/consistent_points"]
    )
    away.rename(folder)
    done = maintenance.run(soon())
    assert (done.files, done.left_alone) == (2, {})
    assert consistent_arrow(str(lake), 1).table("public.a")["n"].to_pylist() == [1]


@pytest.mark.parametrize("closed", ["lost+found", "public/lost+found", "closed", "public/closed"])
def test_a_folder_that_may_not_be_looked_into_keeps_nothing_of_others(open_folder: Path, closed: str) -> None:
    for value in range(3):
        overwrite(open_folder, value)
    for value in range(3):
        write_deltalake(
            f"{open_folder}/other/b", pa.table({"n": [value]}), mode="overwrite", commit_properties=OURS
        )
    (open_folder / closed).mkdir()
    with as_somebody_who_may_not_enter(open_folder, open_folder / closed):
        done = eager(open_folder).run(soon())
    is_ours = "lost+found" not in closed
    assert (done.files, set(done.failed)) == (4, {closed} if is_ours else set())


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that any user may enter: each pytest that starts closes its base folder to others."""
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-lake-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def as_somebody_who_may_not_enter(lake: Path, closed: Path) -> Iterator[None]:
    """Run the block as a user who may not enter `closed`: root, who may, becomes another user."""
    if os.geteuid() != 0:
        closed.chmod(0)
        yield
        closed.chmod(0o700)
        return
    for path in (lake, *lake.rglob("*")):
        if path != closed:
            os.chown(path, NOBODY, NOBODY)
    closed.chmod(0o700)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_points_are_thinned_before_their_files_go(tmp_path: Path) -> None:
    points = ConsistentPoints(str(tmp_path))
    for lsn in range(1, 7):
        pin(points, lsn, overwrite(tmp_path, lsn), ago=timedelta(minutes=59, seconds=-lsn))
    maintenance = eager(
        tmp_path, consistent_point_keep_all_h=0.5, consistent_point_thinning_min=60 * 24 * 365 * 100
    )
    done = maintenance.run(soon())
    assert done.points == 5
    assert done.files == 5 + 6, "five of the table, six of the points' own"
    assert consistent_arrow(str(tmp_path)).table("public.a")["n"].to_pylist() == [6]


def test_version_that_a_later_point_may_name_keeps_its_files(tmp_path: Path) -> None:
    """A hot table is merged again and again until the slowest one has merged up to the same boundary."""
    versions, points = [overwrite(tmp_path, value) for value in range(5)], ConsistentPoints(str(tmp_path))
    pin(points, 0, versions[0])
    waiting = {"public/a": {versions[2]}}
    maintenance = eager(tmp_path, versions_for_points=lambda: waiting)
    assert maintenance.run(soon()).files == 2
    pin(points, 2, versions[2])
    waiting.clear()
    assert maintenance.run(soon()).files == 0
    assert consistent_arrow(str(tmp_path), 2).table("public.a")["n"].to_pylist() == [2]


def test_version_that_gets_its_point_while_maintenance_looks_keeps_its_files(tmp_path: Path) -> None:
    versions, points = [overwrite(tmp_path, value) for value in range(3)], ConsistentPoints(str(tmp_path))
    pin(points, 0, versions[0])

    def none_since_the_point_is_written() -> dict[str, set[int]]:
        pin(points, 1, versions[1])
        return {}

    assert eager(tmp_path, versions_for_points=none_since_the_point_is_written).run(soon()).files == 0
    assert consistent_arrow(str(tmp_path), 1).table("public.a")["n"].to_pylist() == [1]


def test_nothing_of_a_table_is_deleted_while_versions_for_points_are_unknown(tmp_path: Path) -> None:
    versions, points = overwrite_each(tmp_path, *range(120)), ConsistentPoints(str(tmp_path))
    pin(points, 1, versions[118], ago=DAY)
    pin(points, 2, versions[119])
    maintenance = eager(
        tmp_path,
        versions_for_points=lambda: None,
        consistent_point_keep_all_h=0.5,
        consistent_point_retention_h=1,
    )
    for done in (maintenance.run(soon()), maintenance.keep_budget(soon())):
        assert len(parquet_files(tmp_path / "public/a")) == 120
        assert Path(tmp_path, f"public/a/_delta_log/{0:020d}.json").exists()
        assert (done.failed, done.left_alone) == ({}, {})
    assert [point.lsn for point in ConsistentPoints(str(tmp_path)).all()] == [2], "points are thinned"


def test_a_removed_file_outlives_its_removal_by_the_grace(tmp_path: Path) -> None:
    overwrite(tmp_path, 1)
    overwrite(tmp_path, 2)
    maintenance = Maintenance(pipeline(tmp_path), grace=timedelta(minutes=15))
    assert maintenance.run(soon()).files == 0
    assert maintenance.run(soon() + timedelta(minutes=14)).files == 0
    assert maintenance.run(soon() + timedelta(minutes=16)).files == 1


def test_maintenance_deletes_uncommitted_file_only_after_24_hours(tmp_path: Path) -> None:
    overwrite(tmp_path, 1)
    (tmp_path / f"public/a/part-{uuid.uuid4()}.zstd.parquet").write_bytes(b"PAR1")
    assert eager(tmp_path).run(soon() + timedelta(hours=23)).files == 0
    assert eager(tmp_path).run(soon() + timedelta(hours=25)).files == 1
    assert DeltaTable(f"{tmp_path}/public/a").to_pandas()["n"].tolist() == [1]


def test_maintenance_never_deletes_hidden_or_non_data_files(tmp_path: Path) -> None:
    overwrite(tmp_path, 1)
    others = ["notes.txt", "_private.parquet", ".x.parquet", "_dir/y.parquet"]
    for name in others:
        (tmp_path / "public/a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "public/a" / name).touch()
    (tmp_path / "public/plain.parquet").touch()
    assert eager(tmp_path).run(soon() + 10 * DAY).files == 0


def test_a_run_writes_no_commit_to_a_table(tmp_path: Path) -> None:
    version = [overwrite(tmp_path, value) for value in range(4)][-1]
    stale = DeltaTable(f"{tmp_path}/public/a")
    eager(tmp_path).run(soon())
    assert DeltaTable(f"{tmp_path}/public/a").version() == version
    write_deltalake(stale, pa.table({"n": pa.array([9])}), mode="append")


def test_a_run_goes_on_from_where_the_last_one_ended(tmp_path: Path) -> None:
    points = ConsistentPoints(str(tmp_path))
    maintenance = eager(tmp_path)
    pin(points, 1, overwrite(tmp_path, 1))
    overwrite(tmp_path, 2)
    assert maintenance.run(soon()).files == 0
    pin(points, 3, overwrite(tmp_path, 3))
    assert maintenance.run(soon()).files == 1
    assert consistent_arrow(str(tmp_path), 1).table("public.a")["n"].to_pylist() == [1]
    assert maintenance.run(soon()) == MaintenanceResult()


@pytest.mark.parametrize("more", [0, 4], ids=["older", "written on"])
def test_files_that_count_again_since_the_folder_was_put_back_stay(tmp_path: Path, more: int) -> None:
    """The maintenance had seen them replaced. New versions may have passed the last one that it knew."""
    folder, kept, maintenance = tmp_path / "public/a", tmp_path / "_kept", eager(tmp_path)
    for value in range(3):
        overwrite(tmp_path, value)
    shutil.copytree(folder, kept)
    for value in range(3, 6):
        overwrite(tmp_path, value)
    maintenance.measure()
    written = maintenance.keep_budget(soon()) and maintenance.measure()["public/a"].written
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)
    for value in range(more):
        write_deltalake(str(folder), pa.table({"n": pa.array([10 + value])}), mode="append")
    maintenance.run(soon() + DAY / 2)
    found = sorted(DeltaTable(folder).to_pandas()["n"].tolist())
    assert found == [2, *range(10, 10 + more)]
    assert maintenance.measure()["public/a"].written >= written


def test_log_entries_go_up_to_the_checkpoint_that_the_oldest_kept_version_is_built_from(
    tmp_path: Path,
) -> None:
    points = ConsistentPoints(str(tmp_path))
    versions = overwrite_each(tmp_path, *range(250))
    for value in (150, 240):
        pin(points, value, versions[value])
    done = eager(tmp_path).run(soon())
    left = sorted(int(file.name[:20]) for file in Path(tmp_path, "public/a/_delta_log").glob("*.json"))
    assert left == list(range(99, 250)), "deltalake checkpoints version 99"
    assert done.log_entries >= 99
    for lsn in (150, 240):
        assert consistent_arrow(str(tmp_path), lsn).table("public.a")["n"].to_pylist() == [lsn]
    # Another process that begins with what is left comes to the same end.
    overwrite(tmp_path, 1_000)
    assert eager(tmp_path).run(soon()).files == 1
    assert consistent_arrow(str(tmp_path), 150).table("public.a")["n"].to_pylist() == [150]


def test_young_log_entries_stay(tmp_path: Path) -> None:
    overwrite_each(tmp_path, *range(120))
    assert Maintenance(pipeline(tmp_path)).run(soon()).log_entries == 0


def test_a_table_without_checkpoints_gets_one(tmp_path: Path) -> None:
    overwrite(tmp_path, 0)
    uri = f"{tmp_path}/public/a"
    table = DeltaTable(uri)
    for value in range(1, 205):
        write_deltalake(
            table,
            pa.table({"n": pa.array([value])}),
            mode="append",
            post_commithook_properties=PostCommitHookProperties(create_checkpoint=False),
        )
    eager(tmp_path).run(soon())
    assert [int(file.name[:20]) for file in Path(uri, "_delta_log").glob("*.checkpoint.parquet")] == [204]
    assert DeltaTable(uri).to_pandas()["n"].sum() == sum(range(205))


def test_a_table_that_cannot_be_read_stops_no_other(tmp_path: Path) -> None:
    for table in ("a", "b"):
        overwrite(tmp_path, 1, table)
        overwrite(tmp_path, 2, table)
    for entry in (tmp_path / "public/a/_delta_log").iterdir():
        entry.write_text("{")
    done = eager(tmp_path).run(soon())
    assert list(done.failed) == ["public/a"]
    assert isinstance(done.failed["public/a"], LakeError)
    assert done.files == 1


def test_hours_of_the_changelog_go_and_its_files_after_the_slowest_reader(tmp_path: Path) -> None:
    record = EpochRecord("shop", Epoch(1), "7", 1, "pgrepl_shop", "pgrepl_shop", 16_400, LSN(0))
    create_changelog(changelog_uri(str(tmp_path)), record)
    # It writes a point, of which the changelog gets a mark.
    maintenance = eager(tmp_path, changelog_retention_h=1, consistent_point_retention_h=1)
    writer = ChangelogWriter(changelog_uri(str(tmp_path)))
    change = {"epoch": 1, "commit_lsn": 10, "ordinal": 0, "relation_id": 7, "op": "I", "new": ["x"]}
    part = writer.write_part(pa.Table.from_pylist([change], ROW_SCHEMA))
    lsns = {"durable_lsn": LSN(11), "first_lsn": LSN(10), "last_lsn": LSN(10)}
    writer.append([part], **lsns, last_commit_us=0)
    before = writer.version
    later = datetime.now(UTC) + timedelta(hours=3)

    assert maintenance.run(later, needed_above={1: 9}, reader_version=writer.version) == MaintenanceResult()
    done = maintenance.run(later, needed_above={1: 10}, reader_version=before)
    assert done == MaintenanceResult(changelog_files=1), "a reader may have listed it before"
    assert maintenance.run(later).files == 0
    assert maintenance.run(later, reader_version=before + 1).files == 1
    assert not (tmp_path / "_pgrepl/changelog" / part.hour).exists()
    writer.record_keepalive(LSN(20))


@pytest.mark.parametrize("seed", range(1, 7))
def test_kept_points_stay_readable_through_any_history(tmp_path: Path, seed: int) -> None:
    """Random appends, overwrites, deletes, compactions, checkpoints, restarts and runs against a model."""
    chance = random.Random(seed)
    uri, points = f"{tmp_path}/public/a", ConsistentPoints(str(tmp_path))
    maintenance = eager(tmp_path)
    expected: dict[int, list[int]] = {}
    state = [0]
    overwrite(tmp_path, 0)
    for lsn in range(1, 60):
        data = pa.table({"n": pa.array([lsn])})
        match chance.randrange(8):
            case 0:
                write_deltalake(uri, data, mode="overwrite")
                state = [lsn]
            case 1:
                gone = chance.choice(state or [0])
                DeltaTable(uri).delete(f"n = {gone}")
                state = [value for value in state if value != gone]
            case 2:
                DeltaTable(uri).optimize.compact()
            case 3:
                DeltaTable(uri).create_checkpoint()
            case 4:
                points.thin(soon(), 0.000001, 0.001, 1)
                maintenance.run(soon())
            case 5:
                points = ConsistentPoints(str(tmp_path))
                maintenance = eager(tmp_path)
            case _:
                write_deltalake(uri, data, mode="append")
                state = [*state, lsn]
        if chance.random() < 0.4:
            expected[lsn] = sorted(state)
            pin(points, lsn, DeltaTable(uri).version())
    maintenance.run(soon())
    for point in [point for point in ConsistentPoints(str(tmp_path)).all() if point.epoch]:
        found = consistent_arrow(str(tmp_path), point.lsn).table("public.a")["n"].to_pylist()
        assert sorted(found) == expected[point.lsn]
    assert sorted(DeltaTable(uri).to_pandas()["n"].tolist()) == sorted(state)


def test_file_that_is_written_while_the_folder_of_a_partition_goes_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, real = f"{tmp_path}/public/a", Path.rmdir
    for value in range(3):
        rows = pa.table({"n": [value], "part": [f"p{value}"]})
        write_deltalake(uri, rows, mode="overwrite", partition_by=["part"], commit_properties=OURS)
    late = Path(uri, "part=p0", "precious")

    def rmdir(folder: Path) -> None:
        if folder == late.parent:
            late.write_text("x")
        real(folder)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    assert eager(tmp_path).run(soon()).files == 2
    assert sorted(path.name for path in Path(uri).glob("part=*")) == ["part=p0", "part=p2"]
    assert late.exists()


# Files that are not the pipeline's.


def test_log_that_shows_a_write_of_another_program_is_kept_until_the_next_snapshot(tmp_path: Path) -> None:
    uri, log_folder = f"{tmp_path}/public/a", f"{tmp_path}/public/a/_delta_log"
    versions = overwrite_each(tmp_path, *range(3))
    write_deltalake(uri, pa.table({"n": [7]}), mode="append")
    DeltaTable(uri).optimize.compact()
    DeltaTable(uri).create_checkpoint()
    overwrite(tmp_path, 8)
    for maintenance in (eager(tmp_path), eager(tmp_path)):
        done = maintenance.run(soon())
        assert (done.log_entries, list(done.left_alone)) == (0, ["public/a/_delta_log"])
        assert f"version {versions[-1] + 1} " in done.left_alone["public/a/_delta_log"]
    assert Path(log_folder, f"{0:020d}.json").exists()
    snapshot = CommitProperties(custom_metadata={"pgrepl": '{"kind": "snapshot"}'})
    write_deltalake(uri, pa.table({"n": [9]}), mode="overwrite", commit_properties=snapshot)
    done = maintenance.run(soon())
    assert (done.log_entries, done.left_alone) == (4, {})


def old(file: Path) -> Path:
    """A file that was written a month ago."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x")
    os.utime(file, (0, 0))
    return file


def test_old_files_that_people_put_into_a_tables_folder_stay(tmp_path: Path) -> None:
    table = tmp_path / "public" / "a"
    overwrite(tmp_path, 1)
    theirs = [
        old(table / name)
        for name in ("orders-2019.parquet", "photo.bin", f"export/part-{uuid.uuid4()}.zstd.parquet")
    ]
    ours = old(table / f"part-{uuid.uuid4()}.zstd.parquet")
    assert eager(tmp_path).run(soon()).files == 1
    assert (ours.exists(), [file.exists() for file in theirs]) == (False, [True] * 3)


def test_maintenance_keeps_files_behind_symlinks_and_in_nested_tables(tmp_path: Path) -> None:
    table = tmp_path / "public" / "a"
    overwrite(tmp_path, 1)
    nested = f"{table}/sales/x"
    for value in range(2):
        write_deltalake(nested, pa.table({"n": [value]}), mode="overwrite")
    for file in Path(nested).glob("*.parquet"):
        os.utime(file, (0, 0))
    archived = old(tmp_path.with_name(f"{tmp_path.name}-archive") / f"part-{uuid.uuid4()}.zstd.parquet")
    (table / "archive").symlink_to(archived.parent)
    (table / f"part-{uuid.uuid4()}.zstd.parquet").symlink_to(archived)
    assert eager(tmp_path).run(soon()).files == 0
    assert archived.exists()


@pytest.mark.parametrize("kind", ["another program", "another pipeline", "a link"])
def test_tables_of_others_are_left_alone_and_named(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = tmp_path / ("elsewhere/t" if kind == "a link" else "lake/bi/t")
    app = "other:1" if kind == "another pipeline" else "shop:1"
    apps = [] if kind == "another program" else [Transaction(app, 1)]
    for value in range(3):
        about = CommitProperties(app_transactions=apps)
        write_deltalake(str(theirs), pa.table({"n": [value]}), mode="overwrite", commit_properties=about)
    if kind == "a link":
        (tmp_path / "lake/bi").mkdir(parents=True)
        (tmp_path / "lake/bi/t").symlink_to(theirs)
    maintenance = eager(tmp_path / "lake")
    for _ in range(2):
        done = maintenance.run(soon())
        assert (done.files, done.failed, list(done.left_alone)) == (0, {}, ["bi/t"])
    assert len(parquet_files(theirs)) == 3
    assert len([record for record in caplog.records if "left alone" in record.getMessage()]) == 1
    assert "bi/t" not in maintenance.measure()


def test_version_whose_point_another_process_deleted_is_held_for_readers(tmp_path: Path) -> None:
    """`pgrepl maintain` a second after the app: a query may read at that point."""
    points = ConsistentPoints(str(tmp_path))
    for value in range(4):
        pin(points, value, overwrite(tmp_path, value), ago=timedelta(hours=9 - value))
    reader = DeltaTable(f"{tmp_path}/public/a", version=1)
    hold = timedelta(minutes=2)

    def maintained(now: datetime) -> MaintenanceResult:
        return Maintenance(
            pipeline(tmp_path, consistent_point_retention_h=6.5, consistent_point_keep_all_h=0.1),
            grace=NOTHING,
            hold=hold,
        ).run(now)

    assert maintained(soon()).points == 3
    assert maintained(soon() + timedelta(seconds=1)).files == 0
    assert reader.to_pandas()["n"].tolist() == [1]
    assert maintained(soon() + hold).files >= 3


def test_host_clock_that_is_ahead_shortens_no_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Ahead:
            return cls.fromtimestamp((datetime.now(tz) + timedelta(minutes=20)).timestamp(), tz)

    (tmp_path / "_pgrepl").mkdir()
    overwrite(tmp_path, 0)
    reader = DeltaTable(f"{tmp_path}/public/a")
    overwrite(tmp_path, 1)
    monkeypatch.setattr("airflow_provider_pgrepl.replication.lake.maintenance.datetime", Ahead)
    maintenance = Maintenance(pipeline(tmp_path))
    assert (maintenance.run().files, maintenance.keep_budget().files) == (0, 0)
    assert reader.to_pandas()["n"].tolist() == [0]
    assert [path.name for path in (tmp_path / "_pgrepl").iterdir()] == ["consistent_points"]


def test_removal_by_a_writer_whose_clock_is_behind_keeps_its_grace(tmp_path: Path) -> None:
    overwrite(tmp_path, 0)
    overwrite(tmp_path, 1)
    commit = tmp_path / "public/a/_delta_log" / f"{1:020d}.json"
    stamped = re.sub(r'"deletionTimestamp":\d+', '"deletionTimestamp":1000', commit.read_text())
    commit.write_text(stamped)
    assert Maintenance(pipeline(tmp_path)).run(soon()).files == 0
    assert Maintenance(pipeline(tmp_path)).run(soon() + timedelta(minutes=16)).files == 1
