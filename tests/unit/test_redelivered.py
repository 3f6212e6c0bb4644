"""receiver/redelivery.py: transactions sent before are dropped, and a rewound source is detected."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import RewoundError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, create_changelog
from airflow_provider_pgrepl.replication.pgoutput.columns import Splitter
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.receiver.changelog_feed import TransactionBuffer
from airflow_provider_pgrepl.replication.receiver.changelog_rows import VersionTagger
from airflow_provider_pgrepl.replication.receiver.redelivery import RedeliveryFilter
from tests.support import wire_bytes as wire
from tests.support.announced import announce, look_up

DURABLE = LSN(200)


class Receiving:
    """Splitter, tagger and check in a row, as the receiver has them."""

    def __init__(self, check: RedeliveryFilter) -> None:
        self.splitter, self.tagger, self.check = Splitter(), VersionTagger(Epoch(1), look_up), check

    def take(self, *messages: bytes) -> pa.Table:
        split = self.splitter.split(messages)
        return self.check.drop(self.tagger.tag(split), split.ended)


def transaction(lsn: int, *rows: bytes, xid: int = 1, us: int = 5) -> list[bytes]:
    return [wire.put_begin(lsn, xid, us), *rows, wire.put_commit(lsn, lsn + 10, us)]


def known(*lsns: int, xid: int = 1, us: int = 5) -> RedeliveryFilter:
    return RedeliveryFilter(DURABLE, dict.fromkeys(lsns, (xid, us + wire.PG_EPOCH_US)))


INSERT = wire.put_insert(1, ["x"])
RELATION = announce(1, "a")


def shown(rows: pa.Table) -> list[tuple[int, int, str]]:
    return list(zip(*(rows[name].to_pylist() for name in ("commit_lsn", "ordinal", "op")), strict=True))


def test_redelivered_transactions_are_dropped_and_new_transactions_pass() -> None:
    receiving = Receiving(known(100, 150))
    rows = receiving.take(
        *transaction(100, RELATION, INSERT), *transaction(150, INSERT), *transaction(200, INSERT)
    )
    assert shown(rows) == [(200, -1, "R"), (200, 0, "I")]
    assert shown(receiving.take(*transaction(230, INSERT))) == [(230, 0, "I")]


def test_a_relation_announced_in_a_dropped_transaction_comes_with_the_first_new_rows() -> None:
    """The catalog may have moved on since: then the changelog does not hold this version yet."""
    receiving = Receiving(known(100))
    assert receiving.take(*transaction(100, RELATION, INSERT, announce(2, "b"))).num_rows == 0
    assert receiving.take(*transaction(210)).num_rows == 0
    rows = receiving.take(*transaction(220, INSERT, xid=9, us=8), *transaction(240, INSERT))
    assert shown(rows) == [(220, -1, "R"), (220, -1, "R"), (220, 0, "I"), (240, 0, "I")]
    assert set(rows["xid"].to_pylist()[:3]) == {9}
    assert len(set(rows["commit_ts"].to_pylist()[:3])) == 1
    announced = rows.slice(0, 1).to_pylist()[0]
    assert announced["relation_version"] == rows["relation_version"].to_pylist()[2]


def test_a_transaction_spread_over_chunks_is_dropped_whole() -> None:
    receiving = Receiving(known(100))
    assert receiving.take(wire.put_begin(100, 1, 5), RELATION, INSERT).num_rows == 0
    assert receiving.take(INSERT, INSERT).num_rows == 0
    assert receiving.take(wire.put_commit(100, 110, 5)).num_rows == 0
    assert receiving.take(wire.put_begin(200, 2, 6), INSERT).num_rows == 2
    assert receiving.take(INSERT).num_rows == 1


def test_a_transaction_that_ends_in_the_chunk_where_the_next_one_begins_is_dropped() -> None:
    receiving = Receiving(known(100))
    receiving.take(wire.put_begin(100, 1, 5), RELATION, INSERT)
    rows = receiving.take(wire.put_commit(100, 110, 5), wire.put_begin(200, 2, 6), INSERT)
    assert shown(rows) == [(200, -1, "R"), (200, 0, "I")]


def test_transactions_without_rows_are_no_sign_of_anything() -> None:
    receiving = Receiving(known(150))
    receiving.take(*transaction(100), *transaction(120, xid=7), *transaction(150, RELATION, INSERT))
    assert receiving.take(*transaction(200, INSERT)).num_rows == 2


def test_a_commit_at_the_durable_lsn_is_new() -> None:
    assert shown(Receiving(known()).take(*transaction(200, RELATION, INSERT))) == [
        (200, 0, "R"),
        (200, 1, "I"),
    ]


def test_a_message_between_transactions_is_durable_when_its_end_is() -> None:
    receiving = Receiving(RedeliveryFilter(DURABLE, {199: (0, 0)}))
    assert receiving.take(wire.put_message(200, "p", b"", transactional=False)).num_rows == 0
    assert receiving.take(wire.put_message(208, "p", b"", transactional=False)).num_rows == 1


@pytest.mark.parametrize(
    "changed", [{"xid": 2}, {"us": 6}], ids=["another transaction id", "another commit time"]
)
def test_another_transaction_in_a_known_place_means_a_rewound_source(changed: dict[str, int]) -> None:
    with pytest.raises(RewoundError, match="is not the one"):
        Receiving(known(100)).take(*transaction(100, RELATION, INSERT, **changed))


def test_an_unknown_transaction_among_durable_ones_means_a_rewound_source() -> None:
    with pytest.raises(RewoundError, match="0/78 is not in the changelog"):
        Receiving(known(100)).take(*transaction(100, RELATION, INSERT), *transaction(120, INSERT))


def test_an_unknown_transaction_over_several_chunks_is_noticed_at_its_end() -> None:
    receiving = Receiving(known())
    receiving.take(wire.put_begin(120, 1, 5), RELATION, INSERT)
    with pytest.raises(RewoundError):
        receiving.take(wire.put_commit(120, 130, 5))


def test_a_durable_transaction_that_does_not_come_again_means_a_rewound_source() -> None:
    receiving = Receiving(known(100, 150))
    receiving.take(*transaction(100, RELATION, INSERT))
    with pytest.raises(RewoundError, match="0/96 is in the changelog, but"):
        receiving.take(*transaction(210, INSERT))
    waiting = Receiving(known(150))
    waiting.check.pass_idle(LSN(150))
    with pytest.raises(RewoundError, match="0/96 is in the changelog, but"):
        waiting.check.pass_idle(LSN(160))


def test_transactions_out_of_order_are_refused() -> None:
    receiving = Receiving(known())
    receiving.take(*transaction(230, RELATION, INSERT))
    with pytest.raises(RewoundError, match="out of order"):
        receiving.take(*transaction(220, INSERT))


def test_expected_redeliveries_are_loaded_from_changelog(tmp_path: Path) -> None:
    uri = str(tmp_path / "changelog")
    create_changelog(uri, EpochRecord("p", Epoch(1), "7", 1, "s", "p", 5, LSN(50)))
    writer = ChangelogWriter(uri)
    buffer = TransactionBuffer(writer, 1 << 20)
    first = Receiving(RedeliveryFilter.load(uri, writer, LSN(50)))
    splitter_input = [
        *transaction(60, RELATION, INSERT),
        *transaction(100, INSERT, xid=8),
        wire.put_message(120, "p", b"", transactional=False),
    ]
    split = first.splitter.split(splitter_input)
    buffer.add(first.check.drop(first.tagger.tag(split), split.ended), split.ended, 100)
    buffer.flush(LSN(0))
    assert writer.durable_lsn == 120

    successor = ChangelogWriter(uri)
    again = Receiving(RedeliveryFilter.load(uri, successor, LSN(70)))
    rows = again.take(
        *transaction(100, RELATION, INSERT, xid=8),
        wire.put_message(120, "p", b"", transactional=False),
        *transaction(120, INSERT),
    )
    assert shown(rows) == [(120, -1, "R"), (120, 0, "I")]
    with pytest.raises(RewoundError):
        Receiving(RedeliveryFilter.load(uri, successor, LSN(70))).take(
            *transaction(100, RELATION, INSERT, xid=9)
        )
    with pytest.raises(RewoundError):
        Receiving(RedeliveryFilter.load(uri, successor, LSN(60))).take(
            *transaction(100, RELATION, INSERT, xid=8)
        )


def test_redeliveries_are_compared_only_above_changelog_floor() -> None:
    def receiving() -> Receiving:
        us = 5 + wire.PG_EPOCH_US
        return Receiving(RedeliveryFilter(DURABLE, {150: (1, us)}, LSN(100)))

    one = receiving()
    rows = one.take(
        *transaction(90, RELATION, INSERT),
        *transaction(100, INSERT),
        *transaction(150, INSERT),
        *transaction(200, INSERT),
    )
    assert shown(rows) == [(200, -1, "R"), (200, 0, "I")]
    with pytest.raises(RewoundError, match="is not in the changelog"):
        receiving().take(*transaction(101, RELATION, INSERT))
    with pytest.raises(RewoundError, match="no more"):
        receiving().take(*transaction(90, RELATION, INSERT), *transaction(200, INSERT))


MESSAGE = wire.put_message(1, "p", b"x", transactional=True)


def test_transactions_of_messages_alone_may_come_again_or_not() -> None:
    """The messages wanted now decide if the server sends such transactions, and if they make rows."""
    check = RedeliveryFilter(
        DURABLE, dict.fromkeys((100, 120, 150), (1, 5 + wire.PG_EPOCH_US)), optional=frozenset({100, 120})
    )
    receiving = Receiving(check)
    rows = receiving.take(
        *transaction(110, MESSAGE),
        *transaction(120),
        *transaction(150, RELATION, INSERT),
        *transaction(170, MESSAGE),
    )
    assert rows.num_rows == 0
    assert shown(receiving.take(*transaction(200, MESSAGE))) == [(200, -1, "R"), (200, 0, "M")]


def test_one_of_messages_alone_that_is_another_now_shows_a_source_that_was_set_back() -> None:
    check = RedeliveryFilter(DURABLE, {100: (7, 5 + wire.PG_EPOCH_US)}, optional=frozenset({100}))
    with pytest.raises(RewoundError, match="is not the one"):
        Receiving(check).take(*transaction(100, MESSAGE))
