"""Each lake table says of which columns all of its files have bounds."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import FencedError, OvertakenError
from airflow_provider_pgrepl.replication.lake.delta.commit import (
    bounded_columns,
    commit_nothing,
    commit_properties,
    narrow_bounds,
)
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import ParquetFiles
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.statistics import (
    MOST_COLUMNS,
    declared_columns,
    has_safe_bounds,
)
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table, read_position
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import SliceCommit
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch

APP = app_id("p", Epoch(1))
SCHEMA = pa.schema([("id", pa.int64()), ("d", pa.date32()), ("t", pa.string())])
NEAR, FAR = 19_000, 100_000_000


def rows(*days: int | None) -> pa.Table:
    ids, texts = range(len(days)), ["x"] * len(days)
    return pa.table([pa.array(ids), pa.array(days, pa.int32()).cast(pa.date32()), texts], schema=SCHEMA)


class Lake:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root / "t")

    def snapshot(self, *tables: pa.Table, position: int = 1, epoch: int = 1) -> None:
        schema = tables[0].schema if tables else SCHEMA
        written = []
        for table in tables:
            with ParquetFiles(str(self.root), "t", schema) as files:
                for batch in table.combine_chunks().to_batches():
                    files.write(batch)
                written += files.finish()
        commit_snapshot(self.uri, schema, written, LSN(position), "p", Epoch(epoch))

    def append(self, position: int, table: pa.Table) -> None:
        SliceCommit(open_table(self.uri), APP, LSN(position), None, 1).write(table, "append")

    def declared(self) -> list[str] | None:
        return declared_columns(open_table(self.uri))

    def as_of_an_earlier_version(self) -> None:
        """Remove the property, which earlier versions did not write."""
        first = self.root / "t" / "_delta_log" / f"{0:020}.json"
        actions = [json.loads(line) for line in first.read_text().splitlines()]
        for action in actions:
            action.get("metaData", {}).get("configuration", {}).pop("delta.dataSkippingStatsColumns", None)
        first.write_text("\n".join(map(json.dumps, actions)))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


@pytest.mark.parametrize(
    ("days", "declared"),
    [
        ([()], ["id", "d"]),
        ([(NEAR,), (NEAR, None), (None,)], ["id", "d"]),
        ([(NEAR,), (FAR,)], ["id"]),
        ([(-FAR // 100,)], ["id"]),
    ],
)
def test_a_snapshot_declares_what_all_its_files_have(lake: Lake, days, declared) -> None:
    lake.snapshot(*(rows(*some) for some in days))
    assert lake.declared() == declared


def test_a_value_without_bounds_takes_its_column_from_the_list_until_the_next_snapshot(lake: Lake) -> None:
    lake.snapshot(rows(NEAR))
    lake.append(2, rows(FAR))
    assert lake.declared() == ["id"]
    assert read_position(open_table(lake.uri), APP) == 2
    lake.append(3, rows(NEAR))
    assert lake.declared() == ["id"]
    lake.snapshot(rows(NEAR), position=4)
    assert lake.declared() == ["id", "d"]
    assert read_position(open_table(lake.uri), APP) == 4


def test_a_snapshot_of_another_epoch_narrows_before_it_replaces(lake: Lake) -> None:
    lake.snapshot(rows(NEAR))
    lake.snapshot(rows(FAR), position=5, epoch=2)
    assert lake.declared() == ["id"]
    table = open_table(lake.uri)
    assert (table.version(), read_position(table, app_id("p", Epoch(2)))) == (2, 5)


def test_a_table_of_an_earlier_version_is_made_to_say_it_with_its_next_commit(lake: Lake) -> None:
    lake.snapshot(rows(NEAR))
    lake.as_of_an_earlier_version()
    table = open_table(lake.uri)
    assert declared_columns(table) is None
    commit_nothing(table, APP, LSN(2), commit_properties(APP, LSN(2), "changes"))
    assert lake.declared() == ["id", "d"]


def test_table_from_earlier_version_declares_only_columns_bounded_in_all_files(lake: Lake) -> None:
    lake.snapshot(rows(NEAR), rows(FAR))
    lake.as_of_an_earlier_version()
    table = open_table(lake.uri)
    assert bounded_columns(table, APP) == ["id"] == lake.declared()


def test_stale_handle_cannot_narrow_bounds_or_append_after_narrowing(lake: Lake) -> None:
    lake.snapshot(rows(NEAR))
    stale = DeltaTable(lake.uri)
    lake.append(2, rows(NEAR))
    with pytest.raises(FencedError):
        narrow_bounds(stale, APP, [])
    stale = DeltaTable(lake.uri)
    narrow_bounds(open_table(lake.uri), APP, ["d"])
    with pytest.raises(OvertakenError):
        SliceCommit(stale, APP, LSN(3), None, 1).write(rows(NEAR), "append")


def test_names_of_any_kind_are_declared(lake: Lake) -> None:
    names = ["id", "a.b", "a,b", "a`b", "größe", 'odd "name"', "1", " x "]
    table = pa.table({name: pa.array([1], pa.int32()) for name in names})
    lake.snapshot(table)
    assert lake.declared() == names


def test_a_wide_table_has_bounds_of_its_first_columns_and_of_our_own(lake: Lake) -> None:
    names = [*(f"c{index}" for index in range(50)), "_pgrepl_commit_lsn"]
    lake.snapshot(pa.table({name: pa.array([1], pa.int32()) for name in names}))
    assert lake.declared() == [*names[: MOST_COLUMNS - 1], "_pgrepl_commit_lsn"]


@pytest.mark.parametrize(
    ("values", "safe"),
    [
        (pa.array([date.min, date.max]), True),
        (pa.array([2932897], pa.int32()).cast(pa.date32()), False),
        (pa.array([-719163], pa.int32()).cast(pa.date32()), False),
        (pa.array([-62135596800000000, 253402300799999999]).cast(pa.timestamp("us", "UTC")), True),
        (pa.array([253402300800000000]).cast(pa.timestamp("us", "UTC")), False),
        (pa.array([2**63 - 1]).cast(pa.timestamp("us", "UTC")), False),
        (pa.array([None], pa.date32()), True),
        (pa.array([2**63 - 1, -(2**63)]), True),
        (pa.array(["x"]), False),
    ],
)
def test_bounds_are_safe_in_years_of_four_digits(values: pa.Array, safe: bool) -> None:
    assert has_safe_bounds(pa.chunked_array([values])) is safe
