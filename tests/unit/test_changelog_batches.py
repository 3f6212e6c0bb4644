"""lake/apply/applier.py: batches of whole commits, as work items; and commits that are gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.changelog.reader import open_changelog
from airflow_provider_pgrepl.replication.changelog.writer import _commit_marker, mark
from airflow_provider_pgrepl.replication.lake.apply.applier import ChangelogBatches
from airflow_provider_pgrepl.replication.lake.apply.work_item import MARK, WorkItem
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from tests.support import wire_bytes as wire
from tests.support.changelogs import Written, new_changelog

BEFORE_ALL = -1


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return new_changelog(tmp_path)


def batches(uri: str, batch_bytes: int = 1 << 30) -> ChangelogBatches:
    return ChangelogBatches(uri, batch_bytes)


def latest(batches: ChangelogBatches, start: int) -> int:
    """Return the version at which the batch after `start` ends; `start` if there is none."""
    batches.advance(start)
    found = batches.next()
    return found[0].to_version if found else start


def items(batches: ChangelogBatches, start: int, end: int) -> dict[int, WorkItem]:
    found = batches._items(start, end)
    assert found[0].relation_id == MARK
    assert len({item.relation_id for item in found}) == len(found)
    return {item.relation_id: item for item in found}


def log_file(uri: str, version: int) -> Path:
    return Path(uri) / "_delta_log" / f"{version:020d}.json"


def test_first_batch_ends_at_the_newest_commit_and_plans_every_table(uri: str) -> None:
    written = Written(uri)
    written.transaction(100, r7=1)
    newest = written.flush()
    reader = batches(uri)
    assert [item.to_version for item in reader.next()] == [newest]
    found = items(reader, BEFORE_ALL, newest)
    assert list(found) == [MARK]
    assert (found[MARK].from_version, found[MARK].to_version) == (BEFORE_ALL, newest)


def test_each_touched_relation_is_one_item_with_its_files(uri: str) -> None:
    written = Written(uri)
    start = written.writer.version
    written.transaction(100, r7=1, r8=1)
    written.flush()
    written.transaction(200, r8=1, r9=1)
    end = written.flush()
    reader = batches(uri)
    assert latest(reader, start) == end
    found = items(reader, start, end)
    assert {oid: len(item.paths) for oid, item in found.items()} == {MARK: 0, 7: 1, 8: 2, 9: 1}
    assert {(item.from_version, item.to_version) for item in found.values()} == {(start, end)}
    assert (found[MARK].epoch, found[MARK].durable_lsn) == (1, 208)
    assert found[8].bytes > found[7].bytes > 0


def test_a_batch_ends_with_the_commit_that_fills_it(uri: str) -> None:
    written = Written(uri)
    start = written.writer.version
    for lsn in (100, 200, 300, 400):
        written.transaction(lsn, r7=10)
        end = written.flush()
    one = batches(uri)._read(start + 1).record.bytes
    assert latest(batches(uri, batch_bytes=1), start) == start + 1
    assert latest(batches(uri, batch_bytes=2 * one), start) in (start + 2, start + 3)
    assert latest(batches(uri), start) == end


def test_a_transaction_of_five_parts_stays_whole_whatever_the_limit(uri: str) -> None:
    written = Written(uri, part_bytes=4_000)
    start = written.writer.version
    written.take(written.begin(100), *written.insert(7, *range(100)))
    for _ in range(3):
        written.take(*written.insert(7, *range(100)))
    written.take(*written.insert(7, 1), written.commit(100))
    end = written.flush()
    assert end == start + 1
    reader = batches(uri, batch_bytes=1)
    assert len(reader._read(end).files) == 5
    assert latest(reader, start) == end
    assert len(items(reader, start, end)[7].paths) == 5


def test_lsn_that_another_process_waits_for_is_in_the_batch(uri: str) -> None:
    written = Written(uri)
    start = written.writer.version
    for wanted in (300, 200, None):
        mark(uri, wanted_lsn=None if wanted is None else LSN(wanted))
    reader = batches(uri)
    end = latest(reader, start)
    assert items(reader, start, end)[MARK].wanted_lsn == 300
    assert items(reader, end - 1, end)[MARK].wanted_lsn == 0


def test_without_new_commits_there_is_no_batch(uri: str) -> None:
    end = Written(uri).writer.version
    assert latest(batches(uri), end) == end


def test_available_now_ends_at_what_was_there_when_it_began(uri: str) -> None:
    written = Written(uri)
    start = written.writer.version
    written.transaction(100, r7=1)
    end = written.flush()
    reader = batches(uri)
    reader.end_at_newest()
    written.transaction(200, r7=1)
    assert written.flush() == end + 1
    assert latest(reader, start) == end
    assert latest(reader, end) == end


def test_fences_keepalives_and_marks_are_batches_without_work(uri: str) -> None:
    written = Written(uri)
    start = written.writer.version
    written.writer.record_keepalive(900)
    mark(uri)
    end = latest(batches(uri), start)
    assert end == start + 2
    found = items(batches(uri), start, end)
    assert list(found) == [MARK]
    assert found[MARK].durable_lsn == 900


def test_marker_of_somebody_who_had_not_seen_the_newest_commit_does_not_say_what_is_durable(uri: str) -> None:
    """The marker comes alone: a table planned at its version lacks no change of the commit before it."""
    written = Written(uri)
    start = written.writer.version
    before = open_changelog(uri)
    written.transaction(100, r7=1)
    data = written.flush()
    _commit_marker(before)
    reader = batches(uri)
    alone = items(reader, data, data + 1)[MARK]
    assert (alone.epoch, alone.durable_lsn) == (0, 0)
    recorded = alone.as_recorded(uri)
    assert (recorded.to_version, recorded.epoch, recorded.durable_lsn) == (data + 1, 1, 108)
    assert items(reader, start, data + 1)[MARK].durable_lsn == 108


def test_messages_outside_relations_are_no_work(uri: str) -> None:
    written = Written(uri)
    start = written.writer.version
    written.take(wire.put_message(100, "p", b"", transactional=False))
    assert list(items(batches(uri), start, written.flush())) == [MARK]


def test_source_forgets_cached_commits_after_batch_is_committed(uri: str) -> None:
    written = Written(uri)
    start = written.writer.version
    written.transaction(100, r7=1)
    end = written.flush()
    reader = batches(uri)
    latest(reader, start)
    assert reader._commits
    reader.advance(end)
    assert not reader._commits


# Commits that are gone: tables know their position, so the next batch ends at the newest commit.


def three_commits(uri: str) -> tuple[int, int]:
    written = Written(uri)
    start = written.writer.version
    for lsn in (100, 200, 300):
        written.transaction(lsn, r7=1)
        end = written.flush()
    return start, end


@pytest.mark.parametrize("available_now", [False, True])
def test_batch_whose_commits_are_deleted_ends_at_the_newest_commit(uri: str, available_now: bool) -> None:
    start, end = three_commits(uri)
    DeltaTable(uri).create_checkpoint()
    log_file(uri, start + 1).unlink()
    reader = batches(uri)
    if available_now:
        reader.end_at_newest()
    assert latest(reader, start) == end
    found = items(reader, start, end)
    assert list(found) == [MARK]
    assert found[MARK].from_version == BEFORE_ALL
    assert latest(reader, end) == end


def test_a_gap_inside_a_batch_to_be_repeated_gives_no_half_work(uri: str) -> None:
    start, end = three_commits(uri)
    log_file(uri, start + 2).unlink()
    found = items(batches(uri), start, end)
    assert list(found) == [MARK]
    assert found[MARK].from_version == BEFORE_ALL


def test_batches_beyond_a_recreated_changelog_go_back_to_its_newest_commit(uri: str) -> None:
    _, end = three_commits(uri)
    shutil.rmtree(uri)
    new_changelog(Path(uri).parent)
    reader = batches(uri)
    assert latest(reader, end) == 0
    found = items(reader, end, 0)
    assert list(found) == [MARK]
    assert (found[MARK].from_version, found[MARK].to_version) == (BEFORE_ALL, 0)
