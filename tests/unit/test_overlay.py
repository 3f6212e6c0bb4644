"""lake/time_travel: changes that are applied on top of a version, in a lake made without a server."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from airflow_provider_pgrepl.replication.lake.time_travel.as_of import arrow_view_as_of
from airflow_provider_pgrepl.replication.lake.time_travel.overlay import RowsByKey
from tests.support.changes import column
from tests.support.model import Change
from tests.support.unserved import UnservedLake, numbered

OF = numbered(column("id", "bigint", key=True), column("v"))


def test_rows_are_found_by_key_after_a_truncate_that_marks_the_others(tmp_path: Path) -> None:
    lake = UnservedLake(tmp_path, OF, deletes="soft")
    lake.apply(*(Change("I", new=(number, "a"), commit_lsn=110) for number in "12"))
    lake.receive(Change("T", new=("0",), commit_lsn=120), Change("I", new=("2", "b"), commit_lsn=130))
    plan = arrow_view_as_of(lake.pipeline, lsn=130).planner.plan(OF.table)
    found = RowsByKey(plan, ["id"], ["v"]).find(pa.table({"id": [1, 2]}))
    assert found.sort_by("id").to_pylist() == [{"id": 1, "v": "a"}, {"id": 2, "v": "b"}]
