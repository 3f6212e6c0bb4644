"""changelog/maintenance.py: whenever hours are joined, each reader gets the same rows, once and in order."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.replication.changelog import maintenance
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.maintenance import compact_closed_hours
from airflow_provider_pgrepl.replication.changelog.reader import live_files, open_changelog
from airflow_provider_pgrepl.replication.changelog.writer import begin_epoch
from airflow_provider_pgrepl.replication.events.changelog_rows import FollowedChangelog, ordered_rows
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.pgoutput.columns import TransactionEnd
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.receiver.changelog_feed import TransactionBuffer
from tests.support.changelogs import epoch_record
from tests.support.hours import HourWriter, Place, after_hour, new_lake, read, rows_at

pytestmark = pytest.mark.slow

RELATIONS = (3, 5, 6, 9)
PART_BYTES = 600


class Killed(BaseException):
    """Ends a process on the spot."""


class History:
    """A source whose transactions fall into files, hours and epochs at random; and what it has sent."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.chance, self.lake = chance, new_lake(folder)
        self.uri = changelog_uri(self.lake)
        self.sent: dict[int, list[Place]] = {1: []}
        self.epoch = self.hour = 1
        self.lsn = 1_000
        self._open()

    def _open(self) -> None:
        self.writer = HourWriter(self.uri)
        self.writer.hour = self.hour
        self.buffer = TransactionBuffer(self.writer, PART_BYTES)

    def step(self) -> None:
        match self.chance.randrange(12):
            case 0:
                self.hour += self.chance.choice((1, 1, 1, 2, -1))
                self.writer.hour = self.hour
            case 1:
                self._restart()
            case 2 if self.chance.random() < 0.3:
                self._begin_epoch()
            case 3 | 4 | 5:
                self.buffer.flush(LSN(0))
            case _:
                self._transaction()

    def _transaction(self) -> None:
        self.lsn += self.chance.randrange(1, 50)
        size = self.chance.choice((1, 1, 2, 5, 30, 60))
        places = [(self.chance.choice(RELATIONS), self.lsn, ordinal) for ordinal in range(size)]
        end = TransactionEnd(0, self.lsn, self.lsn + 1, self.lsn, self.lsn)
        left = places
        while left:
            cut = self.chance.randrange(1, 12)
            some, left = left[:cut], left[cut:]
            rows = rows_at(*some, epoch=self.epoch, text="x" * self.chance.randrange(100))
            self.buffer.add(rows, [] if left else [end], rows.nbytes)
            if self.chance.random() < 0.1:
                # It is being received when the hour ends.
                self.writer.hour = self.hour = self.hour + 1
        self.sent[self.epoch] += places

    def _restart(self) -> None:
        """Restart the receiver, at random with a row of publication status between durable and later rows."""
        self.buffer.flush(LSN(0))
        if self.chance.random() < 0.5:
            place = (self.chance.choice(RELATIONS), int(self.writer.durable_lsn), -2)
            self.writer.append_between(rows_at(place, epoch=self.epoch))
            self.sent[self.epoch].append(place)
            self.lsn = max(self.lsn, self.writer.durable_lsn - 1)
        self._open()

    def _begin_epoch(self) -> None:
        self.buffer.flush(LSN(0))
        self.epoch += 1
        self.lsn = self.chance.randrange(500, 1_500)
        begin_epoch(self.uri, epoch_record(self.epoch, self.lsn))
        self.sent[self.epoch] = []
        self._open()

    def end(self) -> None:
        self.buffer.flush(LSN(0))


def in_order(uri: str, after: EventPosition) -> list[Place]:
    """Return the places of the rows after a position, in the order in which publishers read them."""
    files = live_files(open_changelog(uri), after.epoch, LSN(max(0, after.commit_lsn - 1)))
    return [place for stretch in ordered_rows(uri, files, after, 7) for place in places_of(stretch.rows)]


def places_of(rows: pa.Table) -> list[Place]:
    columns = (rows[name].to_pylist() for name in ("relation_id", "commit_lsn", "ordinal"))
    return list(zip(*columns, strict=True))


def stream_order(places: list[Place]) -> list[Place]:
    return sorted(places, key=lambda place: place[1:])


def assert_all_there(history: History, chance: random.Random) -> None:
    for epoch, sent in history.sent.items():
        wanted = stream_order(sent)
        above = chance.choice([0, *(lsn for _, lsn, _ in sent)])
        for relation in RELATIONS:
            found = places_of(read(history.lake, relation, above, epoch))
            assert found == [place for place in wanted if place[0] == relation and place[1] > above]
        everything = in_order(history.uri, EventPosition.after_transaction(Epoch(epoch), LSN(0)))
        assert without_publication_status(everything) == without_publication_status(wanted)
        assert sorted(everything) == sorted(wanted)
        begin = chance.choice([(0, 0, 0), *sent])
        after = EventPosition(Epoch(epoch), LSN(begin[1]), begin[2])
        assert sorted(in_order(history.uri, after)) == sorted(p for p in wanted if p[1:] > begin[1:])


def without_publication_status(places: list[Place]) -> list[Place]:
    """Return the places of changes alone: rows of publication status have no order among each other."""
    return [place for place in places if place[2] >= 0]


@pytest.mark.parametrize("seed", range(1, 9))
def test_every_reader_gets_the_same_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(maintenance, "_JOINED_BYTES", chance.choice((2_500, 5_000, 8_000, 1 << 20)))
    joined = 0
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder), chance)
        followed = FollowedChangelog(history.uri)
        for _ in range(100):
            history.step()
            if chance.random() < 0.12:
                if chance.random() < 0.3:
                    join_killed(history, monkeypatch)
                listed = open_changelog(history.uri)
                joined += join(history, chance)
                assert_found_by(followed, history)
                assert_unchanged_for_who_listed_before(listed, history)
        history.end()
        assert_all_there(history, chance)
        while join(history, chance, hour=history.hour):
            pass
        assert_all_there(history, chance)
    assert joined


def join(history: History, chance: random.Random, hour: int | None = None) -> int:
    until = history.hour - chance.randrange(1, 3) if hour is None else hour
    most = chance.choice((1, 1 << 30))
    return compact_closed_hours(history.lake, after_hour(until), most).files


def join_killed(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compact closed hours, and be killed after the files were written and before their commit."""

    def kill(*arguments: object, **named: object) -> bool:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(maintenance, "replace_files", kill)
        try:
            compact_closed_hours(history.lake, after_hour(history.hour))
        except Killed:
            return


def assert_found_by(followed: FollowedChangelog, history: History) -> None:
    """Assert that following the commits finds the same files as listing the live ones."""
    epoch = Epoch(history.epoch)
    tail, _ = followed.look(EventPosition.after_transaction(epoch, LSN(0)))
    files = live_files(open_changelog(history.uri), epoch, LSN(0))
    assert sorted(tail.files_above(LSN(0)), key=str) == sorted(files, key=str)


def assert_unchanged_for_who_listed_before(listed: object, history: History) -> None:
    epoch = Epoch(history.epoch)
    after = EventPosition.after_transaction(epoch, LSN(0))
    stretches = list(ordered_rows(history.uri, live_files(listed, epoch, LSN(0)), after))
    found = [place for stretch in stretches for place in places_of(stretch.rows)]
    assert sorted(found) == sorted(in_order(history.uri, after))
