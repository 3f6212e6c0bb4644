"""Changes of tables without key: rows known by all their values, counted."""

from __future__ import annotations

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import IdentityError, LakeTableError
from airflow_provider_pgrepl.replication.lake.merge.keyless import NetRows, net_rows
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from tests.support.changes import column, relation, table_of
from tests.support.model import Change, Row

OF = relation(column("a", "integer"), column("v"), identity="f")


def pipeline(**settings: object) -> Pipeline:
    return Pipeline(name="p", lake="/nowhere", tables=("public.t",), **settings)


def insert(lsn: int, *row: str | None) -> Change:
    return Change("I", new=row, commit_lsn=lsn)


def delete(lsn: int, *row: str | None) -> Change:
    return Change("D", old=row, commit_lsn=lsn)


def net(*changes: Change, **settings: object) -> NetRows:
    return net_rows(table_of(changes), OF, pipeline(**settings).options(OF.table))


def lost(of: NetRows) -> list[tuple[object, ...]]:
    return [(*row.values(), count) for row, count in zip(of.lost.to_pylist(), of.times.tolist(), strict=True)]


def gained(of: NetRows) -> list[tuple[object, ...]]:
    names = ["a", "v", "_pgrepl_commit_lsn"]
    return [tuple(row.values()) for row in of.gained.select(names).to_pylist()]


def lake(*rows: Row) -> pa.Table:
    return pa.Table.from_pylist(
        [{"a": a, "v": v, "_pgrepl_commit_lsn": lsn} for a, v, lsn in rows],
        schema=pa.schema([("a", pa.int32()), ("v", pa.string()), ("_pgrepl_commit_lsn", pa.int64())]),
    )


def test_equal_rows_are_counted() -> None:
    changes = net(delete(20, "1", "x"), delete(20, "1", "x"), insert(20, "2", None), insert(30, "2", None))
    assert lost(changes) == [(1, "x", 2)]
    assert gained(changes) == [(2, None, 20), (2, None, 30)]


def test_delete_from_equal_rows_removes_newest_row_first() -> None:
    changes = net(insert(20, "1", "x"), delete(30, "1", "x"), delete(30, "1", "x"), insert(40, "1", "x"))
    assert lost(changes) == [(1, "x", 1)]
    assert gained(changes) == [(1, "x", 40)]
    left = changes.remaining(lake((1, "x", 5), (1, "x", 9), (1, "x", 7), (1, "y", 8), (None, None, 1)))
    assert [row["_pgrepl_commit_lsn"] for row in left.to_pylist()] == [5, 7, 8, 1]


def test_an_unchanged_value_is_that_of_the_old_row() -> None:
    changes = net(Change("U", new=("2", None), old=("1", "long"), unchanged=(1,), commit_lsn=20))
    assert (lost(changes), gained(changes)) == ([(1, "long", 1)], [(2, "long", 20)])


def test_a_row_that_the_lake_holds_too_rarely_is_refused() -> None:
    changes = net(delete(20, "1", "secret"), delete(20, "1", "secret"))
    with pytest.raises(LakeTableError, match="lacks a row") as refused:
        changes.remaining(lake((1, "secret", 5)))
    assert "secret" not in str(refused.value)


def test_after_a_truncate_only_what_came_then_can_go() -> None:
    truncate = Change("T", new=("0",), commit_lsn=20)
    changes = net(insert(10, "1", "x"), truncate, insert(20, "2", "y"))
    assert (changes.overwrite, lost(changes), gained(changes)) == (True, [], [(2, "y", 20)])
    assert len(changes.remaining(lake((1, "x", 5)))) == 0
    with pytest.raises(LakeTableError, match="inconsistent"):
        net(insert(10, "1", "x"), truncate, delete(20, "1", "x"))


def test_an_ignored_truncate_takes_nothing() -> None:
    truncate = Change("T", new=("0",), commit_lsn=20)
    changes = net(
        insert(10, "1", "x"), truncate, insert(20, "1", "x"), delete(30, "1", "x"), truncate="ignore"
    )
    assert (changes.overwrite, lost(changes), gained(changes)) == (False, [], [(1, "x", 10)])


def test_rows_that_differ_in_an_excluded_column_only_are_equal_in_the_lake() -> None:
    changes = net(
        delete(20, "1", "x"), insert(20, "1", "y"), delete(20, "1", "z"), exclude_columns=("public.t.v",)
    )
    assert changes.lost.schema.names == ["a"]
    assert lost(changes) == [(1, 1)]
    assert changes.gained["a"].to_pylist() == []
    assert changes.gained.schema.names == ["a", "_pgrepl_commit_lsn", "_pgrepl_commit_ts"]


def test_different_texts_that_are_one_value_in_the_lake_are_counted_together() -> None:
    of = relation(column("d", "date"), column("v"), identity="f")
    changes = table_of([delete(20, "infinity", "x"), delete(20, None, "x")])
    found = net_rows(changes, of, pipeline(infinity="null").options(of.table))
    assert lost(found) == [(None, "x", 2)]


def test_without_columns_nothing_can_be_taken_away() -> None:
    changes = table_of([Change("I", new=(), commit_lsn=10), Change("D", old=(), commit_lsn=20)])
    with pytest.raises(IdentityError, match="the lake has no column of it"):
        net_rows(changes, relation(identity="f"), TableOptions())
    assert len(net_rows(changes.slice(0, 1), relation(identity="f"), TableOptions()).gained) == 1
