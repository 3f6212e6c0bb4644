"""changelog/maintenance.py: closed hours are compacted to few files, unnoticed by readers and writers."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_provider_pgrepl.errors import ChangelogError, FencedError, LakeUnavailableError
from airflow_provider_pgrepl.replication.changelog import maintenance
from airflow_provider_pgrepl.replication.changelog import writer as parts
from airflow_provider_pgrepl.replication.changelog.layout import RECEIVER_APP, changelog_uri
from airflow_provider_pgrepl.replication.changelog.maintenance import (
    CompactedFiles,
    DroppedHours,
    compact_closed_hours,
    drop_expired,
)
from airflow_provider_pgrepl.replication.changelog.reader import (
    Commit,
    live_files,
    open_changelog,
    read_commit,
    read_floor_lsn,
)
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, begin_epoch, replace_files
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.storage import open_storage
from tests.support.changelogs import epoch_record
from tests.support.hours import BEGAN, HourWriter, after_hour, held, new_lake, read, rows_at
from tests.support.recorded_disk import RecordedDisk
from tests.unit.test_maintenance import eager, parquet_files


@pytest.fixture
def lake(tmp_path: Path) -> str:
    (tmp_path / "lake").mkdir()
    return new_lake(tmp_path / "lake")


def writer_of(lake: str) -> HourWriter:
    return HourWriter(changelog_uri(lake))


def newest(lake: str) -> Commit:
    uri = changelog_uri(lake)
    return read_commit(*open_storage(uri), open_changelog(uri).version())


def test_an_hour_that_is_over_becomes_one_file_in_one_commit(lake: str) -> None:
    writer = writer_of(lake)
    for lsn in range(100, 200, 10):
        writer.land((7, lsn, 0), (8, lsn, 1), (7, lsn, 2))
    writer.land((7, 300, 0), hour=1)
    before = [read(lake, relation, above) for relation in (7, 8) for above in (0, 135, 190)]
    assert compact_closed_hours(lake, after_hour(0) - timedelta(seconds=1)) == CompactedFiles()
    version = open_changelog(changelog_uri(lake)).version()
    assert compact_closed_hours(lake, after_hour(0)) == CompactedFiles(10, 1)
    assert held(lake) == {"04T00": [(100, 190)], "04T01": [(300, 300)]}
    assert open_changelog(changelog_uri(lake)).version() == version + 1
    assert [read(lake, relation, above) for relation in (7, 8) for above in (0, 135, 190)] == before


def test_compacted_hour_is_not_compacted_again_until_files_are_added(lake: str) -> None:
    writer = writer_of(lake)
    for lsn in range(100, 200, 10):
        writer.land((7, lsn, 0))
    assert compact_closed_hours(lake, after_hour(0)) == CompactedFiles(10, 1)
    assert compact_closed_hours(lake, after_hour(9)) == CompactedFiles()
    # Parts of a long transaction are written in an hour that is over when it ends.
    writer.land((7, 200, 0), hour=0)
    assert compact_closed_hours(lake, after_hour(9)) == CompactedFiles(2, 1)


def test_a_joined_file_is_as_the_receiver_writes_them(lake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_SMALL_GROUP_ROWS", 4)
    writer = writer_of(lake)
    for lsn in range(100, 200, 10):
        writer.land((9, lsn, 0), (7, lsn, 1), (1, lsn, 2) if lsn == 150 else (7, lsn, 2))
    compact_closed_hours(lake, after_hour(0))
    (file,) = live_files(open_changelog(changelog_uri(lake)), Epoch(1), LSN(0))
    path = f"{changelog_uri(lake)}/{file.path}"
    rows = pq.read_table(path, partitioning=None)
    keys = ["relation_id", "commit_lsn", "ordinal"]
    assert rows == rows.sort_by([(key, "ascending") for key in keys])
    groups = [pq.ParquetFile(path).read_row_group(number) for number in range(3)]
    assert [group["relation_id"].unique().to_pylist() for group in groups] == [[1], [7], [9]]
    assert file.value_bytes == pytest.approx(rows.nbytes, rel=0.1)
    assert (file.min_lsn, file.max_lsn, file.min_relation, file.max_relation) == (100, 190, 1, 9)
    (added,) = added_by(lake)
    assert json.loads(added["stats"])["numRecords"] == 30
    assert added["path"].startswith("2026-05-04T00/")
    assert not added["dataChange"]


def added_by(lake: str) -> list[dict[str, Any]]:
    log = max(Path(changelog_uri(lake), "_delta_log").glob("*.json"))
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    return [action["add"] for action in actions if "add" in action]


def test_compaction_commit_lists_no_files_for_followers(lake: str) -> None:
    writer = writer_of(lake)
    for lsn in (100, 110):
        writer.land((7, lsn, 0))
    compact_closed_hours(lake, after_hour(0))
    commit = newest(lake)
    assert (commit.record, commit.files) == (None, ())


# Files that may be compacted into one.


def test_files_that_overlap_are_joined_together_or_not_at_all(
    lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(lake)
    size = writer.write_part(rows_at((7, 100, 0))).value_bytes
    writer.land((7, 100, 0))
    # A transaction of three parts, the last of which has one of before, and one of after.
    writer.land((7, 120, 0))
    writer.land((7, 120, 1))
    writer.land((7, 110, 0), (7, 120, 2), (7, 130, 0))
    writer.land((7, 140, 0))
    writer.land((7, 150, 0))
    before = read(lake, 7)
    monkeypatch.setattr(maintenance, "_JOINED_BYTES", 3 * size)
    assert compact_closed_hours(lake, after_hour(0)) == CompactedFiles(2, 1)
    assert held(lake) == {"04T00": [(100, 100), (110, 130), (120, 120), (120, 120), (140, 150)]}
    assert compact_closed_hours(lake, after_hour(0)) == CompactedFiles()
    monkeypatch.setattr(maintenance, "_JOINED_BYTES", 1 << 20)
    compact_closed_hours(lake, after_hour(0))
    assert held(lake) == {"04T00": [(100, 150)]}
    assert read(lake, 7) == before


def test_a_joined_file_spans_no_file_of_another_hour(lake: str) -> None:
    """The receiver's clock may have jumped backwards."""
    writer = writer_of(lake)
    for hour, lsn in ((0, 100), (0, 110), (1, 120), (0, 130), (0, 140), (2, 150), (2, 160)):
        writer.land((7, lsn, 0), hour=hour)
    # A transaction that was written ahead before the hour ended, and ended after it.
    writer.land((7, 170, 0), hour=2)
    writer.land((7, 170, 1), hour=3)
    writer.land((7, 180, 0), hour=3)
    before = read(lake, 7)
    assert compact_closed_hours(lake, after_hour(3)) == CompactedFiles(6, 3)
    assert held(lake) == {
        "04T00": [(100, 110), (130, 140)],
        "04T01": [(120, 120)],
        "04T02": [(150, 160), (170, 170)],
        "04T03": [(170, 170), (180, 180)],
    }
    assert read(lake, 7) == before


def test_epochs_never_share_a_file(lake: str) -> None:
    writer = writer_of(lake)
    writer.land((7, 100, 0))
    writer.land((7, 200, 0))
    begin_epoch(changelog_uri(lake), epoch_record(2, 90))
    writer = writer_of(lake)
    writer.land((7, 100, 0), epoch=2)
    writer.land((7, 150, 0), epoch=2)
    assert compact_closed_hours(lake, after_hour(0)) == CompactedFiles(4, 2)
    assert read(lake, 7)["commit_lsn"].to_pylist() == [100, 200]
    assert read(lake, 7, epoch=2)["commit_lsn"].to_pylist() == [100, 150]


def test_compaction_keeps_write_order_among_rows_at_same_position(lake: str) -> None:
    """Starts without a change between them record the publication status at the same position."""
    writer = writer_of(lake)
    for text in ("first", "second", "third"):
        writer.append_between(rows_at((7, writer.durable_lsn, -2), text=text))
    writer.land((7, writer.durable_lsn, 0))
    compact_closed_hours(lake, after_hour(0))
    assert [new[2] for new in read(lake, 7)["new"].to_pylist()] == ["first", "second", "third", ""]


def test_files_that_are_large_enough_stay(lake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(lake)
    large, small = rows_at((7, 100, 0), text="x" * 3_000), rows_at((7, 110, 0))
    monkeypatch.setattr(maintenance, "_JOINED_BYTES", 6_000)
    for place, rows in enumerate((large, small, large)):
        at = LSN(100 + 10 * place)
        rows = rows.set_column(1, "commit_lsn", pa.array([at], pa.int64()))
        writer.append([writer.write_part(rows)], durable_lsn=at, first_lsn=at, last_lsn=at, last_commit_us=0)
    assert compact_closed_hours(lake, after_hour(0)) == CompactedFiles()


def test_a_run_ends_when_it_has_joined_so_much_and_the_next_goes_on(
    lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(lake)
    for hour in range(3):
        for lsn in range(100, 160, 10):
            writer.land((7, 1_000 * (1 + hour) + lsn, 0), hour=hour)
    before = read(lake, 7)
    size = live_files(open_changelog(changelog_uri(lake)), Epoch(1), LSN(0))[0].value_bytes
    monkeypatch.setattr(maintenance, "_JOINED_BYTES", 3 * size)
    a_file = maintenance._LEAST_BYTES
    assert compact_closed_hours(lake, after_hour(2), most_bytes=1) == CompactedFiles(3, 1)
    assert compact_closed_hours(lake, after_hour(2), most_bytes=4 * a_file) == CompactedFiles(6, 2)
    assert list(held(lake).values()) == [
        [(1_100, 1_120), (1_130, 1_150)],
        [(2_100, 2_120), *singles(2_130)],
        singles(3_100, 6),
    ]
    assert compact_closed_hours(lake, after_hour(2)) == CompactedFiles(9, 3)
    assert compact_closed_hours(lake, after_hour(2)) == CompactedFiles()
    assert read(lake, 7) == before


def singles(first: int, count: int = 3) -> list[tuple[int, int]]:
    return [(lsn, lsn) for lsn in range(first, first + 10 * count, 10)]


# Writers that commit during compaction.


def test_a_receiver_writes_on_and_is_fenced_as_before(lake: str) -> None:
    writer = writer_of(lake)
    for lsn in (100, 110):
        writer.land((7, lsn, 0))
    part = writer.write_part(rows_at((7, 120, 0)))
    assert compact_closed_hours(lake, after_hour(0)) == CompactedFiles(2, 1)
    writer.append([part], durable_lsn=LSN(121), first_lsn=LSN(120), last_lsn=LSN(120), last_commit_us=0)
    assert compact_closed_hours(lake, after_hour(0)) == CompactedFiles(2, 1)
    writer.record_keepalive(LSN(130))
    assert open_changelog(changelog_uri(lake)).transaction_version(RECEIVER_APP) == writer.sequence
    assert ChangelogWriter(changelog_uri(lake), after=writer.sequence).durable_lsn == 130
    with pytest.raises(FencedError):
        writer.record_keepalive(LSN(140))
    assert read(lake, 7)["commit_lsn"].to_pylist() == [100, 110, 120]


def before_its_commit(monkeypatch: pytest.MonkeyPatch, what: Any) -> None:
    """Call `what` once, right before the next commit."""

    def commit(*arguments: Any, **named: Any) -> bool:
        monkeypatch.setattr(maintenance, "replace_files", replace_files)
        what()
        return replace_files(*arguments, **named)

    monkeypatch.setattr(maintenance, "replace_files", commit)


def test_a_receiver_may_commit_while_files_are_joined(lake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(lake)
    for lsn in (100, 110):
        writer.land((7, lsn, 0))
    before_its_commit(monkeypatch, lambda: writer.land((7, 120, 0)))
    assert compact_closed_hours(lake, after_hour(0)) == CompactedFiles(2, 1)
    writer.land((7, 130, 0))
    assert read(lake, 7)["commit_lsn"].to_pylist() == [100, 110, 120, 130]


def test_concurrent_compaction_with_same_files_is_rejected(
    lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta itself accepts both commits, and each row would exist twice."""
    writer = writer_of(lake)
    for lsn in (100, 110):
        writer.land((7, lsn, 0))
    before_its_commit(monkeypatch, lambda: compact_closed_hours(lake, after_hour(0)))
    with pytest.raises(LakeUnavailableError, match="another process changed the changelog"):
        compact_closed_hours(lake, after_hour(0))
    assert read(lake, 7)["commit_lsn"].to_pylist() == [100, 110]
    assert compact_closed_hours(lake, after_hour(0)) == CompactedFiles()


def test_hours_that_are_dropped_meanwhile_do_not_come_back(
    lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(lake)
    for lsn in (100, 110):
        writer.land((7, lsn, 0))
    before_its_commit(monkeypatch, lambda: drop_expired(lake, 1, {1: 500}, after_hour(3)))
    with pytest.raises(LakeUnavailableError, match="another process changed the changelog"):
        compact_closed_hours(lake, after_hour(0))
    assert held(lake) == {}
    assert read_floor_lsn(open_changelog(changelog_uri(lake)), Epoch(1)) == 110


def test_a_run_ends_when_another_has_changed_the_list(lake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(lake)
    for hour in range(2):
        for lsn in (100, 110):
            writer.land((7, 1_000 * hour + lsn, 0), hour=hour)

    def commit(*arguments: Any, **named: Any) -> bool:
        monkeypatch.setattr(maintenance, "replace_files", replace_files)
        replaced = replace_files(*arguments, **named)
        compact_closed_hours(lake, after_hour(1))
        arguments[0].update_incremental()
        return replaced and False

    monkeypatch.setattr(maintenance, "replace_files", commit)
    assert compact_closed_hours(lake, after_hour(1)) == CompactedFiles(2, 1)
    assert held(lake) == {"04T00": [(100, 110)], "04T01": [(1_100, 1_110)]}


# Compaction with the rest of maintenance.


def test_joined_hours_are_dropped_as_others_are(lake: str) -> None:
    writer = writer_of(lake)
    for hour in range(2):
        for lsn in (100, 110):
            writer.land((7, 1_000 * hour + lsn, 0), hour=hour)
    compact_closed_hours(lake, after_hour(1))
    assert drop_expired(lake, 1, {1: 109}, after_hour(5)) == DroppedHours()
    assert drop_expired(lake, 1, {1: 1_100}, after_hour(5)).hours == ("2026-05-04T00",)
    assert read_floor_lsn(open_changelog(changelog_uri(lake)), Epoch(1)) == 110
    assert read(lake, 7)["commit_lsn"].to_pylist() == [1_100, 1_110]


def test_maintenance_joins_and_takes_the_files_when_the_slowest_reader_is_past_that(lake: str) -> None:
    writer = writer_of(lake)
    for lsn in (100, 110):
        writer.land((7, lsn, 0))
    folder, maintenance = Path(changelog_uri(lake)), eager(Path(lake))
    done = maintenance.run(after_hour(300), reader_version=writer.version)
    assert (done.compacted_files, done.files, done.failed) == (2, 0, {})
    assert len(parquet_files(folder)) == 3
    assert maintenance.run(after_hour(300)).files == 0, "who knows of no reader deletes nothing"
    done = maintenance.run(after_hour(8_000), reader_version=open_changelog(str(folder)).version())
    assert (done.compacted_files, done.files) == (0, 2)
    assert read(lake, 7)["commit_lsn"].to_pylist() == [100, 110]


class Killed(BaseException):
    """Ends a process on the spot."""


def test_killed_compaction_keeps_rows_and_maintenance_deletes_orphan_file(
    lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(lake)
    for lsn in (100, 110):
        writer.land((7, lsn, 0))

    def killed() -> None:
        raise Killed

    before_its_commit(monkeypatch, killed)
    with pytest.raises(Killed):
        compact_closed_hours(lake, after_hour(0))
    assert read(lake, 7)["commit_lsn"].to_pylist() == [100, 110]
    assert len(parquet_files(Path(changelog_uri(lake)))) == 3
    done = eager(Path(lake)).run(after_hour(8_000), reader_version=1_000)
    assert (done.compacted_files, done.files) == (2, 3), "the orphan, and what was joined this time"
    assert read(lake, 7)["commit_lsn"].to_pylist() == [100, 110]


def test_a_storage_that_is_full_is_left_with_nothing_more(lake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(lake)
    for hour in range(2):
        for lsn in (100, 110, 120, 130):
            writer.land((7, 1_000 * (1 + hour) + lsn, 0), hour=hour)
    size = live_files(open_changelog(changelog_uri(lake)), Epoch(1), LSN(0))[0].value_bytes
    monkeypatch.setattr(maintenance, "_JOINED_BYTES", 2 * size + 2)
    real, written = parts.PartFolder.write, []

    def write(folder: parts.PartFolder, rows: pa.Table, hour: str | None = None) -> parts.Part:
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(real(folder, rows, hour))
        return written[-1]

    before = parquet_files(Path(changelog_uri(lake)))
    monkeypatch.setattr(parts.PartFolder, "write", write)
    with pytest.raises(
        LakeUnavailableError, match="of 2026-05-04T01 in the changelog cannot be joined: the storage is full"
    ):
        compact_closed_hours(lake, after_hour(1))
    assert next(iter(held(lake).values())) == [(1_100, 1_110), (1_120, 1_130)], "what was committed stays"
    assert len(parquet_files(Path(changelog_uri(lake))) - before) == 2


def test_a_lost_file_keeps_no_other_from_being_joined(lake: str, caplog: pytest.LogCaptureFixture) -> None:
    writer = writer_of(lake)
    for hour in range(3):
        for lsn in (100, 110):
            writer.land((7, 1_000 * hour + lsn, 0), hour=hour)
    files = live_files(open_changelog(changelog_uri(lake)), Epoch(1), LSN(0))
    Path(changelog_uri(lake), files[0].path).unlink()
    Path(changelog_uri(lake), files[3].path).write_bytes(b"PAR1 not")
    assert compact_closed_hours(lake, after_hour(2)) == CompactedFiles(2, 1)
    assert [len(found) for found in held(lake).values()] == [2, 2, 1]
    assert "2 files of 2026-05-04T00 in the changelog stay" in caplog.text


def test_files_of_a_stranger_fail_it_alone(lake: str) -> None:
    writer = writer_of(lake)
    writer.land((7, 100, 0))
    log = max(Path(changelog_uri(lake), "_delta_log").glob("*.json"))
    log.write_text(log.read_text().replace("2026-05-04T00/", "part-"))
    log.write_text(log.read_text().replace(".parquet", "-c000.parquet"))
    with pytest.raises(ChangelogError, match="cannot be listed: ValueError"):
        compact_closed_hours(lake, after_hour(0))


def test_a_lake_without_a_changelog_is_nothing_to_do(tmp_path: Path) -> None:
    assert compact_closed_hours(str(tmp_path), BEGAN) == CompactedFiles()
    new_lake(tmp_path)
    assert compact_closed_hours(str(tmp_path), BEGAN) == CompactedFiles()


def test_changelog_rows_survive_power_cut_before_and_after_compaction_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    disk = RecordedDisk(tmp_path / "disk").install(monkeypatch)
    lake = new_lake(disk.folder)
    writer = writer_of(lake)
    for lsn in (100, 110):
        writer.land((7, lsn, 0))
    before = read(lake, 7)
    at_commit: list[pa.Table] = []
    before_its_commit(monkeypatch, lambda: at_commit.append(read(str(disk.cut_to(tmp_path / "before")), 7)))
    compact_closed_hours(lake, after_hour(0))
    left = str(disk.cut_to(tmp_path / "after"))
    assert at_commit == [before]
    assert held(left) == {"04T00": [(100, 110)]}
    assert read(left, 7) == before
