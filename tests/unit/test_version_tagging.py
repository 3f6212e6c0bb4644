"""receiver/changelog_rows.py: relation versions in place, rows for Relations, Truncates and Messages."""

from __future__ import annotations

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import WireError
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.pgoutput.columns import Splitter
from airflow_provider_pgrepl.replication.pgoutput.messages import RelationMessage
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.receiver.changelog_rows import Ddl, VersionTagger
from tests.support import wire_bytes as wire
from tests.support.announced import announce, look_up, relation


def version(oid: int, *columns: str) -> int:
    return relation(oid, *columns).version


def stamp(*chunks: list[bytes]) -> pa.Table:
    splitter, tagger = Splitter(), VersionTagger(Epoch(3), look_up)
    return pa.concat_tables([tagger.tag(splitter.split(chunk)) for chunk in chunks])


def versions(rows: pa.Table) -> list[tuple[str, int]]:
    return list(zip(rows["op"].to_pylist(), rows["relation_version"].to_pylist(), strict=True))


def test_rows_carry_epoch_order_and_the_version_announced_last_before_them() -> None:
    rows = stamp(
        [
            wire.put_begin(80, 5, 7),
            announce(1, "a"),
            wire.put_insert(1, ["x"]),
            announce(2, "b"),
            wire.put_insert(2, ["y"]),
            announce(1, "a", "c"),
            wire.put_insert(1, ["x", "z"]),
            wire.put_insert(2, ["w"]),
            wire.put_commit(80, 90, 7),
        ]
    )
    assert rows.schema == ROW_SCHEMA
    assert rows["epoch"].to_pylist() == [3] * 7
    assert rows["ordinal"].to_pylist() == list(range(7))
    first, second, third = version(1, "a"), version(2, "b"), version(1, "a", "c")
    assert versions(rows) == [
        ("R", first),
        ("I", first),
        ("R", second),
        ("I", second),
        ("R", third),
        ("I", third),
        ("I", second),
    ]


def test_a_relation_announced_again_inside_a_transaction_holds_from_there_on_in_later_chunks() -> None:
    rows = stamp(
        [wire.put_begin(80, 5), announce(1, "a"), wire.put_insert(1, ["x"])],
        [wire.put_insert(1, ["y"]), announce(1, "a", "b")],
        [wire.put_insert(1, ["x", "z"])],
        [wire.put_commit(80, 90), wire.put_begin(90, 6), wire.put_delete(1, ["x", None])],
    )
    old, new = version(1, "a"), version(1, "a", "b")
    assert versions(rows) == [("R", old), ("I", old), ("I", old), ("R", new), ("I", new), ("D", new)]
    assert rows["ordinal"].to_pylist() == [0, 1, 2, 3, 4, 0]


def test_a_truncate_is_one_row_a_table_each_of_its_version_at_that_place() -> None:
    rows = stamp(
        [
            wire.put_begin(80, 5),
            announce(1, "a"),
            announce(2, "b"),
            wire.put_truncate([1, 2], 3),
            announce(1, "a", "b"),
            wire.put_insert(1, ["x", "y"]),
            wire.put_truncate([1]),
            wire.put_commit(80, 90),
        ]
    )
    old, new = version(1, "a"), version(1, "a", "b")
    truncates = rows.filter(pa.compute.equal(rows["op"], "T"))
    assert truncates["relation_version"].to_pylist() == [old, version(2, "b"), new]
    assert truncates["relation_id"].to_pylist() == [1, 2, 1]
    assert truncates["new"].to_pylist() == [["cascade restart identity"]] * 2 + [[""]]
    assert rows["ordinal"].to_pylist() == list(range(7))


def test_messages_lie_between_transactions_or_in_them() -> None:
    rows = stamp(
        [
            wire.put_message(80, "outside", b"\x00\xff", transactional=False),
            wire.put_begin(80, 5, 7),
            wire.put_message(1, "inside", b"", transactional=True),
            wire.put_commit(80, 90, 7),
        ]
    )
    assert rows.select(["commit_lsn", "ordinal", "xid", "relation_id", "op", "new"]).to_pylist() == [
        {
            "commit_lsn": 79,
            "ordinal": 0,
            "xid": None,
            "relation_id": 0,
            "op": "M",
            "new": ["outside", "\\x00ff"],
        },
        {"commit_lsn": 80, "ordinal": 0, "xid": 5, "relation_id": 0, "op": "M", "new": ["inside", "\\x"]},
    ]
    assert rows["commit_ts"].null_count == 1


def test_a_relation_row_says_what_stream_and_catalog_said() -> None:
    rows = stamp(
        [wire.put_begin(80, 5), announce(1, "a"), wire.put_insert(1, ["x"]), wire.put_commit(80, 90)]
    )
    record = RelationRecord.from_json(rows["new"][0].as_py()[0])
    assert record.message.columns[0].name == "a"
    assert record.version == version(1, "a")


def test_a_row_without_its_relation_is_refused() -> None:
    with pytest.raises(WireError, match="before its relation"):
        stamp([wire.put_begin(80, 5), announce(2, "b"), wire.put_insert(1, ["x"])])
    with pytest.raises(WireError, match="before its relation"):
        stamp([wire.put_begin(80, 5), wire.put_insert(1, ["x"]), announce(1, "a")])


def test_a_message_of_ddl_becomes_a_relation_at_its_place_and_holds_for_the_rows_after_it() -> None:
    became = RelationRecord.of_catalog(relation(1, "a", "b"))
    other = RelationRecord.of_catalog(relation(2, "c"))
    said = {b"here": Ddl(became, (became,)), b"elsewhere": Ddl(other), b"all": Ddl(None, (became,))}
    splitter = Splitter()
    tagger = VersionTagger(Epoch(1), look_up, lambda message, _lsn, _xid: said.get(message.content))
    rows = tagger.tag(
        splitter.split(
            [
                wire.put_begin(80, 5),
                announce(1, "a"),
                wire.put_insert(1, ["x"]),
                wire.put_message(1, "pgrepl.ddl", b"elsewhere", transactional=True),
                wire.put_insert(1, ["x"]),
                wire.put_message(1, "pgrepl.ddl", b"here", transactional=True),
                wire.put_message(1, "pgrepl.ddl", b"", transactional=True),
                wire.put_truncate([1]),
                wire.put_insert(1, ["x"]),
                announce(1, "a"),
                wire.put_insert(1, ["x"]),
                wire.put_message(1, "pgrepl.ddl", b"all", transactional=True),
                wire.put_insert(1, ["x"]),
                wire.put_commit(80, 90),
            ]
        )
    )
    old, new = version(1, "a"), became.version
    assert versions(rows) == [
        ("R", old),
        ("I", old),
        ("R", other.version),
        ("I", old),
        ("R", new),
        ("T", new),
        ("I", new),
        ("R", old),
        ("I", old),
        ("M", 0),
        ("I", new),
    ]
    ordinals = rows["ordinal"].to_pylist()
    assert ordinals == sorted(set(ordinals))


def test_a_table_that_becomes_one_of_ours_has_rows_from_there_on() -> None:
    """For example a table that is moved out of the pipelines' own schema."""
    is_ours = False

    def find(message: RelationMessage, lsn: int, xid: int) -> RelationRecord | None:
        return look_up(message, lsn, xid) if is_ours else None

    splitter, tagger = Splitter(), VersionTagger(Epoch(3), find)
    ops = []
    for lsn in (80, 180):
        chunk = [
            wire.put_begin(lsn, 5),
            announce(1, "a"),
            wire.put_insert(1, ["x"]),
            wire.put_commit(lsn, lsn + 10),
        ]
        ops.append(tagger.tag(splitter.split(chunk))["op"].to_pylist())
        is_ours = True
    assert ops == [[], ["R", "I"]]
