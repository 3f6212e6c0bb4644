"""delta/recovery.py: unconfirmed commits that a crash of the host tore are set aside; all others stay."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.app.process import WILL_NOT_HELP, exit_code
from airflow_provider_pgrepl.replication.changelog.reader import live_files, open_changelog
from airflow_provider_pgrepl.replication.changelog.writer import find_torn_changelog, mark
from airflow_provider_pgrepl.replication.delta.recovery import find_torn, find_torn_by_crash
from airflow_provider_pgrepl.replication.lake.consistent_points import (
    ConsistentPoint,
    ConsistentPoints,
    find_torn_points,
    points_uri,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from tests.support.changelogs import Written, new_changelog
from tests.unit.test_lake_table import Root


def empty(file: Path) -> None:
    file.write_bytes(b"")


def half(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def without_last_line(file: Path) -> None:
    file.write_bytes(b"\n".join(file.read_bytes().splitlines()[:-1]))


TEARS = [empty, half, zeros]
Tear = Callable[[Path], None]


def commit(uri: str, version: int) -> Path:
    return Path(uri) / "_delta_log" / f"{version:020d}.json"


def checkpoint(uri: str, version: int) -> Path:
    return Path(uri) / "_delta_log" / f"{version:020d}.checkpoint.parquet"


def rows(uri: str) -> list[int]:
    table = QueryBuilder().register("t", DeltaTable(uri))
    return sorted(pa.table(table.execute("select n from t").read_all())["n"].to_pylist())


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """Five commits, a row each."""
    for number in range(5):
        append(str(tmp_path / "t"), number)
    return str(tmp_path / "t")


def append(uri: str, number: int) -> None:
    write_deltalake(uri, pa.table({"n": pa.array([number], pa.int64())}), mode="append")


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_last_commit_is_set_aside_and_kept(uri: str, tear: Tear) -> None:
    tear(commit(uri, 4))
    left = commit(uri, 4).read_bytes()
    torn = find_torn(uri)
    assert torn.commits == (4,)
    torn.set_aside()
    assert not find_torn(uri)
    assert rows(uri) == [0, 1, 2, 3]
    (aside,) = (Path(uri) / "_delta_log").glob(".*.torn")
    assert aside.read_bytes() == left
    append(uri, 9)
    assert rows(uri) == [0, 1, 2, 3, 9]
    assert DeltaTable(uri).version() == 4


@pytest.mark.parametrize("tear", [half, zeros, Path.unlink])
def test_torn_commit_is_set_aside_together_with_later_commits(uri: str, tear: Tear) -> None:
    tear(commit(uri, 2))
    torn = find_torn(uri)
    torn.set_aside()
    assert torn.commits == ((3, 4) if tear is Path.unlink else (2, 3, 4))
    assert rows(uri) == [0, 1]


def test_several_empty_commits_at_the_end_go(uri: str) -> None:
    for version in (2, 3, 4):
        empty(commit(uri, version))
    find_torn(uri).set_aside()
    assert DeltaTable(uri).version() == 1


def test_a_sound_table_is_left_alone(uri: str, tmp_path: Path) -> None:
    assert not find_torn(uri)
    DeltaTable(uri).create_checkpoint()
    assert not find_torn(uri)
    assert not find_torn(str(tmp_path / "nothing"))
    assert not find_torn("s3://bucket/t")


def test_a_table_whose_creation_was_torn_is_no_table(uri: str) -> None:
    for version in range(1, 5):
        commit(uri, version).unlink()
    empty(commit(uri, 0))
    find_torn(uri).set_aside()
    assert not DeltaTable.is_deltatable(uri)


@pytest.mark.parametrize("tear", [*TEARS, Path.unlink])
def test_a_commit_goes_whose_file_is_torn(uri: str, tear: Tear) -> None:
    (name,) = set(DeltaTable(uri).file_uris()) - set(DeltaTable(uri, version=3).file_uris())
    tear(Path(name.removeprefix("file://")))
    find_torn(uri).set_aside()
    assert rows(uri) == [0, 1, 2, 3]


def test_files_that_were_replaced_and_taken_away_are_not_missed(uri: str) -> None:
    before = DeltaTable(uri).file_uris()
    write_deltalake(uri, pa.table({"n": pa.array([7], pa.int64())}), mode="overwrite")
    for name in before:
        Path(name.removeprefix("file://")).unlink()
    assert not find_torn(uri)


@pytest.mark.parametrize("tear", [empty, half, zeros])
def test_a_torn_checkpoint_goes_when_the_commits_are_there(uri: str, tear: Tear) -> None:
    DeltaTable(uri).create_checkpoint()
    tear(checkpoint(uri, 4))
    with pytest.raises(Exception, match="Kernel error"):
        DeltaTable(uri)
    find_torn(uri).set_aside()
    assert rows(uri) == [0, 1, 2, 3, 4]
    assert not find_torn(uri)


def test_a_torn_checkpoint_without_the_commits_is_left_to_see(uri: str) -> None:
    DeltaTable(uri).create_checkpoint()
    for version in range(4):
        commit(uri, version).unlink()
    empty(checkpoint(uri, 4))
    assert find_torn(uri).checkpoints == ()
    assert find_torn(uri).commits == ()


def test_an_older_checkpoint_serves(uri: str) -> None:
    DeltaTable(uri).create_checkpoint()
    for version in range(4):
        commit(uri, version).unlink()
    append(uri, 5)
    append(uri, 6)
    DeltaTable(uri).create_checkpoint()
    half(checkpoint(uri, 6))
    half(commit(uri, 6))
    torn = find_torn(uri)
    assert (torn.commits, torn.checkpoints) == ((6,), (6,))
    torn.set_aside()
    assert rows(uri) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("tear", [empty, half])
def test_a_torn_hint_to_the_checkpoint_goes(uri: str, tear: Tear) -> None:
    DeltaTable(uri).create_checkpoint()
    tear(Path(uri) / "_delta_log/_last_checkpoint")
    find_torn(uri).set_aside()
    assert rows(uri) == [0, 1, 2, 3, 4]
    assert not find_torn(uri)


# The changelog.


@pytest.fixture
def one(tmp_path: Path) -> Written:
    """A changelog with transactions at 100, 200 and 300, each a commit."""
    written = Written(new_changelog(tmp_path))
    for lsn in (100, 200, 300):
        written.transaction(lsn, r7=2)
        written.flush()
    return written


@pytest.mark.parametrize("tear", [*TEARS, without_last_line])
def test_a_torn_commit_of_the_changelog_makes_nothing_durable(one: Written, tear: Tear) -> None:
    tear(commit(one.uri, one.writer.version))
    find_torn_changelog(one.uri).set_aside()
    again = Written(one.uri)
    assert again.writer.durable_lsn == 208
    again.transaction(300, r7=2)
    again.flush()
    assert len(live_files(open_changelog(one.uri), Epoch(1), LSN(0))) == 3


def test_a_half_commit_that_nobody_sets_aside_is_said(one: Written) -> None:
    half(commit(one.uri, one.writer.version))
    with pytest.raises(
        LakeUnavailableError, match=f"the changelog in {one.uri} cannot be opened: its"
    ) as caught:
        open_changelog(one.uri)
    assert caught.value.hint.startswith("start the replication app, which sets aside commits")


def test_an_empty_commit_that_a_writer_went_on_after_is_left_alone(one: Written) -> None:
    """An earlier version, which did not know torn commits, continued so; the slot had kept the changes."""
    empty(commit(one.uri, one.writer.version))
    again = Written(one.uri)
    again.transaction(300, r7=2)
    again.flush()
    assert not find_torn_changelog(one.uri)
    assert again.writer.durable_lsn == 308


def test_an_empty_commit_that_was_written_full_takes_what_came_after_along(one: Written) -> None:
    """A disk that lied when it was flushed: the slot is beyond what is left, and the start says so."""
    empty(commit(one.uri, one.writer.version - 1))
    mark(one.uri)
    find_torn_changelog(one.uri).set_aside()
    assert Written(one.uri).writer.durable_lsn == 108


# Points.


@pytest.mark.parametrize("tear", [*TEARS, without_last_line])
def test_a_torn_point_goes(tmp_path: Path, tear: Tear) -> None:
    points = ConsistentPoints(str(tmp_path))
    made = [ConsistentPoint(1, lsn, datetime.now(UTC), {"public.t": lsn}) for lsn in (1, 2)]
    for point in made:
        points.append(point)
    tear(commit(f"{tmp_path}/_pgrepl/consistent_points", 2))
    find_torn_points(str(tmp_path)).set_aside()
    after = ConsistentPoints(str(tmp_path))
    assert after.all() == (made[0],)
    after.append(made[1])
    assert json.loads(commit(f"{tmp_path}/_pgrepl/consistent_points", 2).read_text().splitlines()[-1])


def written_points(lake: Path) -> list[ConsistentPoint]:
    points = [ConsistentPoint(1, lsn, datetime.now(UTC), {"public.t": lsn}) for lsn in (1, 2, 3)]
    for point in points:
        ConsistentPoints(str(lake)).append(point)
    return points


def test_points_behind_the_commit_of_another_program_stay(tmp_path: Path) -> None:
    made = written_points(tmp_path)
    DeltaTable(points_uri(str(tmp_path))).optimize.compact()
    made.append(ConsistentPoint(1, 4, datetime.now(UTC), {"public.t": 4}))
    ConsistentPoints(str(tmp_path)).append(made[-1])
    assert not find_torn_points(str(tmp_path))
    assert ConsistentPoints(str(tmp_path)).all() == tuple(made)


@pytest.mark.parametrize("tear", [half, zeros])
def test_points_behind_a_damaged_commit_are_not_set_aside(tmp_path: Path, tear: Tear) -> None:
    written_points(tmp_path)
    tear(commit(points_uri(str(tmp_path)), 2))
    with pytest.raises(LakeError, match=r"commit 2 of .* is not whole, and commit 3 is\. Nothing") as caught:
        find_torn_points(str(tmp_path))
    assert ".torn" in caught.value.hint
    assert exit_code(caught.value) == WILL_NOT_HELP


# Tables of which nothing records what was reported: points, relations, publishers.


def file_of(uri: str, version: int) -> Path:
    """The file that a commit added."""
    (name,) = set(DeltaTable(uri, version).file_uris()) - set(DeltaTable(uri, version - 1).file_uris())
    return Path(name.removeprefix("file://"))


def file_of_newest(uri: str) -> Path:
    """The file that the newest commit added, as that says."""
    newest = max((Path(uri) / "_delta_log").glob("0*.json"))
    actions = [json.loads(line) for line in newest.read_text().splitlines()]
    return Path(uri) / next(action["add"]["path"] for action in actions if "add" in action)


@pytest.mark.parametrize("tear", TEARS)
def test_commit_goes_by_a_file_that_a_crash_left_short(uri: str, tear: Tear) -> None:
    for version in (3, 4):
        tear(file_of(uri, version))
    find_torn_by_crash(uri).set_aside()
    assert rows(uri) == [0, 1, 2]


@pytest.mark.parametrize(("version", "tear"), [(4, Path.unlink), (2, Path.unlink), (2, half)])
def test_commit_stays_though_its_file_is_out_of_sight(uri: str, version: int, tear: Tear) -> None:
    """A copy may be under way. The writer of a later commit has flushed the file."""
    file = file_of(uri, version)
    content = file.read_bytes()
    tear(file)
    fate = "not whole" if file.exists() else "not there"
    with pytest.raises(LakeError, match=f"commit {version} .*{file.name}, which is {fate}"):
        find_torn_by_crash(uri)
    assert DeltaTable(uri).version() == 4
    file.write_bytes(content)
    assert not find_torn_by_crash(uri)
    assert rows(uri) == [0, 1, 2, 3, 4]


def test_commits_stay_behind_a_log_file_that_is_out_of_sight(uri: str, tmp_path: Path) -> None:
    away = commit(uri, 2).rename(tmp_path / "away")
    with pytest.raises(
        LakeError, match=r"commit 2 of .* is not there, and commit 3 is\. Nothing was changed"
    ):
        find_torn_by_crash(uri)
    assert [
        find_torn(uri, confirmed_version=confirmed_version).commits for confirmed_version in (None, 4, 2, 1)
    ] == [(), (), (), (3, 4)]
    away.rename(commit(uri, 2))
    assert not find_torn_by_crash(uri)
    assert rows(uri) == [0, 1, 2, 3, 4]


def test_torn_commits_after_a_checkpoint_go_though_the_log_before_it_was_cleaned(uri: str) -> None:
    DeltaTable(uri, version=3).create_checkpoint()
    for version in range(4):
        commit(uri, version).unlink()
    half(file_of_newest(uri))
    assert find_torn_by_crash(uri).commits == (4,)


def test_torn_commit_goes_with_a_short_file_before_it(uri: str) -> None:
    """Two writers were committing."""
    half(file_of(uri, 3))
    half(commit(uri, 4))
    assert find_torn_by_crash(uri).commits == (3, 4)


# Lake tables.


@pytest.mark.parametrize("tear", TEARS)
@pytest.mark.parametrize("version", [0, 1])
def test_a_snapshot_replaces_a_torn_table(tmp_path: Path, tear: Tear, version: int) -> None:
    """Otherwise the remedy for a stopped table, a resnapshot, would fail like the first attempt."""
    root = Root(tmp_path / "t")
    root.snapshot(10, 1)
    root.snapshot(20, 2)
    for torn in range(version, 2):
        tear(commit(root.uri, torn))
    root.snapshot(30, 3)
    assert root.ids() == [3]
