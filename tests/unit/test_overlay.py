"""lake/time_travel: changes that are applied on top of a version, in a lake made without a server."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import DriftError, LakeError
from airflow_provider_pgrepl.replication.lake.history.table import prepare_history
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import arrow_view_as_of
from airflow_provider_pgrepl.replication.lake.time_travel.overlay import RowsByKey
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from tests.support.changes import column
from tests.support.model import Change
from tests.support.unserved import EPOCH, UnservedLake, numbered

OF = numbered(column("id", "bigint", key=True), column("v"))


def test_rows_are_found_by_key_after_a_truncate_that_marks_the_others(tmp_path: Path) -> None:
    lake = UnservedLake(tmp_path, OF, deletes="soft")
    lake.apply(*(Change("I", new=(number, "a"), commit_lsn=110) for number in "12"))
    lake.receive(Change("T", new=("0",), commit_lsn=120), Change("I", new=("2", "b"), commit_lsn=130))
    plan = arrow_view_as_of(lake.pipeline, lsn=130).planner.plan(OF.table)
    found = RowsByKey(plan, ["id"], ["v"]).find(pa.table({"id": [1, 2]}))
    assert found.sort_by("id").to_pylist() == [{"id": 1, "v": "a"}, {"id": 2, "v": "b"}]


def begin_history(lake: UnservedLake, **settings: Any) -> None:
    """Copy the table with a history, which begins after its earlier versions."""
    lake.configure(history=True, **settings)
    prepare_history(lake.of, lake.pipeline, LSN(149), EPOCH, datetime.now(UTC))
    lake.copy(149)


def history(lake: UnservedLake, lsn: int) -> pa.Table:
    return arrow_view_as_of(lake.pipeline, lsn=lsn).history(str(OF.table))


@pytest.mark.parametrize("name", ["commit_lsn_column", "commit_ts_column"])
def test_a_version_that_does_not_say_since_when_rows_are_valid_has_no_history(
    tmp_path: Path, name: str
) -> None:
    lake = UnservedLake(tmp_path, OF, **{name: False})
    lake.apply(Change("I", new=("1", "a"), commit_lsn=110))
    lake.receive(Change("U", new=("1", "b"), commit_lsn=120))
    begin_history(lake, **{name: True})
    for lsn in (110, 120):
        with pytest.raises(LakeError, match=r"public\.t kept no history then: .*commit_lsn_column or commit"):
            history(lake, lsn)


@pytest.mark.parametrize("lsn", [110, 120])
def test_a_history_with_another_type_than_the_version_is_refused(tmp_path: Path, lsn: int) -> None:
    lake = UnservedLake(tmp_path, numbered(column("id", "bigint", key=True), column("v", "boolean")))
    lake.apply(Change("I", new=("1", "t"), commit_lsn=110))
    lake.receive(Change("U", new=("1", "f"), commit_lsn=120))
    lake.alter(numbered(column("id", "bigint", key=True), column("v")))
    begin_history(lake)
    with pytest.raises(LakeError, match=r"public\.t kept no history then: .* has column v as string.*bool"):
        history(lake, lsn)


def test_a_history_that_began_after_a_column_was_dropped_is_read_from_before(tmp_path: Path) -> None:
    lake = UnservedLake(tmp_path, OF)
    lake.apply(Change("I", new=("1", "a"), commit_lsn=110))
    altered = numbered(*OF.columns, column("w"))
    lake.alter(altered)
    lake.receive(Change("U", new=("1", "b", "c"), commit_lsn=120))
    lake.alter(replace(altered, columns=(altered.columns[0], altered.columns[2])))
    begin_history(lake)
    found = history(lake, 120).sort_by("v").select(["id", "v", "w", "_pgrepl_to_lsn"])
    assert [tuple(row.values()) for row in found.to_pylist()] == [(1, "a", None, 120), (1, "b", "c", None)]


def test_a_table_is_read_whose_name_another_one_had_before(tmp_path: Path) -> None:
    lake = UnservedLake(tmp_path, OF)
    lake.apply(Change("I", new=("1", "a"), commit_lsn=110))
    before = replace(OF, oid=8)
    archive = replace(before, table=TableName("public", "t_archive"))
    for of in (before, archive):
        lake.know(of)
    lake.receive(Change("I", new=("7", "z"), commit_lsn=120), of=archive)
    lake.receive(Change("I", new=("2", "b"), commit_lsn=130))
    assert sorted(lake.read(130)["id"].to_pylist()) == [1, 2]


def test_changes_of_another_table_with_the_name_are_noticed(tmp_path: Path) -> None:
    lake = UnservedLake(tmp_path, OF)
    lake.apply(Change("I", new=("1", "a"), commit_lsn=110))
    after = replace(OF, oid=8)
    lake.know(after)
    lake.receive(Change("I", new=("7", "z"), commit_lsn=120), of=after)
    with pytest.raises(DriftError, match="another made under its name"):
        lake.read(120)
