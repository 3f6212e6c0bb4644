"""lake/time_travel: what a version of a lake table holds is decided by the version, not by today's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import ConfigError, LakeError
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.unchanged_toast import LakeValues
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import arrow_view_as_of
from airflow_provider_pgrepl.replication.lake.verify.comparison import LakeSide
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from tests.support.changes import column
from tests.support.model import Change
from tests.support.unserved import EPOCH, UnservedLake, numbered

OF = numbered(column("id", "bigint", key=True), column("v"))
SOFT, HARD = {"deletes": "soft"}, {"deletes": "hard"}


def insert(lsn: int, *row: str) -> Change:
    return Change("I", new=row, commit_lsn=lsn)


def delete(lsn: int, key: str) -> Change:
    return Change("D", old=(key, None), commit_lsn=lsn)


def changed(root: Path, was: dict[str, Any], now: dict[str, Any]) -> UnservedLake:
    """A table with a deleted row, and changes received that are not applied, read with other settings."""
    lake = UnservedLake(root, OF, **was)
    lake.apply(insert(110, "1", "a"), insert(110, "2", "b"), insert(110, "3", "c"))
    lake.apply(delete(120, "1"))
    lake.receive(insert(130, "4", "d"), delete(140, "2"), insert(144, "1", "again"))
    lake.configure(**now)
    return lake


def listed(found: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in found.select(["id", *marks(found)]).to_pylist())


def marks(found: pa.Table) -> list[str]:
    return [name for name in ("_pgrepl_deleted",) if name in found.column_names]


def test_rows_deleted_softly_stay_marked_when_deletes_are_hard_in_the_file(tmp_path: Path) -> None:
    lake = changed(tmp_path, SOFT, HARD)
    assert listed(lake.read(125)) == [(1, True), (2, False), (3, False)]
    assert listed(lake.read(135)) == [(1, True), (2, False), (3, False), (4, False)]
    assert listed(lake.read(140)) == [(1, True), (2, True), (3, False), (4, False)]
    assert listed(lake.read(144)) == [(1, False), (2, True), (3, False), (4, False)]


@pytest.mark.parametrize(("was", "now"), [(SOFT, HARD), (HARD, SOFT)], ids=["marked", "removed"])
def test_verify_compares_the_rows_that_are_not_deleted(
    tmp_path: Path, was: dict[str, Any], now: dict[str, Any]
) -> None:
    lake = changed(tmp_path, was, now)
    plan = arrow_view_as_of(lake.pipeline, lsn=144).planner.plan(OF.table)
    found = LakeSide(None, plan)._changed  # type: ignore[arg-type]
    assert found.before is not None
    assert found.after is not None
    assert found.before["id"].to_pylist() == [2]
    assert sorted(found.after["id"].to_pylist()) == [1, 4]


def test_versions_from_before_a_resnapshot_keep_their_marks(tmp_path: Path) -> None:
    lake = changed(tmp_path, SOFT, HARD)
    lake.copy(149)
    lake.receive(insert(160, "5", "e"))
    assert listed(lake.read(120)) == [(1, True), (2, False), (3, False)]
    assert listed(lake.read(140)) == [(1, True), (2, True), (3, False), (4, False)]
    assert listed(lake.read(160)) == [(5,)]


def test_rows_of_a_version_with_hard_deletes_get_no_marks(tmp_path: Path) -> None:
    lake = changed(tmp_path, HARD, SOFT)
    assert listed(lake.read(120)) == [(2,), (3,)]
    assert listed(lake.read(144)) == [(1,), (3,), (4,)]


OWN = [
    ({"deletes": "soft"}, {"deletes": "hard"}),
    ({"commit_lsn_column": True}, {"commit_lsn_column": False}),
    ({"commit_ts_column": True}, {"commit_ts_column": False}),
]


@pytest.mark.parametrize("settings", [*OWN, *((now, was) for was, now in OWN)], ids=str)
def test_all_reads_from_one_version_have_its_columns(
    tmp_path: Path, settings: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    was, now = settings
    lake = changed(tmp_path, was, now)
    shapes = [lake.read(lsn).schema for lsn in (120, 125, 135)]
    rows = lake.read(140)
    lake.configure(**was)
    assert shapes == [lake.read(140).schema] * 3
    assert rows == lake.read(140)


NUMBERS = numbered(column("id", "bigint", key=True), column("v", "numeric(9,2)"), column("w", "text"))
OTHERS = {
    "another type": ({}, {"text_columns": ("public.t.v",)}, "v"),
    "a type that held text cannot have": ({"text_columns": ("public.t.v",)}, {"text_columns": ()}, "v"),
    "left out": ({}, {"exclude_columns": ("public.t.w",)}, "w"),
    "taken in": ({"exclude_columns": ("public.t.w",)}, {"exclude_columns": ()}, "w"),
}


@pytest.mark.parametrize(("was", "now", "name"), OTHERS.values(), ids=OTHERS.keys())
def test_columns_that_the_file_gives_otherwise_are_an_error_that_names_them(
    tmp_path: Path, was: dict[str, Any], now: dict[str, Any], name: str
) -> None:
    lake = UnservedLake(tmp_path, NUMBERS, **was)
    lake.apply(insert(110, "1", "1.50", "a"))
    lake.receive(insert(120, "2", "2.50", "b"))
    before = lake.read(110)
    lake.configure(**now)
    assert lake.read(110) == before
    assert lake.read(119) == before
    with pytest.raises(LakeError, match=rf"other columns than its lake table has at .*: {name}\b") as raised:
        lake.read(120)
    assert "the pipeline file with which it was copied" in raised.value.hint


def test_a_type_that_never_fitted_the_column_is_an_error_of_the_file(tmp_path: Path) -> None:
    lake = changed(tmp_path, {}, {"types": {"public.t.v": "array(2)"}})
    assert lake.read(120).num_rows == 2
    with pytest.raises(ConfigError, match="types: column v"):
        lake.read(140)


def test_a_version_without_partitions_gets_none_from_the_file(tmp_path: Path) -> None:
    lake = changed(tmp_path, {}, {"per_table": {"public.t": {"partition_by": "v"}}})
    assert lake.read(120).schema == lake.read(140).schema
    assert "_pgrepl_partition" not in lake.read(140).column_names
    lake.configure(per_table={"public.t": {"partition_by": "added_later"}})
    assert lake.read(120).num_rows == 2
    assert lake.read(140).num_rows == 2


def test_value_that_was_not_sent_is_looked_up_by_the_type_of_the_version(tmp_path: Path) -> None:
    of = numbered(column("id", "bigint", key=True), column("v", "numeric"))
    lake = UnservedLake(tmp_path, of, unconstrained_numeric="decimal(20,5)")
    lake.apply(insert(110, "1", "1.5"))
    lake.configure(unconstrained_numeric="string")
    record = RelationRecord.of_catalog(of)
    # The decimal does not keep how many zeros the number has at its end.
    assert LakeValues(lake.pipeline).find(record, EPOCH, LSN(110), {("1",): [1]}) == {}


DATED = numbered(column("id", "bigint", key=True), column("at", "date"), column("r"))


def by(rule: str | None) -> dict[str, Any]:
    return {"per_table": {"public.t": {"partition_by": rule}}}


def partitions(found: pa.Table) -> dict[int, str | None]:
    return dict(zip(found["id"].to_pylist(), found["_pgrepl_partition"].to_pylist(), strict=True))


@pytest.mark.parametrize("now", ["year(at)", "r", None])
def test_new_rows_are_in_partitions_of_the_rule_by_which_the_version_was_copied(
    tmp_path: Path, now: str | None
) -> None:
    lake = UnservedLake(tmp_path, DATED, **by("month(at)"))
    lake.apply(Change("T", new=("0",), commit_lsn=105), insert(110, "1", "2026-01-05", "a"))
    lake.receive(insert(120, "2", "2026-03-05", "b"))
    lake.configure(**by(now))
    assert partitions(lake.read(110)) == {1: "2026-01"}
    assert partitions(lake.read(120)) == {1: "2026-01", 2: "2026-03"}
