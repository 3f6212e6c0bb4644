"""Applying changes to real lake tables: exactly once, one commit a slice, an error if something is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.transaction import AddAction

from airflow_provider_pgrepl.errors import (
    DriftError,
    FencedError,
    IdentityError,
    LakeTableError,
    TruncatedError,
    ValueRangeError,
)
from airflow_provider_pgrepl.replication.lake.delta.commit import commit_properties
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table, read_position
from airflow_provider_pgrepl.replication.lake.merge import slice_commit
from airflow_provider_pgrepl.replication.lake.merge.merge import Applied, apply_changes, slices
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.support.changes import column, commit_ts, relation, table_of
from tests.support.model import Change, Row

APP = app_id("p", Epoch(1))
OF = relation(column("id", "bigint", key=True), column("v"))


class Lake:
    """One lake table of a pipeline, with what a test does to it."""

    merge = "auto"

    def __init__(self, root: Path, of: Relation = OF, **settings: object) -> None:
        self.of = of
        self.uri = str(root / "t")
        self.pipeline = Pipeline(name="p", lake=str(root), tables=("public.t",), merge=self.merge, **settings)
        commit_snapshot(self.uri, lake_schema(of, self.pipeline.options(of.table)), [], LSN(1), "p", Epoch(1))

    def apply(self, *changes: Change, through: DeltaTable | None = None) -> Applied:
        return apply_changes(
            through or open_table(self.uri),
            table_of(changes),
            self.of,
            self.pipeline.options(self.of.table),
            APP,
            self.pipeline.slice_bytes,
        )

    def rows(self, names: Iterable[str] = ()) -> list[Row]:
        wanted = ", ".join(quote_identifier(name) for name in names or [c.name for c in self.of.columns])
        found = (
            QueryBuilder().register("t", open_table(self.uri)).execute(f"select {wanted} from t").read_all()
        )
        return sorted((tuple(row.values()) for row in pa.table(found).to_pylist()), key=repr)

    def position(self) -> LSN | None:
        return read_position(open_table(self.uri), APP)

    def version(self) -> int:
        return int(open_table(self.uri).version())


@pytest.fixture(autouse=True, params=["rewrite", "merge_on_read", "deltalake"])
def merge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test holds for both strategies, and where only deltalake may write."""
    if request.param == "deltalake":
        monkeypatch.setattr(slice_commit, "can_commit", lambda table: False)
    strategy = "merge_on_read" if request.param == "merge_on_read" else "rewrite"
    monkeypatch.setattr(Lake, "merge", strategy)
    return strategy


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def insert(lsn: int, *row: str | None) -> Change:
    return Change("I", new=row, commit_lsn=lsn)


def update(lsn: int, *row: str | None, old: Row | None = None, unchanged: tuple[int, ...] = ()) -> Change:
    return Change("U", new=row, old=old, unchanged=unchanged, commit_lsn=lsn)


def delete(lsn: int, *row: str | None) -> Change:
    return Change("D", old=row, commit_lsn=lsn)


def test_inserts_updates_and_deletes_arrive_in_one_commit_with_their_position(lake: Lake) -> None:
    lake.apply(insert(10, "1", "a"), insert(10, "2", "b"))
    applied = lake.apply(insert(20, "3", "c"), update(20, "1", "A"), delete(30, "2", None))
    assert applied == Applied(position=LSN(30), version=2, changes=3, commits=1)
    assert lake.rows() == [(1, "A"), (3, "c")]
    assert lake.position() == 30


def test_the_commit_says_position_and_time_of_its_last_transaction(lake: Lake) -> None:
    lake.apply(insert(10, "1", "a"))
    about = json.loads(open_table(lake.uri).history(1)[0]["pgrepl"])
    assert about == {"kind": "changes", "position": 10, "commit_ts": commit_ts(10).isoformat()}


def test_transactions_sent_again_are_skipped(lake: Lake) -> None:
    first = insert(10, "1", "a"), insert(20, "2", "b")
    lake.apply(*first)
    applied = lake.apply(*first, update(30, "1", "A"))
    assert (applied.changes, applied.commits) == (1, 1)
    assert lake.apply(*first) == Applied(position=LSN(30), version=2, changes=0, commits=0)
    assert lake.rows() == [(1, "A"), (2, "b")]


def test_a_change_at_the_position_itself_is_in_the_snapshot(lake: Lake) -> None:
    assert lake.apply(insert(1, "1", "a"), insert(2, "2", "b")).changes == 1
    assert lake.rows() == [(2, "b")]


def test_changes_that_leave_nothing_still_move_the_position(lake: Lake) -> None:
    applied = lake.apply(insert(10, "1", "a"), delete(20, "1", None))
    assert applied == Applied(position=LSN(20), version=1, changes=2, commits=1)
    assert lake.position() == 20
    assert lake.apply(insert(10, "1", "a"), delete(20, "1", None)).commits == 0


def test_after_an_empty_commit_the_same_handle_goes_on(lake: Lake) -> None:
    table = open_table(lake.uri)
    lake.apply(insert(10, "1", "a"), delete(20, "1", None), through=table)
    lake.apply(insert(30, "1", "b"), through=table)
    lake.apply(update(40, "1", "c"), through=table)
    lake.apply(Change("T", new=("0",), commit_lsn=50), insert(50, "7", "x"), through=table)
    assert lake.rows() == [(7, "x")]
    assert lake.position() == 50


LATE = {
    "append": [insert(40, "9", "z")],
    "merge": [update(40, "1", "z")],
    "nothing": [insert(40, "9", "z"), delete(40, "9", None)],
    "overwrite": [Change("T", new=("0",), commit_lsn=40)],
}
BEFORE = {
    "append": [insert(30, "5", "e")],
    "merge": [update(30, "1", "e")],
    "nothing": [insert(30, "5", "e"), delete(30, "5", None)],
    "overwrite": [Change("T", new=("0",), commit_lsn=30), insert(30, "1", "")],
}


@pytest.mark.parametrize("before", BEFORE)
def test_stale_writer_is_refused(lake: Lake, before: str) -> None:
    lake.apply(insert(10, "1", "a"), insert(10, "2", "b"))
    stale = {late: open_table(lake.uri) for late in LATE}
    lake.apply(*BEFORE[before])
    rows, version = lake.rows(), lake.version()
    for late, changes in LATE.items():
        with pytest.raises(FencedError):
            lake.apply(*changes, through=stale[late])
            pytest.fail(f"{late} after {before} was committed")
        assert (lake.rows(), lake.version(), lake.position()) == (rows, version, 30), late


def test_a_writer_of_an_earlier_epoch_is_refused(lake: Lake) -> None:
    stale = open_table(lake.uri)
    commit_snapshot(lake.uri, lake_schema(OF, lake.pipeline.options(OF.table)), [], LSN(5), "p", Epoch(2))
    for table in (stale, open_table(lake.uri)):
        with pytest.raises(FencedError):
            lake.apply(insert(10, "1", "a"), through=table)
    assert lake.rows() == []


def test_an_epoch_without_snapshot_is_refused(lake: Lake) -> None:
    with pytest.raises(LakeTableError, match="was not copied in the current epoch"):
        apply_changes(
            open_table(lake.uri),
            table_of([insert(9, "1", "a")]),
            OF,
            lake.pipeline.options(OF.table),
            "p:2",
            lake.pipeline.slice_bytes,
        )


def test_row_missing_in_the_lake_stops_the_table_before_anything_is_committed(lake: Lake) -> None:
    lake.apply(insert(10, "1", "a"))
    for change in (update(20, "7", "secret"), delete(20, "7", None)):
        with pytest.raises(LakeTableError, match="lacks a row") as refused:
            lake.apply(change, update(20, "1", "b"), insert(20, "2", "c"))
        assert "secret" not in str(refused.value)
        assert (lake.rows(), lake.position()) == ([(1, "a")], 10), f"op {change.op}"


def test_a_key_that_the_lake_holds_twice_is_noticed(lake: Lake) -> None:
    lake.apply(insert(10, "1", "a"))
    table = open_table(lake.uri)
    rows = pa.table({"id": [1], "v": ["foreign"]})
    write_deltalake(
        table,
        rows,
        mode="append",
        schema_mode="merge",
        commit_properties=commit_properties(APP, LSN(11), "x"),
    )
    with pytest.raises(LakeTableError, match="key twice"):
        lake.apply(update(20, "1", "b"))


def test_a_truncate_leaves_what_came_after_it(lake: Lake) -> None:
    lake.apply(insert(10, "1", "a"))
    lake.apply(insert(20, "2", "b"), Change("T", new=("0",), commit_lsn=30), insert(30, "1", "c"))
    assert lake.rows() == [(1, "c")]
    lake.apply(Change("T", new=("0",), commit_lsn=40))
    assert (lake.rows(), lake.position()) == ([], 40)


def test_keys_swapped_in_one_commit(tmp_path: Path) -> None:
    lake = Lake(tmp_path, relation(*OF.columns, identity="f"))
    lake.apply(insert(10, "1", "a"), insert(10, "2", "b"))
    lake.apply(update(20, "2", "a", old=("1", "a")), update(20, "1", "b", old=("2", "b")))
    assert lake.rows() == [(1, "b"), (2, "a")]


def test_an_unchanged_value_is_not_null_even_under_a_new_key(lake: Lake) -> None:
    lake.apply(insert(10, "1", "long"), insert(10, "2", "other"))
    lake.apply(update(20, "3", None, old=("1", None), unchanged=(1,)), update(20, "2", None))
    assert lake.rows() == [(2, None), (3, "long")]


def test_bookkeeping_columns_are_those_of_the_change_that_made_the_row(lake: Lake) -> None:
    lake.apply(insert(10, "1", "a"), insert(10, "2", "b"))
    lake.apply(
        update(20, "1", None, unchanged=(1,)), update(30, "9", "b", old=("2", None)), insert(40, "4", "d")
    )
    names = ["id", "_pgrepl_commit_lsn", "_pgrepl_commit_ts"]
    assert lake.rows(names) == [(1, 20, commit_ts(20)), (4, 40, commit_ts(40)), (9, 30, commit_ts(30))]


def test_bookkeeping_columns_can_be_left_out(tmp_path: Path) -> None:
    lake = Lake(tmp_path, commit_lsn_column=False, commit_ts_column=False)
    lake.apply(insert(10, "1", "a"))
    lake.apply(update(20, "1", "b"))
    assert [field.name for field in open_table(lake.uri).schema().fields] == ["id", "v"]


ODD_NAMES = ["Val", "a.b", "a b", 'a"b', "a`b", "select", "größe", "o'r", "a?", "a(b)", "a,b;{x}=", "x" * 63]
OUR_NAMES = ["t", "s", "t.id", "s.c0", "kind", "zero", "o0", "c0", "u1"]


NAMES = ODD_NAMES + OUR_NAMES


@pytest.mark.parametrize("key", [True, False], ids=["key", "value"])
def test_any_column_name_works(tmp_path: Path, key: bool) -> None:
    """All of them are columns of one table, each with the same text, next to one more column."""
    named = len(NAMES)

    def row(text: str | None, other: str | None) -> list[str | None]:
        return [*[text] * named, other]

    def image(text: str) -> Row:
        """Return a row's old version as the stream sends it: with the key's columns alone."""
        return tuple(row(text, None) if key else row(None, text))

    def rows(*texts: str) -> list[Row]:
        return [tuple(row(text, text)) for text in texts]

    columns = [column(name, key=key) for name in NAMES]
    lake = Lake(tmp_path, relation(*columns, column("other", key=not key)))
    lake.apply(*(insert(10, *row(text, text)) for text in "123"))
    moved = update(20, *row("1b", "1b"), old=image("1"))
    lake.apply(moved, delete(20, *image("2")), insert(20, *row("4", "4")))
    assert lake.rows() == rows("1b", "3", "4")
    lake.apply(update(30, *image("3"), unchanged=(named,) if key else tuple(range(named))))
    assert lake.rows() == rows("1b", "3", "4")


KEYS = [
    ("text", "a", "ä"),
    ("text", "", " "),
    ("integer", "-1", "2"),
    ("bigint", "9223372036854775807", "-9223372036854775808"),
    ("numeric(38,10)", "9999999999999999999999999999.9999999999", "1.5000000000"),
    ("numeric", "1.0", "1.00"),
    ("timestamp with time zone", "2024-01-01 00:00:00+00", "2024-01-01 00:00:00.000001+00"),
    ("timestamp without time zone", "1900-01-01 00:00:00", "2024-01-01 00:00:00.000001"),
    ("date", "0001-01-01", "9999-12-31"),
    ("boolean", "t", "f"),
    ("uuid", "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"),
    ("double precision", "NaN", "-0"),
    ("double precision", "0.1", "1e-300"),
    ("bytea", r"\x00", r"\xff"),
]
"""A type and two values of it."""


@pytest.mark.thorough("the same test, by the other ways", "rewrite")
def test_any_key_type_matches_its_own_rows(tmp_path: Path) -> None:
    for number, case in enumerate(KEYS):
        type_name, one, two = case
        lake = Lake(tmp_path / str(number), relation(column("id", type_name, key=True), column("v")))
        lake.apply(insert(10, one, "one"), insert(10, two, "two"))
        lake.apply(update(20, one, "ONE"), update(20, two, "TWO"))
        assert [v for (v,) in lake.rows(["v"])] == ["ONE", "TWO"], case
        lake.apply(delete(30, one, None), update(30, one, "moved", old=(two, None)))
        assert [v for (v,) in lake.rows(["v"])] == ["moved"], case
        lake.apply(delete(40, one, None))
        assert lake.rows() == [], case


def test_a_composite_key_matches_only_as_a_whole(tmp_path: Path) -> None:
    lake = Lake(tmp_path, relation(column("a", key=True), column("v"), column("b", "integer", key=True)))
    lake.apply(insert(10, "1", "x", "12"), insert(10, "11", "y", "2"), insert(10, "1", "z", "1"))
    lake.apply(update(20, "11", "Y", "2"), delete(20, "1", None, "1"))
    assert lake.rows() == [("1", "x", 12), ("11", "Y", 2)]


def test_a_keyless_table_keeps_every_insert_and_nothing_else(tmp_path: Path) -> None:
    lake = Lake(tmp_path, relation(column("a", "integer"), column("v"), identity="n"))
    lake.apply(insert(10, "1", "x"), insert(10, "1", "x"))
    lake.apply(insert(20, "1", "x"), insert(20, None, None))
    with pytest.raises(IdentityError, match="no key"):
        lake.apply(insert(30, "2", "y"), delete(30, "1", "x"))
    assert lake.rows() == [(1, "x"), (1, "x"), (1, "x"), (None, None)]
    assert lake.apply(Change("T", new=("0",), commit_lsn=40), insert(40, "3", "z")).commits == 1
    assert lake.rows() == [(3, "z")]


def truncate(lsn: int) -> Change:
    return Change("T", new=("0",), commit_lsn=lsn)


def test_an_ignored_truncate_leaves_inserts_alone_without_key(tmp_path: Path) -> None:
    lake = Lake(tmp_path, relation(column("a", "integer"), identity="n"), truncate="ignore")
    lake.apply(insert(10, "1"))
    lake.apply(insert(20, "2"), truncate(30), insert(40, "1"))
    assert lake.rows() == [(1,), (1,), (2,)]


def test_a_table_that_must_not_be_truncated_stops_before_that_transaction(tmp_path: Path) -> None:
    lake = Lake(tmp_path, truncate="error")
    with pytest.raises(TruncatedError, match="0/1E") as stopped:
        lake.apply(insert(10, "1", "a"), insert(20, "2", "b"), insert(30, "3", "c"), truncate(30))
    assert "pgrepl retry FILE.json 'public.t'" in stopped.value.hint
    assert (lake.rows(), lake.position()) == ([(1, "a"), (2, "b")], 20)


def test_after_an_ignored_truncate_a_row_takes_the_place_of_the_one_that_stayed(tmp_path: Path) -> None:
    lake = Lake(tmp_path, truncate="ignore")
    lake.apply(insert(10, "1", "a"), insert(10, "2", "b"), insert(10, "3", "c"))
    lake.apply(truncate(20))
    lake.apply(insert(30, "1", "new"), insert(30, "9", "moving"))
    lake.apply(update(40, "2", "moved", old=("9", None)))
    assert lake.rows() == [(1, "new"), (2, "moved"), (3, "c")]
    lake.apply(delete(50, "1", None), update(50, "2", "last"))
    assert lake.rows() == [(2, "last"), (3, "c")]


SOFT = ["id", "v", "_pgrepl_deleted", "_pgrepl_commit_lsn"]


def test_deleted_rows_stay_and_are_marked(tmp_path: Path) -> None:
    lake = Lake(tmp_path, deletes="soft")
    lake.apply(insert(10, "1", "a"), insert(10, "2", "b"), insert(10, "3", "c"))
    lake.apply(delete(20, "1", None), update(30, "9", None, old=("2", None), unchanged=(1,)))
    marked = [(1, "a", True, 20), (2, "b", True, 30), (3, "c", False, 10), (9, "b", False, 30)]
    assert lake.rows(SOFT) == marked
    assert lake.rows(["id", "_pgrepl_commit_ts"])[0] == (1, commit_ts(20))
    lake.apply(insert(40, "1", "back"), truncate(50), insert(60, "3", "anew"))
    after = [(1, "back", True, 50), (2, "b", True, 30), (3, "anew", False, 60), (9, "b", True, 50)]
    assert lake.rows(SOFT) == after


def test_a_row_that_no_transaction_showed_leaves_no_mark(tmp_path: Path) -> None:
    lake = Lake(tmp_path, deletes="soft")
    lake.apply(insert(10, "1", "a"), delete(10, "1", None), insert(20, "2", "b"), update(30, "2", "c"))
    lake.apply(insert(40, "3", "d"), delete(50, "3", None), delete(60, "2", None))
    assert lake.rows(SOFT) == [(2, "c", True, 60), (3, "d", True, 50)]


def test_soft_deletes_of_a_row_that_is_missing_are_refused(tmp_path: Path) -> None:
    lake = Lake(tmp_path, deletes="soft")
    lake.apply(insert(10, "1", "a"))
    for change in (delete(20, "7", None), update(20, "8", None, old=("7", None), unchanged=(1,))):
        with pytest.raises(LakeTableError, match="lacks a row"):
            lake.apply(change, update(20, "1", "b"))
    assert lake.rows(SOFT) == [(1, "a", False, 10)]
    lake.apply(delete(30, "1", None))
    for change in (delete(40, "1", None), update(40, "1", "b")):
        with pytest.raises(LakeTableError, match="lacks a row"):
            lake.apply(change)
    assert lake.rows(SOFT) == [(1, "a", True, 30)]


COPIES = relation(column("a", "integer"), column("v", "double precision"), identity="f")


def test_rows_without_key_go_as_often_as_they_were_deleted(tmp_path: Path) -> None:
    lake = Lake(tmp_path, COPIES)
    lake.apply(
        *[insert(10, "1", "0")] * 3, insert(10, None, None), insert(11, "1", "-0"), insert(11, "1", "NaN")
    )
    changed = lake.apply(
        delete(20, "1", "0"),
        update(20, "1", "5", old=("1", "NaN")),
        delete(20, None, None),
        insert(30, None, None),
    )
    assert changed.commits == 1
    assert lake.rows(["a", "v", "_pgrepl_commit_lsn"]) == [
        (1, -0.0, 11),
        (1, 0.0, 10),
        (1, 0.0, 10),
        (1, 5.0, 20),
        (None, None, 30),
    ]
    assert [str(v) for _, v in lake.rows()] == ["-0.0", "0.0", "0.0", "5.0", "None"]


def test_a_row_without_key_that_the_lake_lacks_stops_the_table(tmp_path: Path) -> None:
    lake = Lake(tmp_path, COPIES)
    lake.apply(insert(10, "1", "0"))
    with pytest.raises(LakeTableError, match="lacks a row"):
        lake.apply(delete(20, "1", "0"), delete(20, "1", "0"))
    with pytest.raises(LakeTableError, match="lacks a row"):
        lake.apply(delete(20, "1", "-0"))
    assert (lake.rows(), lake.position()) == ([(1, 0.0)], 10)


def test_any_column_name_works_with_any_policy(tmp_path: Path) -> None:
    """All of them are columns of one table, each with the same text, next to one more column."""
    names = ["a.b", 'a"b', "a b", "100%", "größe", "select", "s.kind", "k0", "x" * 63]

    def row(text: str | None, other: str | None) -> list[str | None]:
        return [*[text] * len(names), other]

    policies: list[dict[str, str]] = [{}, {"deletes": "soft"}, {"truncate": "ignore"}]
    for number, policy in enumerate(policies):
        root = tmp_path / str(number)
        keyed = relation(*(column(name, key=True) for name in names), column("v"))
        lake = Lake(root, keyed, **policy)
        lake.apply(insert(10, *row("1", "a")), insert(10, *row("2", "b")))
        moved = update(20, *row("3", None), old=tuple(row("1", None)), unchanged=(len(names),))
        lake.apply(moved, delete(20, *row("2", None)))
        assert tuple(row("3", "a")) in lake.rows(), policy
        copies = Lake(root / "copies", relation(*map(column, names), column("v"), identity="f"))
        copies.apply(insert(10, *row("1", "a")), insert(10, *row("1", "a")), insert(10, *row(None, "c")))
        copies.apply(delete(20, *row("1", "a")), delete(20, *row(None, "c")))
        assert copies.rows() == [tuple(row("1", "a"))], policy


def test_files_without_statistics_are_not_skipped(tmp_path: Path) -> None:
    for identity in ("d", "f"):
        of = relation(column("id", "bigint", key=identity == "d"), column("v"), identity=identity)
        lake = Lake(tmp_path / identity, of)
        plain = tmp_path / identity / "t" / "plain.parquet"
        schema = lake_schema(of, lake.pipeline.options(of.table))
        rows = pa.Table.from_pylist([{"id": 1, "v": "a"}, {"id": 2, "v": "b"}], schema=schema)
        pq.write_table(rows, plain, write_statistics=False)
        table = open_table(lake.uri)
        add = AddAction(plain.name, plain.stat().st_size, {}, 0, True, '{"numRecords": 2}')
        table.create_write_transaction(
            [add], "append", table.schema(), commit_properties=commit_properties(APP, LSN(5), "x")
        )
        old = ("2", "b") if identity == "f" else None
        lake.apply(update(20, "2", "B", old=old), delete(20, "1", "a"))
        assert lake.rows() == [(2, "B")], f"replica identity {identity}"


def test_slices_end_where_transactions_end(tmp_path: Path) -> None:
    lake = Lake(tmp_path, slice_bytes=25)
    changes = [insert(10, "1", "x" * 10), insert(20, "2", "y" * 10), insert(30, "3", "z" * 40)]
    changes += [insert(30, "4", "z" * 40), insert(40, "5", "w"), insert(50, "6", "w")]
    assert list(slices(table_of(changes), 25)) == [(0, 2), (2, 4), (4, 6)]
    assert lake.apply(*changes).commits == 3
    positions = [json.loads(commit["pgrepl"])["position"] for commit in open_table(lake.uri).history(3)]
    assert positions == [50, 30, 20]
    assert [row[0] for row in lake.rows()] == [1, 2, 3, 4, 5, 6]


def test_a_failing_slice_leaves_the_slices_before_it(tmp_path: Path) -> None:
    lake = Lake(tmp_path, slice_bytes=1)
    with pytest.raises(ValueRangeError) as refused:
        lake.apply(insert(10, "1", "a"), insert(20, "99999999999999999999", "b"))
    assert "99999" not in str(refused.value)
    assert (lake.rows(), lake.position()) == ([(1, "a")], 10)


def test_values_that_did_not_stay_need_not_fit_the_lake(lake: Lake) -> None:
    lake.apply(
        insert(10, "99999999999999999999", "a"), update(10, "1", "b", old=("99999999999999999999", None))
    )
    assert lake.rows() == [(1, "b")]


def test_changes_of_another_shape_are_drift(lake: Lake) -> None:
    with pytest.raises(DriftError):
        lake.apply(insert(10, "1", "a", "more"))


def test_a_lake_table_with_other_columns_is_refused(lake: Lake) -> None:
    of = relation(column("id", "integer", key=True), column("v"), column("w"))
    with pytest.raises(LakeTableError, match='"id", "w"'):
        apply_changes(
            open_table(lake.uri),
            table_of([insert(9, "1", "a", "b")]),
            of,
            lake.pipeline.options(of.table),
            APP,
            lake.pipeline.slice_bytes,
        )
