"""events/changelog_rows.py: the changelog's rows come in order, however transactions fell into its files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.reader import ChangelogFile, live_files, open_changelog
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.events.changelog_rows import ordered_rows
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.pgoutput.columns import TransactionEnd
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.receiver.changelog_feed import TransactionBuffer
from tests.support.changelogs import new_changelog
from tests.support.examples import examples

Place = tuple[int, int]
CHUNK_BYTES, PART_BYTES = 60, 100


def rows_of(places: list[Place]) -> pa.Table:
    """A row a place; of two relations in turn, so that files are sorted otherwise."""
    rows = [
        {
            "epoch": 1,
            "commit_lsn": lsn,
            "ordinal": ordinal,
            "xid": lsn,
            "commit_ts": lsn,
            "relation_id": 5 + (lsn + ordinal) % 2,
            "relation_version": 7,
            "op": "I",
            "new": ["x"],
        }
        for lsn, ordinal in places
    ]
    return pa.Table.from_pylist(rows, schema=ROW_SCHEMA)


def files_after(uri: str, after: EventPosition) -> list[ChangelogFile]:
    return live_files(open_changelog(uri), after.epoch, LSN(max(0, after.commit_lsn - 1)))


def read(uri: str, after: EventPosition, step: int) -> list[Place]:
    """Rows' places; those with which a stretch ends say truly whether their transactions end there."""
    found: list[Place] = []
    ends: dict[Place, bool] = {}
    for rows, ends_transaction in ordered_rows(uri, files_after(uri, after), after, step):
        found += zip(rows["commit_lsn"].to_pylist(), rows["ordinal"].to_pylist(), strict=True)
        ends[found[-1]] = ends_transaction
    last = {lsn: (lsn, ordinal) for lsn, ordinal in found}
    assert ends == {place: last[place[0]] == place for place in ends}
    return found


@given(
    sizes=st.lists(st.sampled_from([1, 1, 2, 5, 9]), min_size=1, max_size=8),
    cuts=st.lists(st.integers(1, 4), min_size=40, max_size=40),
    flushes=st.sets(st.integers(0, 40)),
    step=st.sampled_from([1, 2, 3, 10_000]),
)
@examples(60)
def test_rows_come_in_order_from_any_place_on(
    sizes: list[int], cuts: list[int], flushes: set[int], step: int
) -> None:
    places = [(100 + 10 * number, n) for number, size in enumerate(sizes) for n in range(size)]
    last = {(100 + 10 * number, size - 1) for number, size in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as folder:
        uri = new_changelog(Path(folder))
        buffer, left, chunk = TransactionBuffer(ChangelogWriter(uri), PART_BYTES), list(places), 0
        while left:
            some, left = left[: cuts[chunk]], left[cuts[chunk] :]
            ended = [TransactionEnd(0, lsn, lsn + 5, lsn, lsn) for lsn, n in some if (lsn, n) in last]
            buffer.add(rows_of(some), ended, CHUNK_BYTES)
            if chunk in flushes:
                buffer.flush(LSN(0))
            chunk += 1
        buffer.flush(LSN(0))
        assert read(uri, EventPosition.after_transaction(Epoch(1), LSN(0)), step) == places
        for number, (lsn, ordinal) in enumerate(places):
            assert read(uri, EventPosition(Epoch(1), LSN(lsn), ordinal), step) == places[number + 1 :]


def test_files_that_cannot_be_put_in_order_give_nothing(tmp_path: Path) -> None:
    """The same place twice: the changelog is not as the receiver writes it."""
    uri = new_changelog(tmp_path)
    for places in ([(100, 0), (110, 0)], [(110, 0), (110, 1)]):
        writer = ChangelogWriter(uri)
        part = writer.write_part(rows_of(places))
        writer.append([part], durable_lsn=LSN(120), first_lsn=LSN(100), last_lsn=LSN(110), last_commit_us=110)
    with pytest.raises(ChangelogError, match="in an order that cannot be determined"):
        beginning = EventPosition.after_transaction(Epoch(1), LSN(0))
        next(ordered_rows(uri, files_after(uri, beginning), beginning))
