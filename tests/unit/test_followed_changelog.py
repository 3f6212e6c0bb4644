"""events/changelog_rows.py: followed commit by commit, a changelog is what it is when it is opened."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.maintenance import drop_expired
from airflow_provider_pgrepl.replication.changelog.reader import ChangelogTail, open_changelog
from airflow_provider_pgrepl.replication.changelog.writer import begin_epoch, create_changelog
from airflow_provider_pgrepl.replication.events import changelog_rows
from airflow_provider_pgrepl.replication.events.changelog_rows import FollowedChangelog
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.storage import commit_path, open_storage
from tests.support.changelogs import Written, epoch_record


def position(lsn: int, epoch: int = 1) -> EventPosition:
    return EventPosition.after_transaction(Epoch(epoch), LSN(lsn))


@pytest.fixture
def uri(tmp_path: Path) -> str:
    found = changelog_uri(str(tmp_path))
    create_changelog(found, epoch_record())
    return found


def opened(uri: str, after: EventPosition) -> ChangelogTail:
    return ChangelogTail.of(open_changelog(uri), after.epoch, LSN(max(0, after.commit_lsn - 1)))


def assert_same(found: ChangelogTail, uri: str, after: EventPosition) -> None:
    fresh, above = opened(uri, after), LSN(max(0, after.commit_lsn - 1))
    assert found.files_above(above) == fresh.files_above(above)
    assert (found.version, found.description, found.epoch) == (fresh.version, fresh.description, fresh.epoch)
    for app in fresh._transactions:
        assert found.transaction_version(app) == fresh.transaction_version(app)


@pytest.mark.parametrize("seed", range(1, 6))
def test_followed_changelog_equals_freshly_opened_changelog(uri, tmp_path, seed, monkeypatch):
    chance = random.Random(seed)
    followed, writer, lsn, after = FollowedChangelog(uri), Written(uri), 100, position(0)
    followed.look(after)
    opens = count_opening(monkeypatch)
    for _ in range(40):
        step = chance.random()
        if step < 0.7:
            lsn += chance.randrange(10, 500)
            writer.transaction(lsn, r7=chance.randrange(1, 4))
            writer.buffer.flush(LSN(0))
        elif step < 0.85:
            lsn += 10
            writer.writer.record_keepalive(LSN(lsn))
        else:
            drop_expired(
                str(tmp_path),
                0.001,
                {1: chance.choice((lsn, lsn - 300))},
                datetime.now(UTC) + timedelta(hours=5),
            )
        tail, is_new = followed.look(after)
        assert_same(tail, uri, after)
        assert not followed.look(after)[1]
        if is_new and chance.random() < 0.5:
            after = max(after, position(lsn - chance.randrange(200)))
    assert opens == [], "only new commits were read"


def test_a_new_epoch_is_noticed_and_gone_on_with(uri):
    followed, writer = FollowedChangelog(uri), Written(uri)
    writer.transaction(100, r7=1)
    writer.buffer.flush(LSN(0))
    followed.look(position(0))
    begin_epoch(uri, epoch_record(2, 900))
    tail, is_new = followed.look(position(0))
    assert is_new
    assert tail.record.epoch == 2
    tail, _ = followed.look(position(0, 2))
    assert_same(tail, uri, position(0, 2))


def test_a_log_that_was_put_back_is_read_again(uri):
    followed, writer = FollowedChangelog(uri), Written(uri)
    for lsn in (100, 200):
        writer.transaction(lsn, r7=1)
        writer.buffer.flush(LSN(0))
        followed.look(position(0))
    filesystem, root = open_storage(uri)
    filesystem.delete_file(commit_path(root, open_changelog(uri).version()))
    assert_same(followed.look(position(0))[0], uri, position(0))


def test_commits_that_were_cleaned_away_unread_are_not_waited_for(uri, monkeypatch):
    followed, writer = FollowedChangelog(uri), Written(uri)
    writer.transaction(100, r7=1)
    writer.buffer.flush(LSN(0))
    followed.look(position(0))
    for lsn in (200, 300, 400):
        writer.transaction(lsn, r7=1)
        writer.buffer.flush(LSN(0))
    table = open_changelog(uri)
    table.create_checkpoint()
    filesystem, root = open_storage(uri)
    filesystem.delete_file(commit_path(root, table.version() - 2))
    assert not followed.look(position(0))[1]
    monkeypatch.setattr(changelog_rows, "_SURE_S", 0.0)
    tail, is_new = followed.look(position(0))
    assert is_new
    assert_same(tail, uri, position(0))


def test_another_changelog_in_its_place_is_refused(uri, tmp_path):
    followed = FollowedChangelog(uri)
    followed.look(position(0))
    (tmp_path / "_pgrepl").rename(tmp_path / "elsewhere")
    other = EpochRecord("p", Epoch(1), "8", 1, "pgrepl_p", "pgrepl_p", 5, LSN(70))
    create_changelog(uri, other)
    with pytest.raises(ChangelogError, match="is another one than before"):
        followed.look(position(0))


def count_opening(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    opens: list[str] = []
    real = open_changelog

    def counting(uri: str):
        opens.append(uri)
        return real(uri)

    monkeypatch.setattr(changelog_rows, "open_changelog", counting)
    return opens
