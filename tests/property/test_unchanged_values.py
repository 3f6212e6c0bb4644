"""events/unchanged_toast.py: a value that is filled in is the row's own, whatever happened to the row."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.changelog_rows import RowBatch
from airflow_provider_pgrepl.replication.events.unchanged_toast import LookUp, UnchangedValues, with_values
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from tests.support.changes import commit_ts
from tests.support.examples import examples
from tests.support.histories import Known

pytestmark = pytest.mark.slow

Row = tuple[str | None, ...]
_LARGE = "x" * 600
_COLUMNS = (
    Column("a", 1, 25, -1, "text", is_key=True),
    Column("doc", 2, 25, -1, "text"),
    Column("b", 3, 23, -1, "int4", is_key=True),
    Column("note", 4, 25, -1, "text"),
)


def record_of(oid: int) -> RelationRecord:
    return RelationRecord.of_catalog(Relation(oid, TableName("public", f"t{oid}"), _COLUMNS, "d"))


_FIRST, _OTHER = record_of(16_400), record_of(16_401)
_LATER = RelationRecord.of_catalog(Relation(16_400, TableName("public", "later"), _COLUMNS, "d"))
"""The first table, altered."""


@dataclass
class Source:
    """Tables as a server has them, and the changes that it sends. `known`: the places of rows ever sent."""

    tables: dict[int, dict[Row, Row]] = field(default_factory=lambda: {16_400: {}, 16_401: {}})
    rows: list[dict] = field(default_factory=list)
    truths: list[Row | None] = field(default_factory=list)
    sent: dict[tuple[int, Row], set[int]] = field(default_factory=dict)
    expected: list[set[int]] = field(default_factory=list)
    first: RelationRecord = _FIRST
    states: list[tuple[int, dict[int, dict[Row, Row]]]] = field(default_factory=list)

    def note(self) -> None:
        """Record the state of the tables as of the last row's commit."""
        if self.rows:
            self.states.append(
                (self.rows[-1]["commit_lsn"], {oid: dict(of) for oid, of in self.tables.items()})
            )

    def look_up(
        self, record: RelationRecord, epoch: int, lsn: int, wanted: Mapping[Row, Collection[int]]
    ) -> dict[Row, dict[int, str]]:
        """Return the wanted values at an LSN, as a lake with all changes would."""
        assert epoch == 1
        before = [tables for at, tables in self.states if at <= lsn]
        rows = before[-1][record.message.oid] if before else {}
        found = {key: {place: rows[key][place] for place in wanted[key]} for key in wanted if key in rows}
        return {key: {p: t for p, t in values.items() if t is not None} for key, values in found.items()}

    def say(
        self, oid: int, op: str, new: Row | None, old: Row | None = None, unchanged=None, truth=None
    ) -> None:
        version = (self.first if oid == 16_400 else _OTHER).version
        place: dict[str, Any] = {
            "epoch": 1,
            "commit_lsn": 100 + len(self.rows) // 3,
            "ordinal": len(self.rows),
            "xid": 5,
        }
        place |= {"commit_ts": commit_ts(1), "relation_id": oid, "relation_version": version}
        self.rows.append({**place, "op": op, "new": new, "old": old, "unchanged": unchanged})
        self.truths.append(truth)
        self.expected.append(set())

    def forget(self, oid: int) -> None:
        self.sent = {known: places for known, places in self.sent.items() if known[0] != oid}

    def put(self, oid: int, row: Row) -> None:
        key = (row[0], row[2])
        if key not in self.tables[oid]:
            self.tables[oid][key] = row
            self.sent[oid, key] = {1, 3}
            self.say(oid, "I", row, truth=row)

    def update(self, oid: int, key: Row, new: Row, resends: set[int]) -> None:
        before = self.tables[oid].get(key)
        new_key = (new[0], new[2])
        if before is None or (new_key != key and new_key in self.tables[oid]):
            return
        # A value that the update did not set is sent nevertheless where it is small.
        left = [p for p in (1, 3) if p not in resends and before[p] is not None and len(before[p]) > 500]
        new = tuple(before[place] if place in left else value for place, value in enumerate(new))
        del self.tables[oid][key]
        self.tables[oid][new_key] = new
        known = self.sent.pop((oid, key), set())
        shown = tuple(None if place in left else value for place, value in enumerate(new))
        old = (key[0], None, key[1], None) if new_key != key else None
        self.say(oid, "U", shown, old, left or None, truth=new)
        self.expected[-1] = known & set(left)
        self.sent[oid, new_key] = known | ({1, 3} - set(left))

    def delete(self, oid: int, key: Row) -> None:
        if self.tables[oid].pop(key, None) is not None:
            self.sent.pop((oid, key), None)
            self.say(oid, "D", None, (key[0], None, key[1], None))

    def truncate(self, oid: int) -> None:
        self.tables[oid].clear()
        self.forget(oid)
        self.say(oid, "T", ("0",))

    def alter(self) -> None:
        self.first = _LATER if self.first is _FIRST else _FIRST
        self.forget(16_400)
        self.say(16_400, "R", ("{}",))
        # Every value may have been rewritten.
        rows = self.tables[16_400]
        for key, row in rows.items():
            rows[key] = tuple(f"{one}!" if place in (1, 3) and one else one for place, one in enumerate(row))

    def skip(self) -> None:
        """Set every value of both tables, as a transaction that was skipped."""
        for oid, rows in self.tables.items():
            self.forget(oid)
            for key, row in rows.items():
                rows[key] = tuple(
                    f"{one}?" if place in (1, 3) and one else one for place, one in enumerate(row)
                )
        self.say(0, "G", None)

    def table(self) -> pa.Table:
        return pa.Table.from_pylist(self.rows, schema=ROW_SCHEMA)


_OID = st.sampled_from([16_400, 16_400, 16_401])
_KEY = st.tuples(st.sampled_from("ab"), st.sampled_from("12"))
_VALUE = st.sampled_from([None, "small", f"1{_LARGE}", f"2{_LARGE}", f"3{_LARGE}"])


@st.composite
def sources(draw: st.DrawFn) -> Source:
    source = Source()
    for _ in range(draw(st.integers(1, 40))):
        oid, key, other = draw(_OID), draw(_KEY), draw(_KEY)
        match draw(st.sampled_from("IIUUUUUUUDTAG" if draw(st.booleans()) else "IUUU")):
            case "I":
                source.put(oid, (key[0], draw(_VALUE), key[1], draw(_VALUE)))
            case "U":
                to = draw(st.sampled_from([key, key, other]))
                new = (to[0], draw(_VALUE), to[1], draw(_VALUE))
                source.update(oid, key, new, draw(st.sets(st.sampled_from([1, 3]))))
            case "D":
                source.delete(oid, key)
            case "T":
                source.truncate(oid)
            case "A":
                source.alter()
            case "G":
                source.skip()
        source.note()
    return source


def cut(draw: st.DrawFn, rows: pa.Table) -> Iterator[pa.Table]:
    start = 0
    while start < rows.num_rows:
        size = draw(st.integers(1, rows.num_rows))
        yield rows.slice(start, size)
        start += size


def filled(
    draw: st.DrawFn,
    rows: pa.Table,
    budget: int,
    begin: int = 0,
    look_up: LookUp | None = None,
    known: int = 0,
) -> list[dict]:
    def earlier(some: pa.Table, _: int) -> Iterator[pa.Table]:
        end = some["ordinal"][0].as_py()
        yield from cut(draw, rows.slice(known, max(0, end - known)))

    values = UnchangedValues(Known(_FIRST, _LATER, _OTHER), lambda _: True, earlier, look_up, budget)
    parts = [piece for part in cut(draw, rows.slice(begin)) for piece in values.fill(part)]
    return pa.concat_tables(parts).to_pylist() if parts else []


def check_true(source: Source, found: list[dict], begin: int = 0) -> None:
    given_rows = source.table().slice(begin).to_pylist()
    assert len(found) == len(given_rows)
    for row, given_row, truth in zip(found, given_rows, source.truths[begin:], strict=True):
        rest = dict.fromkeys(["new", "unchanged"])
        assert row | rest == given_row | rest
        if given_row["op"] not in "IU":
            assert row == given_row
            continue
        left = set(row["unchanged"] or ())
        assert left <= set(given_row["unchanged"] or ())
        assert row["unchanged"] != []
        assert row["new"] == [None if place in left else one for place, one in enumerate(truth)]


@examples(2000)
@given(sources(), st.data())
def test_filling_restores_every_sent_value_and_only_correct_values(source: Source, data: st.DataObject):
    rows = source.table()
    found = filled(data.draw, rows, 1 << 30)
    check_true(source, found)
    for row, expected in zip(found, source.expected, strict=True):
        assert not expected & set(row["unchanged"] or ())


@examples(200)
@given(sources(), st.data())
def test_filling_from_mid_stream_restores_values_sent_before_the_start(source: Source, data: st.DataObject):
    begin = data.draw(st.integers(0, len(source.rows)))
    found = filled(data.draw, source.table(), 1 << 30, begin)
    check_true(source, found, begin)
    for row, expected in zip(found, source.expected[begin:], strict=True):
        assert not expected & set(row["unchanged"] or ())


@examples(200)
@given(sources(), st.integers(0, 6_000), st.data())
def test_with_little_room_less_is_filled_in_and_nothing_wrong(
    source: Source, budget: int, data: st.DataObject
):
    check_true(source, filled(data.draw, source.table(), budget))


@examples(400)
@given(sources(), st.sampled_from([0, 3_000, 1 << 30]), st.data())
def test_filling_with_lake_lookup_yields_only_correct_values(
    source: Source, budget: int, data: st.DataObject
):
    """`known`: the position at which the retained changelog begins."""
    begin, known = data.draw(st.integers(0, len(source.rows))), data.draw(st.integers(0, len(source.rows)))
    check_true(source, filled(data.draw, source.table(), budget, begin, source.look_up, known), begin)


@pytest.mark.parametrize("parts", [1, 2, 7, 90])
@pytest.mark.parametrize("size", [1, 5, 1_000])
def test_all_is_looked_up_of_rows_from_before(parts, size):
    source = Source()
    for number in range(30):
        source.put(16_400, (f"k{number}", f"{number}{_LARGE}", "1", f"{number}!{_LARGE}"))
        source.note()
    begin = 30
    for turn in range(3):
        for number in range(30):
            key, new = (f"k{number}", str(turn + 1)), (f"k{number}", f"{turn}{_LARGE}", str(turn + 2), None)
            source.update(16_400, key, new, {1} if number % 7 == 0 else {3} if number % 5 == 0 else set())
            source.note()
    for place, row in enumerate(source.rows):
        row["commit_lsn"] = 100 + (place - begin) // size if place >= begin else 50
        row["ordinal"] = (place - begin) % size
    source.states = [(source.rows[n]["commit_lsn"], tables) for n, (_, tables) in enumerate(source.states)]
    values = UnchangedValues(
        Known(_FIRST), lambda _: True, lambda *_: iter(()), source.look_up, budget=1 << 30
    )
    rows, step = source.table().slice(begin), 90 // parts
    made = pa.concat_tables(
        [piece for start in range(0, 90, step) for piece in values.fill(rows.slice(start, step))]
    )
    check_true(source, made.to_pylist(), begin)
    assert made["unchanged"].null_count == 90


def test_remembered_values_stay_within_byte_budget():
    source = Source()
    for number in range(50):
        source.put(16_400, (f"k{number}", _LARGE, "1", None))
        source.update(16_400, (f"k{number}", "1"), (f"k{number}", None, "1", "n"), {3})
    values = UnchangedValues(Known(_FIRST), lambda _: True, lambda *_: iter(()), budget=10_000)
    for start in range(100):
        list(values.fill(source.table().slice(start, 1)))
    assert 0 < values._bytes <= 10_000
    assert sum(sum(map(len, one.values())) for one in values._rows.values()) < 10_000


def test_an_insert_that_lacks_a_value_gets_none_of_the_row_that_had_its_key():
    """It is an UPDATE that moved a row into a row filter: no earlier row of its key is this row."""
    source = Source()
    source.put(16_400, ("a", _LARGE, "1", None))
    source.note()
    source.say(16_400, "I", ("a", None, "1", None), None, [1])
    source.rows[-1]["commit_lsn"] += 1
    for look_up in (None, source.look_up):
        values = UnchangedValues(Known(_FIRST), lambda _: True, lambda *_: iter(()), look_up)
        values._is_following = True
        rows = source.table()
        made = [piece for n in range(2) for piece in values.fill(rows.slice(n, 1))]
        assert pa.concat_tables(made) == rows


def test_nothing_is_read_or_remembered_of_who_has_no_large_values():
    source = Source()
    for number in range(10):
        source.put(16_400, (f"k{number}", _LARGE, "1", None))
    values = UnchangedValues(Known(_FIRST), lambda _: True, lambda *_: pytest.fail("read"))
    rows = source.table()
    assert pa.concat_tables(values.fill(rows)) == rows
    assert not values._rows


def test_a_value_of_many_rows_is_not_held_for_all_of_them_at_once():
    source = Source()
    source.put(16_400, ("a", "y" * 10_000, "1", None))
    for number in range(300):
        source.update(16_400, ("a", "1"), ("a", None, "1", str(number)), {3})
    rows = source.table()
    values = UnchangedValues(Known(_FIRST), lambda _: True, lambda *_: iter(()))
    list(values.fill(rows.slice(0, 2)))
    found = values._follow(rows.slice(2))
    assert len(found) == 299
    pieces = list(with_values(rows.slice(2), found, 100_000))
    assert len(pieces) > 20
    assert max(piece.nbytes for piece in pieces) < 200_000
    check_true(source, pa.concat_tables(pieces).to_pylist(), 2)
    stretches = list(values.filled(iter([RowBatch(rows, False)])))
    assert [one.ends_transaction for one in stretches] == [False]
