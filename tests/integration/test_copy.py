"""A range of a real table becomes Parquet files that hold exactly its rows."""

from __future__ import annotations

import io
import traceback
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, Schema
from deltalake.transaction import AddAction, create_table_with_add_actions

from airflow_provider_pgrepl.errors import LakeError, SourceError, ValueRangeError
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import WrittenFile
from airflow_provider_pgrepl.replication.lake.snapshot.csv import read_csv
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import CopyJob, write_range
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.copy import copy_stream
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange, plan_ranges
from airflow_provider_pgrepl.replication.storage import open_storage

POSITION = LSN.parse("1/2")
EXPORTED_AT = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
TABLE = TableName("public", "t")


class Copier:
    """Copies public.t as it is now."""

    def __init__(self, dsn: str, lake: Path) -> None:
        self.dsn = dsn
        self.pipeline = Pipeline(name="p", lake=str(lake), tables=("public.t",))
        self.root = lake / TABLE.path

    @contextmanager
    def snapshot(self) -> Any:
        keeper = connect(self.dsn, "keeper")
        with keeper.cursor() as cursor:
            cursor.execute("begin isolation level repeatable read read only")
            cursor.execute("select pg_export_snapshot()")
            yield keeper, cursor.fetchone()[0]
        keeper.close()

    def copy(self, range_bytes: int = 1 << 40) -> list[WrittenFile]:
        with self.snapshot() as (keeper, name):
            relation = find_relation(keeper, TABLE)
            return [
                file
                for part in plan_ranges(keeper, relation, range_bytes)
                for file in self.write(name, part, relation)
            ]

    def write(self, snapshot: str, part: CopyRange, relation: Relation) -> list[WrittenFile]:
        options, root = self.pipeline.options(relation.table), self.pipeline.lake_root
        return write_range(self.dsn, snapshot, part, relation, options, root, POSITION, EXPORTED_AT)

    def read(self, files: list[WrittenFile]) -> pa.Table:
        return pa.concat_tables([pq.ParquetFile(self.root / file.path).read() for file in files])

    def on_disk(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("*")) if self.root.exists() else []


@pytest.fixture
def copier(dsn, tmp_path):
    return Copier(dsn, tmp_path / "lake")


def _run(pg, *statements):
    with pg.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def test_ranges_together_hold_each_row_once_with_the_snapshots_position(pg, copier):
    _run(
        pg,
        "create table t (id bigint primary key, a numeric(12,2), s text, b boolean, at timestamptz)",
        "insert into t select i, i / 7.0, 'it''s \"' || i, i % 2 = 0,"
        " '2024-01-01'::timestamptz + i * interval '1 s' from generate_series(1, 50000) i",
        "vacuum t",
    )
    files = copier.copy(range_bytes=1 << 20)
    assert len(files) > 1
    table = copier.read(files)
    assert sorted(table["id"].to_pylist()) == list(range(1, 50001))
    assert set(table["_pgrepl_commit_lsn"].to_pylist()) == {int(POSITION)}
    assert set(table["_pgrepl_commit_ts"].to_pylist()) == {EXPORTED_AT}
    assert table.schema.field("at").type == pa.timestamp("us", "UTC")
    assert table.schema.field("a").type == pa.decimal128(12, 2)
    assert [file.size for file in files] == [(copier.root / file.path).stat().st_size for file in files]
    assert sum(file.rows for file in files) == 50000


def test_rows_written_after_the_snapshot_are_not_copied(pg, copier):
    _run(pg, "create table t (id int)", "insert into t values (1)")
    with copier.snapshot() as (keeper, name):
        keeper.cursor().execute("select 1")
        relation = find_relation(keeper, TABLE)
        (part,) = plan_ranges(keeper, relation, 1 << 40)
        _run(pg, "insert into t values (2)", "delete from t where id = 1")
        files = copier.write(name, part, relation)
    assert copier.read(files)["id"].to_pylist() == [1]


def test_ranges_estimate_rows_after_analyze_and_none_before_it_or_with_a_row_filter(pg, copier, monkeypatch):
    def planned():
        with copier.snapshot() as (keeper, _):
            ranges = plan_ranges(keeper, find_relation(keeper, TABLE), 1 << 20)
            return [part.rows for part in ranges], sum(part.bytes for part in ranges)

    _run(pg, "create table t (id int, s text) with (autovacuum_enabled = off)")
    assert planned()[0] == [0]
    _run(pg, "insert into t select i, repeat('x', 100) from generate_series(1, 50000) i")
    rows, size = planned()
    assert len(rows) > 1
    assert set(rows) == {None}
    _run(pg, "analyze t")
    rows, _ = planned()
    assert abs(sum(rows) - 50_000) < len(rows)
    with pg.cursor() as cursor:
        cursor.execute("select pg_table_size('t')")
        assert abs(size - cursor.fetchone()[0]) < len(rows)
    monkeypatch.setattr(copy_stream, "_row_filter", lambda *_: "id > 0")
    assert set(planned()[0]) == {None}


def test_an_empty_table_gives_no_file(pg, copier):
    _run(pg, "create table t (id int)")
    assert copier.copy() == []
    assert copier.on_disk() == []


def test_nulls_of_a_one_column_table_are_rows(pg, copier):
    _run(pg, "create table t (s text)", "insert into t values (null), (''), (null), ('x'), (' '), (null)")
    assert copier.read(copier.copy())["s"].to_pylist() == [None, "", None, "x", " ", None]


def test_a_byte_order_mark_at_the_very_start_is_kept(pg, copier):
    _run(pg, "create table t (s text)", "insert into t values (U&'\\FEFFmarked'), (U&'\\FEFF')")
    assert copier.read(copier.copy())["s"].to_pylist() == ["\ufeffmarked", "\ufeff"]


def test_rows_longer_than_a_block_are_read_whole(pg, copier):
    _run(
        pg,
        "create table t (id int, s text)",
        "insert into t select i, repeat('ab\n\"', i * 500000) from generate_series(0, 6) i",
    )
    files = copier.copy()
    assert copier.read(files)["s"].to_pylist() == ['ab\n"' * (i * 500000) for i in range(7)]
    assert copier.on_disk() == [file.path for file in files]


def test_many_blocks_with_quotes_and_newlines_split_nowhere(pg, copier):
    _run(
        pg,
        "create table t (id int, s text)",
        "insert into t select i, repeat(E'a\n,\"', i % 60) from generate_series(1, 200000) i",
    )
    table = copier.read(copier.copy())
    assert table.num_rows == 200000
    rows = dict(zip(table["id"].to_pylist(), table["s"].to_pylist(), strict=True))
    assert rows == {i: 'a\n,"' * (i % 60) for i in range(1, 200001)}


def test_dates_that_arrow_cannot_read_are_copied_exactly(pg, copier):
    _run(
        pg,
        "create table t (d date, at timestamp)",
        "insert into t values ('2024-01-01', '2024-01-01 00:00:00.5'),"
        " ('0044-03-15 BC', '0044-03-15 12:00 BC'),"
        " ('5874897-12-31', '12024-01-01'), (null, null)",
    )
    table = copier.read(copier.copy())
    assert table["d"].cast(pa.int32()).to_pylist() == [19723, -735160, 2145042905, None]
    assert table["at"].cast(pa.int64()).to_pylist() == [
        1704067200500000,
        -735160 * 86_400_000_000 + 43_200_000_000,
        3672148 * 86_400_000_000,
        None,
    ]


@pytest.mark.parametrize(
    ("type_sql", "value", "said"),
    [
        ("numeric(10,2)", "NaN", "NaN or infinity"),
        ("date", "infinity", "infinity"),
        ("timestamptz", "-infinity", "infinity"),
        ("timestamp", "294276-12-31 23:59:59.999999", "after 294247"),
    ],
)
@pytest.mark.thorough(
    "the same test, of other types; each in unit/test_values.py",
    "date-infinity-infinity",
    "timestamptz--infinity-infinity",
    "numeric(10,2)-NaN-NaN or infinity",
)
def test_a_value_the_lake_cannot_hold_is_named_without_being_shown_and_leaves_no_file(
    pg, copier, type_sql, value, said
):
    _run(
        pg,
        f"create table t (id int, secret text, v {type_sql})",
        "insert into t select i, 'sesame', null from generate_series(1, 300000) i",
        f"insert into t values (0, 'sesame', '{value}')",
    )
    with pytest.raises(ValueRangeError) as caught:
        copier.copy()
    shown = "".join(traceback.format_exception(caught.value))
    assert 'column "v" of public.t' in shown
    assert said in caught.value.message
    assert "sesame" not in shown
    assert "23:59" not in shown
    assert copier.on_disk() == []


def test_bytes_that_are_not_utf8_name_their_column_only(copier):
    relation = Relation(1, TABLE, (Column("id", 1, 23, -1, "integer"), Column("s", 2, 25, -1, "text")))
    stream = io.BytesIO(b"1,sesame\xff\n")
    with pytest.raises(ValueRangeError, match=r'column "s" of public\.t \(text\).*not UTF-8') as caught:
        list(read_csv(stream, relation, copier.pipeline.options(relation.table), as_text=True))
    assert "sesame" not in "".join(traceback.format_exception(caught.value))


def test_a_copy_that_fails_half_way_leaves_no_file(pg, copier):
    _run(pg, "create table t (id int)", "insert into t select * from generate_series(1, 600000)")
    with copier.snapshot() as (keeper, name):
        relation = find_relation(keeper, TABLE)
        sql = "copy (select 600000 / (600000 - id) from only public.t) to stdout (format csv)"
        broken = CopyRange(relation.oid, TABLE, sql, 1)
        with pytest.raises(SourceError):
            copier.write(name, broken, relation)
    assert copier.on_disk() == []


def test_a_copy_with_other_columns_than_the_relation_is_refused(pg, copier):
    _run(pg, "create table t (id int, s text)", "insert into t values (1, 'sesame')")
    with copier.snapshot() as (keeper, name):
        relation = find_relation(keeper, TABLE)
        other = CopyRange(
            relation.oid, TABLE, "copy (select id, s, s from public.t) to stdout (format csv)", 1
        )
        with pytest.raises(SourceError) as caught:
            copier.write(name, other, relation)
    assert "sesame" not in "".join(traceback.format_exception(caught.value))
    assert copier.on_disk() == []


def test_a_lake_that_cannot_be_written_is_named(pg, copier, tmp_path):
    _run(pg, "create table t (id int)", "insert into t values (1)")
    (tmp_path / "lake").write_text("a file where the lake should be")
    with pytest.raises(LakeError, match="cannot write under"):
        copier.copy()


def test_unknown_kinds_of_lakes_are_refused():
    with pytest.raises(LakeError, match="cannot be opened"):
        open_storage("gopher://somewhere/lake")


def test_delta_readers_skip_by_the_statistics_and_find_every_row(pg, copier):
    _run(
        pg,
        "create table t (id bigint, d date, at timestamptz, f float8, s text)",
        "insert into t select i, date '2024-01-01' + i,"
        " '2024-01-01'::timestamptz + i * interval '1.000001 s',"
        " case when i = 3 then 'NaN'::float8 else i end, null from generate_series(1, 100) i",
    )
    files = copier.copy()
    schema = pq.read_schema(copier.root / files[0].path)
    adds = [AddAction(file.path, file.size, {}, 0, True, file.stats_json) for file in files]
    create_table_with_add_actions(str(copier.root), Schema.from_arrow(schema), adds)
    query = QueryBuilder().register("t", DeltaTable(str(copier.root)))
    for condition in (
        "id = 100",
        "d = date '2024-04-10'",
        "at = timestamp '2024-01-01 00:01:40.000100Z'",
        "f = 100",
        "at > timestamp '2024-01-01 00:01:40.000099Z'",
    ):
        assert pa.table(query.execute(f"select id from t where {condition}").read_all())[
            "id"
        ].to_pylist() == [100]
    assert pa.table(query.execute("select count(*) n from t where s is null").read_all())[
        "n"
    ].to_pylist() == [100]


def test_range_whose_check_fails_is_copied(pg, copier, monkeypatch):
    """Here the check takes longer than a copy may send nothing."""
    _run(pg, "create table t (id int)", "insert into t select generate_series(1, 100)")
    with copier.snapshot() as (keeper, name):
        relation = find_relation(keeper, TABLE)
        (part,) = plan_ranges(keeper, relation, 1 << 40)
        earlier = replace(part, copied=part.as_copied(100, 3), check="SELECT pg_catalog.pg_sleep(600)")
        options, root = copier.pipeline.options(TABLE), copier.pipeline.lake_root
        job = CopyJob(copier.dsn, name, relation, options, root, POSITION, EXPORTED_AT)
        monkeypatch.setattr(copy_stream, "STALL_LIMIT_S", 3.0)
        outcome = job.copy(0, earlier)
    assert outcome.error is None
    assert sum(file.rows for file in outcome.result) == 100
