"""Readers of a lake table find, by any condition, the rows that PostgreSQL finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.lake.files.compaction import compact
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from tests.support import every_type
from tests.support.handed import Handed
from tests.support.readers import READERS, Condition, read_all_ways
from tests.support.replicated import execute
from tests.support.written_tables import WRITTEN, T, lake_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.thorough("the same test, merged; property/test_widened_text", "copied", "compacted", "widened")
def test_every_reader_finds_rows_by_each_type(
    dsn: str, tmp_path: Path, written: Callable[..., Handed]
) -> None:
    lake = written(dsn, tmp_path)
    assert_read_right(lake, every_type.conditions())


FAR = (
    "date '300000-01-01'",
    "timestamp '294246-12-31 23:59:59.999999'",
    "timestamptz '294246-12-31 00:00+00'",
)
EARLY = ("date '4714-11-24 BC'", "timestamp '4714-11-24 BC'", "timestamptz '4714-11-24 00:00+00 BC'")
JUST_BEYOND = ("date '10000-01-01'", "timestamp '10000-01-01'", "timestamptz '10000-01-01 00:00+00'")
NEAR = ("date '2024-05-01'", "timestamp '2024-05-01'", "timestamptz '2024-05-01 00:00+00'")
DATED = "create table t (id int primary key, c_date date, c_ntz timestamp, c_tz timestamptz, n int)"
MOMENTS = ("2024-05-01", "2024-05-01 00:00:00", "2024-05-01 00:00:00")
DATED_CONDITIONS = [
    *(
        (column, operator, text)
        for column, text in zip(("c_date", "c_ntz", "c_tz"), MOMENTS, strict=True)
        for operator in ("=", "<", ">=")
    ),
    *((column, "is null", "") for column in ("c_date", "c_ntz", "c_tz", "n")),
    ("n", "=", "5"),
]


def dated(row_id: int, values: tuple[str, ...], n: str = "5") -> str:
    return f"insert into t values ({row_id}, {', '.join(values)}, {n})"


def assert_read_right(lake: Handed, conditions: list[Condition]) -> None:
    uri = lake.lake_path(T)
    with lake.source() as source:
        expected = [every_type.ids_in(source, condition) for condition in conditions]
    found = read_all_ways({uri: conditions})[uri]
    wrong = {
        (reader, *condition): (ids, right)
        for reader in READERS
        for condition, ids, right in zip(conditions, found[reader], expected, strict=True)
        if ids != right
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("odd", "history"),
    [
        (FAR, True),
        *(pytest.param(odd, False, marks=pytest.mark.thorough("FAR")) for odd in (FAR, EARLY, JUST_BEYOND)),
    ],
)
def test_moments_far_out_are_streamed_merged_compacted_and_found(
    dsn: str, tmp_path: Path, odd: tuple[str, ...], history: bool
) -> None:
    lake = Handed(dsn, tmp_path, (T,), history=history)
    execute(dsn, DATED, dated(1, NEAR), dated(2, NEAR, "null"))
    relation = lake.copy(T)
    for statement in (
        dated(3, odd),
        "update t set n = 7 where id < 3",
        "update t set n = 8 where id = 3",
        f"update t set c_date = {odd[0]} where id = 1",
        dated(4, ("null", "null", "null"), "null"),
    ):
        execute(dsn, statement)
        result = lake.stream(relation)
        assert result.error is None, result
    assert_read_right(lake, DATED_CONDITIONS)
    compact(open_table(lake.lake_path(T)), app_id(lake.pipeline.name, Epoch(1)), at_least=1)
    assert_read_right(lake, DATED_CONDITIONS)


@pytest.mark.parametrize("odd", [FAR, JUST_BEYOND])
@pytest.mark.thorough("test_moments_far_out_are_streamed_merged_compacted_and_found")
def test_a_copy_with_moments_far_out_can_be_merged_into(
    dsn: str, tmp_path: Path, odd: tuple[str, ...]
) -> None:
    lake = lake_of(dsn, tmp_path)
    execute(dsn, DATED, dated(1, NEAR), dated(2, odd))
    relation = lake.copy(T)
    execute(dsn, "update t set n = 7", dated(3, odd), "delete from t where id = 1")
    result = lake.stream(relation)
    assert result.error is None, result
    assert_read_right(lake, DATED_CONDITIONS)


@pytest.mark.parametrize("odd", [FAR, EARLY])
@pytest.mark.thorough("test_moments_far_out_are_streamed_merged_compacted_and_found")
def test_a_key_may_be_of_moments_far_out(dsn: str, tmp_path: Path, odd: tuple[str, ...]) -> None:
    lake = lake_of(dsn, tmp_path)
    keyed = DATED.replace("id int primary key", "id int").replace(")", ", primary key (c_date, c_ntz, c_tz))")
    execute(dsn, keyed, dated(1, odd))
    relation = lake.copy(T)
    for statement in (
        dated(2, NEAR),
        "update t set id = id + 10",
        "update t set c_date = c_date + 1, c_tz = c_tz + interval '1 day' where id = 12",
        "delete from t where id = 11",
        dated(3, odd),
    ):
        execute(dsn, statement)
        result = lake.stream(relation)
        assert result.error is None, result
    assert_read_right(lake, DATED_CONDITIONS)
