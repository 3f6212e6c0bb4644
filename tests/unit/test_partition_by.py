"""The option `partition_by`: its syntax, the columns that it may name, and the partitions of rows."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import ConfigError, TableError
from airflow_provider_pgrepl.replication.drift import DriftKind
from airflow_provider_pgrepl.replication.drift.judge import compare_catalog
from airflow_provider_pgrepl.replication.postgres.relation import Column, PgType, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline, changed_options, copied_options
from airflow_provider_pgrepl.replication.settings.tables import PARTITION, PartitionBy
from airflow_provider_pgrepl.replication.values import lake_schema, option_problems, partitioning
from tests.support.changes import column, relation

OF = relation(
    column("id", "bigint", key=True),
    column("region"),
    column("paid", "boolean"),
    column("day", "date"),
    column("at", "timestamp with time zone"),
    column("local", "timestamp without time zone"),
    column("price", "numeric(9,2)"),
    column("raw", "bytea"),
    column("ref", "uuid"),
)
OF = replace(OF, columns=tuple(replace(c, attnum=n) for n, c in enumerate(OF.columns, start=1)))


def pipeline(by: object, **more: object) -> Pipeline:
    fields = {
        "name": "p",
        "lake": "/l",
        "tables": ["public.t"],
        "per_table": {"public.t": {"partition_by": by}},
    }
    return Pipeline.from_json(json.dumps(fields | more))


def problems(by: str, of: Relation = OF, **more: object) -> list[str]:
    return list(option_problems(of, pipeline(by, **more).options(of.table)))


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("region", PartitionBy("region")),
        ("month(at)", PartitionBy("at", "month")),
        (" year ( at ) ", PartitionBy("at", "year")),
        ('day("Placed at")', PartitionBy("Placed at", "day")),
        ('"month(at)"', PartitionBy("month(at)")),
        ('"a ""quoted"" one"', PartitionBy('a "quoted" one')),
        ("with space", PartitionBy("with space")),
    ],
)
def test_a_column_or_a_unit_of_one_is_read_and_shown_as_it_was_meant(text: str, meant: PartitionBy) -> None:
    assert PartitionBy.parse(text) == meant
    assert PartitionBy.parse(str(meant)) == meant


@pytest.mark.parametrize(
    "text", ["", "hour(at)", "month()", "month(at", "at)", "month(day(at))", '"at', 'a"b']
)
def test_malformed_partition_by_is_rejected_with_example_in_hint(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^per_table\[\"public\.t\"\]\.partition_by: ") as caught:
        pipeline(text)
    assert "month(placed_at)" in caught.value.hint


@pytest.mark.parametrize("given", [["region"], 5, True, {}])
def test_it_is_a_text(given: object) -> None:
    with pytest.raises(ConfigError, match="must be a string or null"):
        pipeline(given)


def test_it_is_said_of_single_tables_only() -> None:
    with pytest.raises(ConfigError, match=r"^partition_by: unknown key") as caught:
        Pipeline.from_dict({"name": "p", "lake": "/l", "tables": ("public.t",), "partition_by": "region"})
    assert "per_table" in caught.value.hint


def test_null_is_none() -> None:
    assert pipeline(None).options(OF.table).policy.partition is None
    assert PARTITION not in lake_schema(OF, pipeline(None).options(OF.table)).names


@pytest.mark.parametrize(
    "by", ["id", "region", "paid", "day", "ref", "year(day)", "month(at)", "day(local)", "day(at)"]
)
def test_the_lake_table_gets_one_column_more(by: str) -> None:
    assert problems(by) == []
    options = pipeline(by).options(OF.table)
    plain = lake_schema(OF, pipeline(None).options(OF.table))
    assert lake_schema(OF, options) == plain.append(pa.field(PARTITION, pa.string()))


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ("gone", "partition_by names column gone, which the table does not have"),
        ("price", "partition_by: price: rows cannot be kept apart by whole values of type numeric(9,2)"),
        ("at", "write year(…), month(…) or day(…) of it"),
        ("raw", "rows cannot be kept apart by whole values of type bytea"),
        ("month(region)", "partition_by: month(region): text has no month"),
        ("day(id)", "bigint has no day"),
    ],
)
def test_preflight_says_what_is_wrong_with_a_column_and_what_to_do(by: str, said: str) -> None:
    (problem,) = problems(by)
    assert said in problem
    assert "change partition_by of the table in per_table" in problem
    with pytest.raises(TableError, match="partition_by") as caught:
        lake_schema(OF, pipeline(by).options(OF.table))
    assert "pgrepl snapshot FILE.json --tables 'public.t'" in caught.value.hint


def test_preflight_tells_of_a_column_that_is_left_out_or_has_become_a_text() -> None:
    (excluded,) = problems("region", exclude_columns=["public.t.region"])
    assert "which exclude_columns leaves out" in excluded
    (text,) = problems("month(local)", timestamp_without_tz="string")
    assert "the column's lake type is string, which has no month" in text
    assert problems("day", text_columns=["public.t.day"]) == []
    generated = replace(OF, columns=OF.columns[:1], unpublished=OF.columns[1:2])
    assert "whose values the publication does not carry" in problems("region", generated)[0]


def test_a_domain_is_what_it_is_made_of_and_an_enum_may_be_used() -> None:
    def of(kind: PgType) -> Relation:
        return relation(
            column("id", "bigint", key=True), Column("x", 2, kind.oid, -1, "x", kind.kind, type=kind)
        )

    enum = PgType(50_000, name="mood", kind="e", labels=((1, "sad"),))
    day = PgType(50_001, name="workday", kind="d", parts=(("base", PgType(1082)),))
    price = PgType(50_002, name="price", kind="d", parts=(("base", PgType(1700)),))
    assert problems("x", of(enum)) == problems("x", of(day)) == problems("month(x)", of(day)) == []
    assert len(problems("x", of(price))) == 1


@pytest.mark.parametrize("by", [None, "id"])
def test_no_column_of_the_source_may_have_the_name_of_ours(by: str | None) -> None:
    of = relation(column("id", "bigint", key=True), column("_pgrepl_Partition"))
    options = pipeline(by).options(of.table)
    (problem,) = option_problems(of, options)
    assert problem.startswith(
        "column _pgrepl_partition has the name of one that the lake uses itself; rename"
    )
    with pytest.raises(TableError):
        lake_schema(of, options)
    assert problems(by, of, exclude_columns=["public.t._pgrepl_Partition"]) == []


def test_a_dropped_column_stops_the_table_with_the_way_out() -> None:
    options = pipeline("region").options(OF.table)
    current = replace(OF, columns=tuple(c for c in OF.columns if c.name != "region"))
    verdict = compare_catalog(OF, current, options)
    assert verdict.kind is DriftKind.UNSAFE
    assert verdict.reason == (
        "partition_by names column region, which was dropped: change partition_by of the table in per_table,"
        " or take it out"
    )
    assert verdict.hint.startswith("resnapshot it: pgrepl snapshot FILE.json --tables 'public.t'")
    assert not verdict.remedy.allows_retry
    assert compare_catalog(OF, current, pipeline("id").options(OF.table)).kind is DriftKind.SAFE


def test_a_renamed_or_retyped_column_stops_the_table() -> None:
    options = pipeline("region").options(OF.table)
    for other in (
        replace(OF.columns[1], name="area"),
        replace(OF.columns[1], type_oid=17, type_name="bytea"),
    ):
        current = replace(OF, columns=(OF.columns[0], other, *OF.columns[2:]))
        assert compare_catalog(OF, current, options).kind is DriftKind.UNSAFE


def test_a_wider_type_goes_on() -> None:
    narrow = replace(OF.columns[0], type_oid=23, type_name="integer")
    of, options = replace(OF, columns=(narrow, *OF.columns[1:])), pipeline("id").options(OF.table)
    assert compare_catalog(of, OF, options).kind is DriftKind.SAFE


def test_another_choice_for_a_table_that_is_there_waits_for_a_resnapshot() -> None:
    copied, running = pipeline("region"), pipeline("month(at)")
    assert copied_options(running, copied.to_json(), OF.table).policy.partition_by == "region"
    assert changed_options(running, copied.to_json(), OF.table) == ["partition_by"]
    assert changed_options(copied, copied.to_json(), OF.table) == []


def texts(by: str, values: list[object], kind: pa.DataType) -> list[str | None]:
    found = partitioning(OF, pipeline(by).options(OF.table))
    return found.texts(pa.chunked_array([pa.array(values, kind)])).to_pylist()


def test_partitions_are_the_texts_of_whole_values() -> None:
    assert texts("id", [1, -5, None], pa.int64()) == ["1", "-5", None]
    assert texts("paid", [True, False, None], pa.bool_()) == ["true", "false", None]
    assert texts("day", [0, None, 20_000], pa.date32()) == ["1970-01-01", None, "2024-10-04"]
    held = ["", None, "a/b=c%2F\n", " ", "__HIVE_DEFAULT_PARTITION__"]
    assert texts("region", held, pa.string()) == [None, None, "a/b=c%2F\n", " ", None]


def test_long_text_partition_is_truncated_to_64_bytes() -> None:
    long = ["x" * 65, "中" * 30, "é" * 33, "\U0001f600" * 16, "x" * 64]
    assert texts("region", long, pa.string()) == ["x" * 64, "中" * 21, "é" * 32, "\U0001f600" * 16, "x" * 64]
    assert texts("region", long, pa.large_string()) == texts("region", long, pa.string())


def test_days_of_any_era_have_their_partition() -> None:
    days = [-719_529, -719_528, -1, 0, None, 2_932_896, 2_932_897, 200_000_000, -1_000_000]
    kind = pa.date32()
    assert texts("year(day)", days, kind) == [
        *("-0001", "0000", "1969", "1970", None, "9999", "10000", "549551", "-0768")
    ]
    assert texts("month(day)", days, kind)[:4] == ["-0001-12", "0000-01", "1969-12", "1970-01"]
    assert texts("day(day)", days, kind)[:4] == ["-0001-12-31", "0000-01-01", "1969-12-31", "1970-01-01"]


def test_moments_are_of_the_day_that_it_is_in_utc() -> None:
    moments = [-1, 0, 86_400_000_000 - 1, None]
    assert texts("day(at)", moments, pa.timestamp("us", "UTC")) == [
        *("1969-12-31", "1970-01-01", "1970-01-01", None)
    ]
    assert texts("month(local)", moments, pa.timestamp("us")) == ["1969-12", "1970-01", "1970-01", None]


def test_no_values_have_no_partitions() -> None:
    assert texts("region", [], pa.string()) == texts("day(at)", [], pa.timestamp("us", "UTC")) == []


def test_sql_of_partitions_is_quoted_and_knows_that_an_empty_text_is_none() -> None:
    found = partitioning(OF, pipeline("region").options(OF.table))
    keys = pa.table({"region": ["it's", "a", "", "a"]})
    assert list(found.conditions(keys)) == [f"(t.{PARTITION} in ('a', 'it''s') or t.{PARTITION} is null)"]
    assert list(found.conditions(pa.table({"region": [""]}))) == [f"(t.{PARTITION} is null)"]
    assert list(found.conditions(pa.table({"id": [1]}))) == []
    assert list(found.conditions(pa.table({"region": [str(n) for n in range(1001)]}))) == []
