"""lake/consistent_points.py: the position up to which a table is whole if it may have been reverted."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from airflow_provider_pgrepl.errors import ChangelogError, LakeChangedError, LakeError, LakeTableError
from airflow_provider_pgrepl.replication.lake.consistent_points import (
    ConsistentPoint,
    ConsistentPoints,
    TablePosition,
    read_table_position,
)
from airflow_provider_pgrepl.replication.lake.delta.live_files import (
    check_files,
    commit_fingerprint,
    settle_log,
)
from airflow_provider_pgrepl.replication.lake.delta.table import forget, leave, open_newest
from airflow_provider_pgrepl.replication.lake.read import consistent_arrow
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from tests.support.changelogs import new_changelog

KEY, APP = "public.a", "p:1"
NOW = datetime.now(UTC)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A table with versions 0 to 4, at the positions 0, 10, …, 40."""
    uri = f"{tmp_path}/public/a"
    for number in range(5):
        write(uri, number, 10 * number)
    return uri


def write(uri: str, value: int, position: int) -> None:
    about = CommitProperties(app_transactions=[Transaction(APP, position)])
    write_deltalake(uri, pa.table({"n": [value]}), mode="append", commit_properties=about)


def commit_file(uri: str, version: int) -> Path:
    return Path(uri, "_delta_log", f"{version:020d}.json")


def take_commits(uri: str, *versions: int) -> None:
    for version in versions:
        commit_file(uri, version).unlink()


def point(lsn: int, version: int, seen: int | None) -> ConsistentPoint:
    return ConsistentPoint(1, lsn, NOW, {KEY: version}, {} if seen is None else {KEY: seen})


def table_position(uri: str, found: ConsistentPoint | None) -> TablePosition:
    known = read_table_position(DeltaTable(uri), APP, KEY, found)
    assert known is not None
    return known


def test_a_point_stands_for_a_table_that_has_what_the_point_saw(uri: str) -> None:
    assert table_position(uri, None) == TablePosition(LSN(40), LSN(40), 4)
    assert table_position(uri, point(95, 4, 40)) == TablePosition(LSN(40), LSN(95), 4, 4)
    assert table_position(uri, point(35, 3, 30)) == TablePosition(LSN(40), LSN(40), 4, 3)


def test_no_point_stands_for_a_table_that_went_back(uri: str) -> None:
    take_commits(uri, 3, 4)
    assert table_position(uri, point(95, 4, 40)) == TablePosition(LSN(20), LSN(20), 2, seen=LSN(40))
    write(uri, 3, 25)
    write(uri, 4, 28)
    write(uri, 5, 29)
    assert table_position(uri, point(95, 4, 40)).whole == 29, "versions passed the named one again"
    write(uri, 6, 40)
    assert table_position(uri, point(95, 4, 40)).whole == 95


def test_a_point_without_positions_stands_for_the_version_that_it_names(uri: str) -> None:
    assert table_position(uri, point(95, 4, None)) == TablePosition(LSN(40), LSN(95), 4, 4)
    assert table_position(uri, point(39, 4, None)).seen, "what it names is beyond it"
    take_commits(uri, 4)
    assert table_position(uri, point(95, 4, None)).whole == 30


def test_a_table_of_another_epoch_stands_nowhere(uri: str) -> None:
    assert read_table_position(DeltaTable(uri), "p:2", KEY, None) is None


@pytest.mark.parametrize(
    ("own", "whole", "kind"),
    [
        (20, 95, None),
        (19, 95, LakeChangedError),
        (101, 101, LakeChangedError),
        (20, 101, LakeChangedError),
        (20, 49, ChangelogError),
    ],
)
def test_table_position_outside_last_copy_or_changelog_range_is_a_problem(
    own: int, whole: int, kind: type | None
) -> None:
    found = TablePosition(LSN(own), LSN(whole), 4).problem(LSN(20), LSN(50), LSN(100))
    assert (found and type(found)) == kind


def test_points_beyond_the_changelog_are_named() -> None:
    found = TablePosition(LSN(20), LSN(101), 4).problem(LSN(20), LSN(0), LSN(100))
    assert found is not None
    assert "_pgrepl/consistent_points" in found.message


def test_a_copy_may_be_ahead_of_the_changelog() -> None:
    assert TablePosition(LSN(200), LSN(200), 0).problem(LSN(200), LSN(0), LSN(100)) is None


def test_points_name_a_table_no_more_where_it_was_beyond_what_it_is(tmp_path: Path) -> None:
    points = ConsistentPoints(str(tmp_path))
    written = [
        ConsistentPoint(
            1, lsn, NOW, {KEY: lsn, f"{KEY}~history": 9, "public.b": 1}, {KEY: lsn, "public.b": 1}
        )
        for lsn in (10, 20, 30)
    ]
    for one in written:
        points.append(one)
    points.append(ConsistentPoint(1, 31, NOW, {KEY: 31}, {KEY: 31}))
    points.disown(TableName.parse(KEY), 1, 20, 99)
    left = ConsistentPoints(str(tmp_path)).all()
    assert list(left[:2]) == written[:2]
    assert [(one.tables, one.positions) for one in left[2:]] == [({"public.b": 1}, {"public.b": 1})]
    assert points.last_of(TableName.parse(KEY), 1) == written[1]
    points.append(ConsistentPoint(1, 32, NOW, {KEY: 32}, {KEY: 32}))
    points.disown(TableName.parse(KEY), 1, 20, 21)
    assert points.last_of(TableName.parse(KEY), 1) == written[1]


def test_points_without_positions_are_disowned_by_version(tmp_path: Path) -> None:
    points = ConsistentPoints(str(tmp_path))
    for lsn in (10, 20, 30):
        points.append(ConsistentPoint(1, lsn, NOW, {KEY: lsn}))
    points.disown(TableName.parse(KEY), 1, 99, 20)
    assert [one.lsn for one in ConsistentPoints(str(tmp_path)).all()] == [10, 20]
    points.disown(TableName.parse(KEY), 1, 0, 0)
    assert ConsistentPoints(str(tmp_path)).all() == ()
    points.append(ConsistentPoint(1, 40, NOW, {KEY: 40}))
    assert len(ConsistentPoints(str(tmp_path)).all()) == 1


def test_a_reader_does_not_take_another_version_for_the_points(tmp_path: Path, uri: str) -> None:
    points = ConsistentPoints(str(tmp_path))
    points.append(point(95, 4, 41))
    assert consistent_arrow(str(tmp_path)).table(KEY).num_rows == 5, "no changelog says whose lake it is"
    new_changelog(tmp_path / "_pgrepl")
    with pytest.raises(LakeError, match="restored from a copy"):
        consistent_arrow(str(tmp_path)).table(KEY)
    points.append(point(96, 4, 40))
    assert consistent_arrow(str(tmp_path)).table(KEY).num_rows == 5


@pytest.mark.parametrize("emptied", [(4,), (3, 4), (2,)], ids=["newest", "newest two", "in the middle"])
def test_a_table_goes_back_to_before_an_empty_commit(uri: str, emptied: tuple[int, ...]) -> None:
    for version in emptied:
        commit_file(uri, version).write_bytes(b"")
    settle_log(uri, "p")
    table = DeltaTable(uri)
    assert (table.version(), table.transaction_version(APP)) == (emptied[0] - 1, 10 * (emptied[0] - 1))
    assert sorted(table.to_pandas()["n"]) == list(range(emptied[0]))
    write(uri, 5, 40)
    settle_log(uri, "p")
    assert DeltaTable(uri).version() == emptied[0]


def test_a_table_goes_back_to_before_a_half_commit(uri: str) -> None:
    whole = commit_file(uri, 4).read_bytes()
    commit_file(uri, 4).write_bytes(whole[: len(whole) // 2])
    settle_log(uri, "p")
    assert DeltaTable(uri).transaction_version(APP) == 30


def test_an_empty_commit_that_a_checkpoint_covers_is_no_damage(uri: str) -> None:
    DeltaTable(uri).create_checkpoint()
    commit_file(uri, 2).write_bytes(b"")
    settle_log(uri, "p")
    assert sorted(DeltaTable(uri).to_pandas()["n"]) == list(range(5))


def test_a_file_that_is_gone_is_found_without_reading_it(uri: str) -> None:
    check_files(DeltaTable(uri))
    next(Path(uri).glob("*.parquet")).unlink()
    with pytest.raises(LakeTableError, match="1 of its 5 files"):
        check_files(DeltaTable(uri))


def test_a_handle_is_used_as_long_as_the_table_is_as_it_was_left(uri: str, tmp_path: Path) -> None:
    table, left = open_newest(uri, APP)
    assert left is None
    write(uri, 5, 50)
    again, left = open_newest(uri, APP)
    assert (again is table, left, again.version()) == (True, 4, 5)
    assert leave(again, uri) == commit_fingerprint(uri, 5) != ""
    shutil.copytree(uri, tmp_path / "kept")
    write(uri, 6, 60)
    leave(open_newest(uri, APP)[0], uri)
    shutil.rmtree(uri)
    shutil.copytree(tmp_path / "kept", uri)
    write(uri, 6, 61)
    back, left = open_newest(uri, APP)
    assert (left, back is again, back.transaction_version(APP)) == (None, False, 61)
    forget(uri)


def test_a_handle_does_not_go_on_over_an_empty_commit_of_another_process(uri: str) -> None:
    open_newest(uri, APP)
    write(uri, 5, 50)
    commit_file(uri, 5).write_bytes(b"")
    table, left = open_newest(uri, APP)
    assert (left, table.version(), table.transaction_version(APP)) == (None, 4, 40)
    forget(uri)


def test_a_handle_whose_newest_commit_was_emptied_is_opened_anew(uri: str) -> None:
    open_newest(uri, APP)
    commit_file(uri, 4).write_bytes(b"")
    table, left = open_newest(uri, APP)
    assert (left, table.transaction_version(APP)) == (None, 30)
    forget(uri)
