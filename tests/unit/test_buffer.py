"""receiver/changelog_feed.py: whole transactions apart from the open one, and memory that stays bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from tests.support import wire_bytes as wire
from tests.support.changelogs import Written, new_changelog


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(new_changelog(tmp_path), part_bytes=10_000)


def parts(written: Written) -> int:
    return len(list(Path(written.uri).glob("*T*/*.parquet")))


def held(written: Written) -> int:
    """Return the number of rows in memory."""
    return sum(rows.num_rows for rows in [*written.buffer._whole, *written.buffer._open])


def test_an_open_transaction_never_holds_more_than_a_part_and_a_chunk(written: Written) -> None:
    written.take(written.begin(100), *written.insert(7, 0))
    most = 0
    for chunk in range(20):
        written.take(*written.insert(7, *range(chunk * 100, chunk * 100 + 100)))
        most = max(most, held(written))
    assert parts(written) >= 8
    assert most < 400
    assert not written.buffer.has_whole
    written.take(written.commit(100))
    assert written.buffer.has_whole
    assert held(written) < 400


def test_the_tail_of_a_chunk_belongs_to_the_open_transaction(written: Written) -> None:
    written.take(
        written.begin(100),
        *written.insert(7, 1),
        written.commit(100),
        written.begin(200),
        *written.insert(7, 2),
    )
    assert written.buffer.has_whole
    whole = written.buffer.whole_bytes
    assert 0 < whole < 300
    version = written.flush()
    assert written.writer.durable_lsn == 108
    assert not written.buffer.has_whole
    assert written.buffer.whole_bytes == 0
    assert held(written) == 1
    assert written.flush() == version


def test_durable_lsn_never_reaches_into_open_transaction(written: Written) -> None:
    """The receiver's idle LSN is that of the last end or keepalive before the open one began."""
    written.take(written.begin(100), *written.insert(7, 1), written.commit(100))
    written.take(written.begin(200), *written.insert(7, 2))
    written.buffer.flush(LSN(150))
    assert written.writer.durable_lsn == 150
    written.take(written.commit(200))
    written.buffer.flush(LSN(208))
    assert written.writer.durable_lsn == 208


def test_chunks_that_were_dropped_do_not_count(written: Written) -> None:
    split = written.splitter.split([written.begin(100), *written.insert(7, 1), written.commit(100)])
    rows = written.tagger.tag(split)
    written.buffer.add(rows.slice(0, 0), split.ended, 1_000_000)
    assert not written.buffer.has_whole
    assert written.buffer.whole_bytes == 0


def test_an_empty_transaction_at_the_end_of_a_chunk_moves_what_is_durable(written: Written) -> None:
    written.take(
        written.begin(100),
        *written.insert(7, 1),
        written.commit(100),
        written.begin(300),
        written.commit(300),
    )
    written.flush()
    assert written.writer.durable_lsn == 308


def test_a_message_outside_transactions_is_whole_at_once(written: Written) -> None:
    written.take(wire.put_message(160, "p", b"x", transactional=False))
    assert written.buffer.has_whole
    written.flush()
    assert written.writer.durable_lsn == 160
