"""changelog/own_tables.py: a table next to the changelog that is missing is not created again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.epoch import known_tables
from airflow_provider_pgrepl.replication.app.needed_changes import retention
from airflow_provider_pgrepl.replication.app.process import exit_code
from airflow_provider_pgrepl.replication.changelog import own_tables, writer
from airflow_provider_pgrepl.replication.changelog.layout import (
    LAKE_APP,
    POINTS,
    RELATIONS,
    EpochRecord,
    changelog_uri,
)
from airflow_provider_pgrepl.replication.changelog.reader import lake_id, open_changelog
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, create_changelog
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.record import (
    PublisherLog,
    PublisherRecord,
    publisher_uri,
)
from airflow_provider_pgrepl.replication.lake import consistent_points
from airflow_provider_pgrepl.replication.lake.consistent_points import (
    ConsistentPoint,
    ConsistentPoints,
    points_uri,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.database import StateDatabase

RECORD = EpochRecord("shop", Epoch(1), "7", 1, "pgrepl_shop", "pgrepl_shop", 5, LSN(5))
TABLE = TableName("public", "a")


def point(lsn: int) -> ConsistentPoint:
    return ConsistentPoint(1, LSN(lsn), None, {"public.a": lsn})


@pytest.fixture
def lake(tmp_path: Path) -> str:
    """A lake whose points and index of relations are marked, and which a receiver has gone on writing."""
    lake = str(tmp_path / "lake")
    create_changelog(changelog_uri(lake), RECORD)
    RelationIndex(relations_uri(lake)).forget(Epoch(1), 7)
    ConsistentPoints(lake).append(point(10))
    ChangelogWriter(changelog_uri(lake)).record_keepalive(LSN(0x20))
    return lake


def hide(uri: str) -> Path:
    away = Path(uri + ".away")
    shutil.rmtree(away, ignore_errors=True)
    shutil.move(uri, away)
    return away


def test_points_out_of_sight_are_not_begun_anew(lake: str) -> None:
    away = hide(points_uri(lake))
    with pytest.raises(LakeError, match=f"points of this lake is not in {points_uri(lake)}") as caught:
        own_tables.check(lake)
    assert "bring the folder back" in caught.value.hint
    assert "pgrepl accept-missing" in caught.value.hint
    with pytest.raises(LakeError, match="is not in"):
        ConsistentPoints(lake).append(point(20))
    assert not Path(points_uri(lake)).exists()
    shutil.move(away, points_uri(lake))
    own_tables.check(lake)
    ConsistentPoints(lake).append(point(20))
    assert [one.lsn for one in ConsistentPoints(lake).all()] == [10, 20]


def test_index_that_goes_out_of_sight_amid_a_run_is_not_begun_anew(lake: str) -> None:
    index = RelationIndex(relations_uri(lake))
    index.forget(Epoch(1), 8)
    away = hide(relations_uri(lake))
    with pytest.raises(LakeError, match="index of relations of this lake is not in"):
        index.forget(Epoch(1), 9)
    assert not Path(relations_uri(lake)).exists()
    shutil.move(away, relations_uri(lake))
    index.forget(Epoch(1), 9)


def newest_file(uri: str) -> Path:
    return max(Path(uri).glob("part-*.parquet"), key=lambda path: path.stat().st_mtime_ns)


def first_commit(uri: str) -> Path:
    return Path(uri) / "_delta_log" / f"{0:020d}.json"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda uri: overwrite(newest_file(uri)), r"the file part-[\w-]+\.parquet is damaged"),
        (lambda uri: cut(newest_file(uri)), r"the file part-[\w-]+\.parquet is damaged"),
        (lambda uri: newest_file(uri).unlink(), r"the file part-[\w-]+\.parquet is not there"),
        (lambda uri: first_commit(uri).unlink(), "its log is not whole"),
    ],
    ids=["overwritten", "cut", "lost", "log"],
)
def test_damaged_points_are_said_with_what_leads_out(
    lake: str, damage: Callable[[str], None], said: str
) -> None:
    ConsistentPoints(lake).append(point(20))
    damage(points_uri(lake))
    for use in (lambda: ConsistentPoints(lake).all(), lambda: ConsistentPoints(lake).append(point(30))):
        with pytest.raises(LakeError, match=f"consistent points in {points_uri(lake)}.*{said}") as caught:
            use()
        assert exit_code(caught.value) == process.WILL_NOT_HELP
        assert "move the folder away" in caught.value.hint
        assert "pgrepl accept-missing" in caught.value.hint
    hide(points_uri(lake))
    own_tables.give_up(lake, own_tables.find_lost(lake))
    ConsistentPoints(lake).append(point(30))
    assert [one.lsn for one in ConsistentPoints(lake).all()] == [30]


def overwrite(path: Path) -> None:
    """Overwrite the bytes between the file's first 4 and last 8 with zeros, as after a disk fault."""
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(len(content) - 12) + content[-8:])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


@pytest.mark.parametrize("uri_of", [points_uri, relations_uri, lambda lake: publisher_uri(lake, "web")])
def test_own_table_with_a_damaged_log_is_no_fault_of_the_storage(lake: str, uri_of) -> None:
    PublisherLog(lake, "web").take(PublisherRecord(EventPosition.parse("1:0/5:1")), "me")
    uri = uri_of(lake)
    first_commit(uri).write_text("{")
    with pytest.raises(LakeError, match=f"{uri} cannot be read: its log is not whole") as caught:
        own_tables.check(lake)
        own_tables.check_publisher(lake, "web")
    assert exit_code(caught.value) == process.WILL_NOT_HELP


def test_file_of_points_that_was_replaced_meanwhile_is_no_damage(lake: str, monkeypatch) -> None:
    read, kept = ConsistentPoints(lake), ConsistentPoints(lake)
    for lsn in (20, 30):
        kept.append(point(lsn))

    def open_before(uri: str) -> DeltaTable:
        monkeypatch.undo()
        table = DeltaTable(uri)
        kept.rewrite(lambda points: points[-1:])
        for path in set(table.file_uris()) - set(DeltaTable(uri).file_uris()):
            Path(path.removeprefix("file://")).unlink()
        return table

    monkeypatch.setattr(consistent_points, "open_delta", open_before)
    assert [one.lsn for one in read.all()] == [30]


def test_folder_of_a_disk_that_is_not_mounted_is_said(lake: str) -> None:
    hide(relations_uri(lake))
    Path(relations_uri(lake)).mkdir()
    with pytest.raises(LakeError, match=r"index of relations of this lake.*relations exists, and no table"):
        own_tables.check(lake)


def test_another_table_in_the_place_is_refused(lake: str, tmp_path: Path) -> None:
    hide(points_uri(lake))
    ConsistentPoints(str(tmp_path / "other")).append(point(30))
    shutil.move(points_uri(str(tmp_path / "other")), points_uri(lake))
    with pytest.raises(LakeError, match="another table has taken its place"):
        own_tables.check(lake)
    with pytest.raises(LakeError, match="another table") as caught:
        own_tables.find_lost(lake)
    assert "move that folder away first" in caught.value.hint
    with pytest.raises(LakeError, match="another table"):
        own_tables.give_up(lake, own_tables.find_missing(lake))
    hide(points_uri(lake))
    own_tables.give_up(lake, own_tables.find_lost(lake))
    own_tables.check(lake)


def test_points_that_say_of_which_lake_they_are_are_believed_of_no_other(lake: str, tmp_path: Path) -> None:
    """This also holds where no mark distinguishes the tables, as after they were given up."""
    other = str(tmp_path / "other")
    create_changelog(changelog_uri(other), RECORD)
    ConsistentPoints(other).append(point(30))
    hide(points_uri(lake))
    own_tables.give_up(lake, own_tables.find_lost(lake))
    shutil.copytree(points_uri(other), points_uri(lake))
    calls: tuple[Callable[[], object], ...] = (
        lambda: ConsistentPoints(lake).last_of(TABLE, 1),
        lambda: ConsistentPoints(lake).append(point(40)),
    )
    for call in calls:
        with pytest.raises(LakeError, match=r"not those of this lake: it is of another lake") as caught:
            call()
        assert "move that folder away" in caught.value.hint
    assert ConsistentPoints(other).last_of(TABLE, 1) == point(30)


def test_points_of_an_earlier_version_say_their_lake_from_the_next_on(lake: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    ConsistentPoints(other).append(point(30))
    create_changelog(changelog_uri(other), RECORD)
    mark = f"{LAKE_APP}{lake_id(open_changelog(changelog_uri(other)))}"
    assert ConsistentPoints(other).last_of(TABLE, 1) == point(30)
    ConsistentPoints(other).append(point(40))
    assert DeltaTable(points_uri(other)).transaction_version(mark) == 1


def test_lost_points_are_given_up_by_choice_and_the_new_ones_are_marked(lake: str) -> None:
    hide(points_uri(lake))
    missing = own_tables.find_missing(lake)
    assert [one.name for one in missing] == [POINTS]
    own_tables.give_up(lake, missing)
    own_tables.check(lake, {POINTS})
    ConsistentPoints(lake).append(point(20))
    hide(relations_uri(lake))
    shutil.rmtree(points_uri(lake))
    assert [one.name for one in own_tables.find_missing(lake)] == [POINTS, RELATIONS]


def test_first_start_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    """Any of the tables may be missing: marks are written after all of them."""
    lake = str(tmp_path / "lake")
    own_tables.check(lake)
    create_changelog(changelog_uri(lake), RECORD)
    own_tables.check(lake)
    before = DeltaTable(changelog_uri(lake)).version()
    own_tables.record(lake)
    assert DeltaTable(changelog_uri(lake)).version() == before
    RelationIndex(relations_uri(lake)).forget(Epoch(1), 7)
    shutil.rmtree(relations_uri(lake))
    own_tables.check(lake)


def test_points_of_an_earlier_version_are_known_by_the_state(tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    ConsistentPoints(lake).append(point(10))
    create_changelog(changelog_uri(lake), RECORD)
    own_tables.check(lake, {POINTS})
    hide(points_uri(lake))
    own_tables.check(lake)
    with pytest.raises(LakeError, match="is not in"):
        own_tables.check(lake, {POINTS})


@pytest.mark.parametrize(("applied", "known"), [(5, {POINTS}), (4, set()), (None, set())])
def test_state_knows_of_points_by_the_lsn_of_the_last_one(applied: int | None, known: set[str]) -> None:
    """Only points of this epoch count: another epoch or source may have had one before this epoch begins."""
    progress = None if applied is None else SimpleNamespace(applied_lsn=LSN(applied))
    state_db = cast(StateDatabase, SimpleNamespace(read_progress=lambda _: progress, is_set_up=lambda: True))
    pipeline = Pipeline(name="shop", lake="/lake", tables=("public.a",))
    assert known_tables(state_db, pipeline, RECORD) == known
    assert known_tables(state_db, pipeline, None) == set()
    assert known_tables(state_db, replace(pipeline, lake_tables="none"), RECORD) == set()


def test_publisher_out_of_sight_is_not_begun_anew_unless_it_is_said_where(lake: str) -> None:
    begin = PublisherRecord(EventPosition.parse("1:0/5:1"))
    PublisherLog(lake, "events").take(begin, "me")
    ChangelogWriter(changelog_uri(lake)).record_keepalive(LSN(0x30))
    hide(publisher_uri(lake, "events"))
    with pytest.raises(
        LakeError, match=f"publisher events is not in {publisher_uri(lake, 'events')}"
    ) as caught:
        PublisherLog(lake, "events").take(begin, "me")
    assert "--publisher events --after" in caught.value.hint
    assert not Path(publisher_uri(lake, "events")).exists()
    pipeline = Pipeline(
        name="p",
        lake=lake,
        tables=("public.a",),
        publishers={"events": {"target": "rabbitmq"}},  # type: ignore[arg-type]
    )
    with pytest.raises(LakeError, match="publisher events is not in"):
        retention(pipeline, 1, LSN(900))
    PublisherLog(lake, "others").take(begin, "me")
    shutil.copytree(publisher_uri(lake, "others"), publisher_uri(lake, "events"))
    with pytest.raises(LakeError, match="another table"):
        PublisherLog(lake, "events").take(begin, "me")
    shutil.rmtree(publisher_uri(lake, "events"))
    PublisherLog(lake, "events").take(begin, "me", is_new=True)
    PublisherLog(lake, "events").take(begin, "me")
    hide(publisher_uri(lake, "events"))
    shutil.copytree(publisher_uri(lake, "events") + ".away", publisher_uri(lake, "events"))
    own_tables.check(lake)


def test_publisher_that_may_not_write_the_changelog_goes_on(
    lake: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise LakeUnavailableError("the changelog cannot be written")

    monkeypatch.setattr(writer, "mark", refuse)
    PublisherLog(lake, "events").take(PublisherRecord(EventPosition.parse("1:0/5:1")), "me")
    assert "publisher events is not marked in the changelog" in caplog.text
