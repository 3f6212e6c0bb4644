"""pgoutput/columns.py: the stamps of a row, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from airflow_provider_pgrepl.errors import WireError
from airflow_provider_pgrepl.replication.pgoutput.columns import NO_TIME, Splitter
from tests.support import wire_bytes as wire

INSERT = wire.put_insert(7, ["1", None])


def test_a_row_carries_its_transaction() -> None:
    us = 1_700_000_000_000_000 - wire.PG_EPOCH_US
    split = Splitter().split([wire.put_begin(80, 2**32 - 1, us), INSERT, wire.put_commit(80, 96, us)])
    (row,) = split.rows.to_pylist()
    assert row == {
        "commit_lsn": 80,
        "ordinal": 0,
        "xid": 2**32 - 1,
        "commit_ts": datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC),
        "relation_id": 7,
        "op": "I",
        "new": ["1", None],
        "old": None,
        "unchanged": None,
    }
    (end,) = split.ended
    assert (end.commit_lsn, end.end_lsn, end.xid, end.commit_us) == (80, 96, 2**32 - 1, 1_700_000_000_000_000)


def test_empty_text_null_and_unchanged_are_three_things() -> None:
    update = wire.put_update(7, ["", None, ..., "x", ...])
    (row,) = Splitter().split([wire.put_begin(80, 1), update]).rows.to_pylist()
    assert row["new"] == ["", None, None, "x", None]
    assert row["unchanged"] == [2, 4]


def test_updates_have_an_old_row_only_when_it_was_sent() -> None:
    messages = [
        wire.put_begin(80, 1),
        wire.put_update(7, ["1"]),
        wire.put_update(7, ["2"], ["1"]),
        wire.put_update(7, ["3"], ["2"], b"O"),
        wire.put_delete(7, ["3"]),
    ]
    rows = Splitter().split(messages).rows
    assert rows["old"].to_pylist() == [None, ["1"], ["2"], ["3"]]
    assert rows["new"].to_pylist() == [["1"], ["2"], ["3"], None]


def test_a_table_without_columns_has_rows_all_the_same() -> None:
    rows = Splitter().split([wire.put_begin(80, 1), wire.put_insert(7, [])]).rows
    assert rows["new"].to_pylist() == [[]]


def test_an_insert_may_lack_values() -> None:
    """An UPDATE that moves a row into a row filter is sent as one, without what it did not change."""
    messages = [wire.put_begin(80, 1), INSERT, wire.put_insert(7, ["1", ..., None]), wire.put_commit(80, 90)]
    row = Splitter().split(messages).rows.to_pylist()[1]
    assert (row["op"], row["new"], row["old"], row["unchanged"]) == ("I", ["1", None, None], None, [1])


def test_an_open_transaction_is_remembered() -> None:
    splitter = Splitter()
    assert not splitter.is_open
    splitter.split([wire.put_begin(80, 1)])
    assert splitter.is_open
    assert splitter.split([INSERT]).rows["commit_lsn"].to_pylist() == [80]
    splitter.split([wire.put_commit(80, 90)])
    assert not splitter.is_open


def test_a_message_outside_transactions_is_a_transaction_of_its_own_before_its_end() -> None:
    split = Splitter().split(
        [wire.put_message(96, "p", b"", transactional=False), wire.put_begin(96, 1), INSERT]
    )
    (control,) = split.controls
    assert (control.commit_lsn, control.commit_us, control.xid) == (95, NO_TIME, 0)
    assert [(end.commit_lsn, end.end_lsn) for end in split.ended] == [(95, 96)]
    assert split.rows["commit_lsn"].to_pylist() == [96]


def test_a_truncate_takes_an_ordinal_for_each_of_its_tables() -> None:
    split = Splitter().split([wire.put_begin(80, 1), wire.put_truncate([1, 2, 3]), INSERT])
    assert split.rows["ordinal"].to_pylist() == [3]


def test_stream_abort_that_nobody_asked_for_changes_nothing() -> None:
    """PostgreSQL 18 sends it for transactions of which it has sent nothing (its bug #19616)."""
    abort = wire.wal_data(b"A" + bytes(8))
    messages = [wire.put_begin(80, 1), INSERT, INSERT, wire.put_commit(80, 90)]
    split = Splitter().split(messages)
    with_aborts = Splitter().split([abort, *messages[:2], abort, *messages[2:]])
    assert with_aborts.rows == split.rows
    assert [(end.commit_lsn, end.end_lsn) for end in with_aborts.ended] == [(80, 90)]


def test_nothing_is_split_into_nothing() -> None:
    split = Splitter().split([])
    assert (split.rows.num_rows, split.controls, split.ended) == (0, [], [])


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([INSERT], "outside its transaction"),
        ([wire.put_begin(80, 1), wire.put_begin(90, 2)], "outside its transaction"),
        ([wire.put_commit(80, 90)], "outside its transaction"),
        ([wire.put_begin(80, 1), wire.put_commit(81, 90)], "outside its transaction"),
        (
            [wire.put_begin(80, 1), wire.put_message(96, "", b"", transactional=False)],
            "outside its transaction",
        ),
        ([wire.put_message(96, "", b"", transactional=True)], "outside its transaction"),
        ([wire.wal_data(b"S")], "unknown kind"),
        ([b"w"], "too early"),
        ([wire.put_begin(80, 1), INSERT + b"x"], "longer"),
        ([wire.put_begin(80, 1), INSERT[:-1]], "malformed row"),
        ([wire.put_begin(80, 1), wire.put_delete(7, [...])], "malformed row"),
        ([wire.put_begin(80, 1), wire.put_insert(7, [None] * 40_000)], "malformed row"),
    ],
)
def test_splitter_rejects_malformed_or_misplaced_pgoutput_messages(messages: list[bytes], says: str) -> None:
    with pytest.raises(WireError, match=says):
        Splitter().split(messages)


def test_text_that_is_not_utf8_is_refused_without_telling_it() -> None:
    bad = wire.put_insert(7, ["geheim?"]).replace(b"?", b"\xe4")
    with pytest.raises(WireError, match="not UTF-8") as caught:
        Splitter().split([wire.put_begin(80, 1), bad])
    assert "geheim" not in str(caught.value)
    assert caught.value.__cause__ is None
    halves = wire.put_insert(7, ["??", "??"]).replace(b"??", b"\xc3\xa4")
    torn = halves.replace(b"\xc3\xa4t\0\0\0\2\xc3\xa4", b"x\xc3t\0\0\0\2\xa4x")
    assert torn != halves
    with pytest.raises(WireError, match="not UTF-8"):
        Splitter().split([wire.put_begin(80, 1), torn])
