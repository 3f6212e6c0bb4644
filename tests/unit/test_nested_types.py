"""Arrays, composites, ranges, domains, types of extensions: what is chosen, what is refused, and the lake."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import QueryBuilder

from airflow_provider_pgrepl.errors import ConfigError, ValueRangeError
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import ParquetFiles
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.lake.merge.merge import apply_changes
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, PgType, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.values import lake_schema, typed_column
from tests.support.changes import table_of
from tests.support.model import Change
from tests.unit.test_documents import listed_types

TABLE = TableName("public", "t")
INTEGER, TEXT, NUMERIC = PgType(23, name="int4"), PgType(25, name="text"), PgType(1700, name="numeric")
DATE, TIMESTAMP = PgType(1082, name="date"), PgType(1114, name="timestamp")
MONEY_LIKE = PgType(1700, ((10 << 16) | 2) + 4, "numeric")
BOX = PgType(603, name="box", delimiter=";")
MAP = PgType(90_001, name="hstore", extension="hstore")


def array(element: PgType) -> PgType:
    return PgType(90_002, element.typmod, "_" + element.name, "a", parts=(("element", element),))


def composite(**attributes: PgType) -> PgType:
    return PgType(90_003, name="pair", kind="c", parts=tuple(attributes.items()))


def domain(base: PgType) -> PgType:
    return PgType(90_004, name="dom", kind="d", parts=(("base", base),))


def range_(subtype: PgType) -> PgType:
    return PgType(90_005, name="some_range", kind="r", parts=(("subtype", subtype),))


def multirange(subtype: PgType) -> PgType:
    return PgType(90_006, name="many", kind="m", parts=(("range", range_(subtype)),))


def parse(of: PgType, *texts: str | None, **options: Any) -> pa.Array:
    column = Column("c", 1, of.oid, of.typmod, of.name, of.kind, type=of)
    pipeline = Pipeline(name="p", lake="/lake", tables=("public.t",), **options)
    return typed_column(column, TABLE, pipeline.options(TABLE)).parse(pa.array(texts, pa.large_string()))


def bounds(lower: Any, upper: Any, brackets: str = "[)") -> dict[str, Any]:
    return {
        "lower": lower,
        "upper": upper,
        "lower_inclusive": brackets[0] == "[",
        "upper_inclusive": brackets[1] == "]",
        "empty": False,
    }


EMPTY = {**bounds(None, None, "()"), "empty": True}
HELD = [
    (array(TEXT), '{a,NULL,"NULL","a\\"\\\\,",""}', ["a", None, "NULL", 'a"\\,', ""]),
    (array(INTEGER), "{}", []),
    (array(BOX), "{(1,1),(0,0);(2,2),(1,1)}", ["(1,1),(0,0)", "(2,2),(1,1)"]),
    (array(domain(array(INTEGER))), '{"{1,2}",NULL,"{}"}', [[1, 2], None, []]),
    (composite(a=INTEGER, b=TEXT, c=array(INTEGER)), '(1,"x ""y""",)', {"a": 1, "b": 'x "y"', "c": None}),
    (composite(a=TEXT), '("")', {"a": ""}),
    (composite(a=TEXT), "()", {"a": None}),
    (array(composite(a=INTEGER)), '{(1),NULL,"()"}', [{"a": 1}, None, {"a": None}]),
    (composite(), "()", "()"),
    (composite(a=INTEGER, A=INTEGER), "(1,2)", "(1,2)"),
    (domain(domain(INTEGER)), "7", 7),
    (range_(INTEGER), "[1,5)", bounds(1, 5)),
    (range_(INTEGER), "(,5]", bounds(None, 5, "(]")),
    (range_(INTEGER), "empty", EMPTY),
    (range_(TEXT), '["","a""b,"]', bounds("", 'a"b,', "[]")),
    (range_(TIMESTAMP), '["2024-01-01 00:00:00",)', bounds(datetime(2024, 1, 1), None)),  # noqa: DTZ001
    (multirange(INTEGER), "{[1,3),[5,)}", [bounds(1, 3), bounds(5, None)]),
    (multirange(TEXT), '{["]","a)"],(b,)}', [bounds("]", "a)", "[]"), bounds("b", None, "()")]),
    (multirange(INTEGER), "{}", []),
    (MAP, '"a"=>"1", "\\""=>NULL', [("a", "1"), ('"', None)]),
    (MAP, "", []),
    (PgType(90_007, name="vector", extension="vector"), "[1,-0.5,1e-05]", [1.0, -0.5, pytest.approx(1e-5)]),
    (PgType(90_008, name="geometry", extension="postgis"), "0101FF", b"\x01\x01\xff"),
    (PgType(90_009, name="citext", extension="citext"), "Ab", "Ab"),
    (PgType(90_010, name="mood", kind="e"), "so so", "so so"),
    (PgType(22, name="int2vector", kind="a", parts=(("element", INTEGER),)), "1 2", "1 2"),
]


@pytest.mark.parametrize(
    ("of", "text", "value"), HELD, ids=lambda it: it.name if isinstance(it, PgType) else ""
)
def test_a_value_is_held_between_nulls(of, text, value):
    assert parse(of, None, text, None).to_pylist() == [None, value, None]
    assert parse(of).to_pylist() == []


@pytest.mark.parametrize(
    ("of", "text", "said"),
    [
        (array(INTEGER), "{{1,2}}", "more dimensions"),
        (array(INTEGER), "[0:0]={7}", "first index"),
        (array(INTEGER), "{7,}", "does not write"),
        (array(INTEGER), "{7", "does not write"),
        (array(INTEGER), "{x}", "does not write"),
        (array(TEXT), '{"a"b}', "does not write"),
        (array(MONEY_LIKE), "{NaN}", "NaN"),
        (composite(a=INTEGER, b=INTEGER), "(7)", "attributes"),
        (composite(a=INTEGER, b=INTEGER), "(7,8,9)", "attributes"),
        (composite(a=INTEGER), "7", "does not write"),
        (range_(INTEGER), "[7,8", "does not write"),
        (range_(DATE), "[2024-01-01,infinity)", "as the bound of a range"),
        (multirange(INTEGER), "{7}", "does not write"),
        (MAP, '"a"=>"b" "c"=>"d"', "does not write"),
        (MAP, '"a"=>"b', "does not write"),
        (PgType(90_007, name="vector", extension="vector"), "[1,NULL]", "does not write"),
    ],
)
def test_unsupported_nested_value_raises_range_error_without_showing_value(of, text, said):
    with pytest.raises(ValueRangeError, match=said) as caught:
        parse(of, None, text)
    assert caught.value.hint
    assert text not in str(caught.value)
    assert caught.value.__context__ is None


EXTENSIONS = {
    "isbn": "isn",
    "halfvec": "vector",
    "sparsevec": "vector",
    "geometry": "postgis",
    "geography": "postgis",
}
LISTED = {
    "integer[]": array(INTEGER),
    "composite": composite(a=INTEGER, b=TEXT),
    "domain": domain(INTEGER),
    "enum": PgType(90_010, name="mood", kind="e"),
    "int4range": range_(INTEGER),
    "int4multirange": multirange(INTEGER),
}


def test_types_without_a_fixed_oid_look_as_the_list_of_types_says():
    listed = {name: shown for name, oid, shown in listed_types() if oid is None}
    assert set(LISTED) <= set(listed)
    for name, shown in listed.items():
        of = LISTED.get(name) or PgType(90_011, name=name, extension=EXTENSIONS.get(name, name))
        assert str(parse(of).type) == shown, name


def test_choices_of_a_column_hold_for_what_is_within_it():
    null = {"infinity": "null", "numeric_nan": "null"}
    assert parse(array(DATE), "{infinity,1970-01-02}", **null).cast(pa.list_(pa.int32())).to_pylist() == [
        [None, 1]
    ]
    assert parse(composite(n=MONEY_LIKE), "(NaN)", **null).to_pylist() == [{"n": None}]
    assert parse(array(NUMERIC), "{1.5}", unconstrained_numeric="decimal(38,2)").type == pa.list_(
        pa.decimal128(38, 2)
    )
    assert parse(array(TIMESTAMP), "{infinity}", timestamp_without_tz="string").to_pylist() == [["infinity"]]
    with pytest.raises(ValueRangeError, match="bound of a range"):  # there null would say that there is none
        parse(range_(DATE), "[infinity,)", **null)


def test_arrays_of_more_dimensions_are_lists_of_lists_by_choice():
    two = {"types": {"public.t.c": "array(2)"}}
    rows = parse(array(TEXT), '{{a,"}\\"{"},{NULL,""}}', None, "{}", **two)
    assert rows.to_pylist() == [[["a", '}"{'], [None, ""]], None, []]
    assert parse(domain(array(INTEGER)), "{{1},{2}}", **two).to_pylist() == [[[1], [2]]]
    for other in ("{1,2}", "{{{1}}}", "[2:2][1:1]={{1}}"):
        with pytest.raises(ValueRangeError, match=r"dimensions|first index"):
            parse(array(INTEGER), other, **two)
    with pytest.raises(ConfigError, match="only arrays can"):
        parse(INTEGER, **two)


def test_any_column_is_its_exact_text_by_choice():
    assert parse(array(INTEGER), "[2:3]={1,2}", types={"public.t.c": "string"}).to_pylist() == ["[2:3]={1,2}"]


KEYS = {
    "array": (array(TEXT), "{a,NULL}", '{"",b}', "{}"),
    "two": (composite(a=INTEGER, b=TEXT), "(1,)", '(1,"")', "(,x)"),
    "range": (range_(INTEGER), "[1,5)", "(,5)", "empty"),
    "multirange": (multirange(INTEGER), "{[1,5)}", "{[1,5),[7,)}", "{}"),
    "map": (MAP, '"a"=>"1", "b"=>NULL', '"a"=>"1"', ""),
}


class Lake:
    """A table with one column of each kind, the key among them."""

    def __init__(self, root: Path, key: str = "id") -> None:
        types = {"id": INTEGER, **{name: of for name, (of, *_) in KEYS.items()}, "ntz": array(TIMESTAMP)}
        columns = (
            Column(name, number, of.oid, -1, of.name, of.kind, is_key=name == key, type=of)
            for number, (name, of) in enumerate(types.items(), 1)
        )
        self.relation = Relation(7, TABLE, tuple(columns))
        self.pipeline = Pipeline(name="p", lake=str(root), tables=("public.t",))
        self.uri = str(root / "public" / "t")
        commit_snapshot(
            self.uri,
            lake_schema(self.relation, self.pipeline.options(self.relation.table)),
            [],
            LSN(1),
            "p",
            Epoch(1),
        )

    def row(self, number: int) -> tuple[str, ...]:
        return (str(number), *(texts[number] for _, *texts in KEYS.values()), "{2024-01-01 00:00:00,NULL}")

    def apply(self, *changes: Change) -> None:
        apply_changes(
            open_table(self.uri),
            table_of(changes),
            self.relation,
            self.pipeline.options(TABLE),
            app_id("p", Epoch(1)),
            self.pipeline.slice_bytes,
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return the lake's rows in the order of `id`."""
        sql = "select * from t order by id"
        return pa.table(
            QueryBuilder().register("t", open_table(self.uri)).execute(sql).read_all()
        ).to_pylist()

    def typed(self, row: tuple[str | None, ...]) -> dict[str, Any]:
        columns = (
            typed_column(column, TABLE, self.pipeline.options(TABLE)) for column in self.relation.columns
        )
        return {
            column.name: column.parse(pa.array([text])).to_pylist()[0]
            for column, text in zip(columns, row, strict=True)
        }


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith("_pgrepl")} for row in rows]


def test_nested_values_are_merged_and_unchanged_ones_stay(tmp_path):
    lake = Lake(tmp_path)
    first, second, third = (lake.row(number) for number in range(3))
    lake.apply(Change("I", new=first, commit_lsn=10), Change("I", new=second, commit_lsn=10))
    unchanged = tuple(range(1, len(first)))
    lake.apply(
        Change("U", new=("0", *third[1:]), commit_lsn=20),
        Change(
            "U",
            new=("9", *([None] * len(unchanged))),
            old=("1", *([None] * len(unchanged))),
            unchanged=unchanged,
            commit_lsn=30,
        ),
        Change("I", new=third, commit_lsn=40),
    )
    expected = [("0", *third[1:]), third, ("9", *second[1:])]
    assert shown(lake.rows()) == [lake.typed(row) for row in expected]


@pytest.mark.parametrize("key", list(KEYS))
def test_rows_are_found_by_a_nested_key(tmp_path, key):
    lake = Lake(tmp_path, key)
    rows = [lake.row(number) for number in range(3)]
    at = [column.name for column in lake.relation.columns].index(key)

    def keyed(row: tuple[str, ...]) -> tuple[str | None, ...]:
        return tuple(text if index == at else None for index, text in enumerate(row))

    lake.apply(*(Change("I", new=row, commit_lsn=10) for row in rows))
    swapped = [(str(number + 5), *rows[other][1:]) for number, other in enumerate((1, 0))]
    lake.apply(
        Change("D", old=keyed(rows[2]), commit_lsn=20),
        Change("U", new=(rows[0][0], *rows[2][1:]), old=keyed(rows[0]), commit_lsn=20),
        Change("U", new=swapped[1], old=keyed(rows[1]), commit_lsn=20),
        Change("U", new=swapped[0], old=keyed(rows[2]), commit_lsn=20),
    )
    assert shown(lake.rows()) == [lake.typed(row) for row in swapped]


def test_files_with_nested_columns_tell_the_bounds_of_plain_ones(tmp_path):
    schema = pa.schema(
        [
            ("m", pa.map_(pa.string(), pa.string())),
            ("a.b", pa.int32()),
            ("s", pa.struct([("z", pa.int64())])),
            ("z", pa.int64()),
        ]
    )
    batch = pa.record_batch([[[("k", "v")], None], [1, 2], [{"z": 99}, {"z": 98}], [7, None]], schema=schema)
    with ParquetFiles(str(tmp_path), "t", schema) as files:
        files.write(batch)
        (file,) = files.finish()
    assert json.loads(file.stats_json) == {
        "numRecords": 2,
        "minValues": {"a.b": 1, "z": 7},
        "maxValues": {"a.b": 2, "z": 7},
        "nullCount": {"a.b": 0, "z": 1},
    }


def test_a_table_taken_anew_may_gain_times_without_zone_within_a_list(tmp_path):
    uri = str(tmp_path / "t")
    for position, of in enumerate((pa.int32(), pa.struct([("at", pa.list_(pa.timestamp("us")))])), 1):
        commit_snapshot(uri, pa.schema([("c", of)]), [], LSN(position), "p", Epoch(1))
    assert "timestampNtz" in open_table(uri).protocol().writer_features
