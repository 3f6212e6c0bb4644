"""Random rows of a changelog: relations of many types, changes of every kind, in several transactions."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.relations import KnownRelations
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, PgType, Relation
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions, LakeType, TableOptions
from airflow_provider_pgrepl.replication.values.text_output import DAY_US, moment_text

Texts = st.SearchStrategy[str]
ODD = '"\\\n\r\t\x01\x1f\x7f\x85\u2028\u2029\ud7ffé€💡/{}[],:;()= \u00a0'
_CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
TEXTS = (
    st.text(_CHARACTERS, max_size=8) | st.text(ODD, max_size=5) | st.sampled_from(["", "null", "NULL", "ok"])
)
FIRST_DAY, LAST_DAY = -719_162, 2_932_896
SINCE_1 = st.integers(FIRST_DAY * DAY_US, (LAST_DAY + 1) * DAY_US - 1)
MICROSECONDS = (
    SINCE_1
    | SINCE_1.map(lambda count: count // 10**6 * 10**6)
    | st.sampled_from(
        [FIRST_DAY * DAY_US, (LAST_DAY + 1) * DAY_US - 1, -1, 0, 1, 999_999, 1_000_000, -1_000_000]
    )
)
DAYS = st.integers(FIRST_DAY, LAST_DAY) | st.sampled_from([FIRST_DAY, LAST_DAY, -1, 0])
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)


def whole(bits: int) -> Texts:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return (st.integers(low, high) | st.sampled_from([low, high, 0, -1])).map(str)


def decimals(precision: int, scale: int) -> Texts:
    digits = st.integers(0, precision).flatmap(lambda size: st.integers(-(10**size) + 1, 10**size - 1))
    return digits.map(lambda number: f"{Decimal(number).scaleb(-scale):f}")


def floats(width: Any) -> Texts:
    odd = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    return st.floats(width=width).map(lambda number: odd.get(repr(number), repr(number)))


def in_array(element: Texts) -> Texts:
    def quoted(text: str | None) -> str:
        return "NULL" if text is None else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return st.lists(st.none() | element, max_size=3).map(lambda items: f"{{{','.join(map(quoted, items))}}}")


def in_record(*parts: Texts) -> Texts:
    def quoted(text: str | None) -> str:
        return "" if text is None else '"' + text.replace("\\", "\\\\").replace('"', '""') + '"'

    return st.tuples(*(st.none() | part for part in parts)).map(lambda row: f"({','.join(map(quoted, row))})")


def in_hstore(keys: Texts) -> Texts:
    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    def written(pairs: dict[str, str | None]) -> str:
        of = ((quoted(key), "NULL" if one is None else quoted(one)) for key, one in pairs.items())
        return ", ".join("=>".join(pair) for pair in of)

    return st.dictionaries(keys, st.none() | keys, max_size=2).map(written)


@dataclass(frozen=True)
class Type:
    """A type, texts of it, options that it may have, and texts that these, or Python, cannot hold."""

    of: PgType
    texts: Texts
    options: tuple[ColumnOptions, ...] = ()
    faulty: tuple[str, ...] = ()


def numeric(precision: int, scale: int) -> Type:
    of = PgType(1700, ((precision << 16) | scale) + 4, "numeric")
    return Type(of, decimals(precision, scale), (), ("NaN", "1" + "0" * 40))


def moments(oid: int, name: str, zone: str) -> Type:
    texts = MICROSECONDS.map(lambda count: moment_text(count, DAY_US, zone))
    faulty = (f"10000-01-01 00:00:00{zone}", f"0001-12-31 23:59:59.999999{zone} BC", "infinity")
    options = (ColumnOptions(infinity="null"), ColumnOptions(infinity="sentinel"))
    return Type(PgType(oid, -1, name), texts, options, faulty)


INTEGER, TEXT, JSONB = PgType(23, name="int4"), PgType(25, name="text"), PgType(3802, name="jsonb")
DECIMAL, ANY_NUMBER = PgType(1700, ((9 << 16) | 8) + 4, "numeric"), PgType(1700, name="numeric")
ZONED = moments(1184, "timestamptz", "+00")
JSON_TEXTS = st.builds(
    lambda document, is_ascii, indent: json.dumps(document, ensure_ascii=is_ascii, indent=indent),
    DOCUMENTS,
    st.booleans(),
    st.sampled_from([None, "\r\n", "\n", "\r"]),
)
AS_TEXT = ColumnOptions(lake_type=LakeType("string"))
TYPES = (
    Type(PgType(16, name="bool"), st.sampled_from(["t", "f"])),
    Type(PgType(21, name="int2"), whole(16), (AS_TEXT,)),
    Type(INTEGER, whole(32), (), ("x",)),
    Type(PgType(20, name="int8"), whole(64)),
    Type(PgType(26, name="oid"), st.integers(0, 2**32 - 1).map(str)),
    Type(PgType(700, name="float4"), floats(32)),
    Type(PgType(701, name="float8"), floats(64)),
    Type(TEXT, TEXTS),
    Type(TEXT, st.text("abc ", max_size=30)),
    Type(PgType(1042, 11, "bpchar"), TEXTS),
    Type(PgType(2950, name="uuid"), st.uuids().map(str)),
    Type(PgType(1186, name="interval"), st.sampled_from(["1 day 02:03:04", "-1 mons", "00:00:00"])),
    Type(PgType(17, name="bytea"), st.binary(max_size=5).map(lambda data: f"\\x{data.hex()}")),
    Type(PgType(790, name="money"), st.sampled_from(["$0.00", "-$1,234.50", "$92,233,720,368,547,758.07"])),
    Type(PgType(5069, name="xid8"), st.integers(0, 2**64 - 1).map(str)),
    *(numeric(*of) for of in ((12, 2), (38, 0), (38, 38), (20, 6), (20, 7), (38, 10))),
    Type(
        ANY_NUMBER,
        decimals(30, 9) | st.sampled_from(["NaN", "Infinity", "0", "0.00000000", "1" + "0" * 50]),
        (ColumnOptions(numeric_nan="null"),),
    ),
    Type(
        ANY_NUMBER,
        decimals(15, 9),
        (ColumnOptions(unconstrained_numeric=LakeType("decimal", 38, 12)),),
    ),
    Type(
        PgType(1082, name="date"), DAYS.map(lambda day: moment_text(day, 1)), (), ("10000-01-01", "infinity")
    ),
    moments(1114, "timestamp", ""),
    ZONED,
    Type(PgType(114, name="json"), JSON_TEXTS),
    Type(JSONB, JSON_TEXTS, (AS_TEXT,)),
    Type(PgType(90_001, name="mood", kind="e"), TEXTS),
    Type(PgType(90_002, name="_int4", kind="a", parts=(("element", INTEGER),)), in_array(whole(32))),
    Type(PgType(90_003, name="_text", kind="a", parts=(("element", TEXT),)), in_array(TEXTS)),
    Type(PgType(90_004, name="_jsonb", kind="a", parts=(("element", JSONB),)), in_array(JSON_TEXTS)),
    Type(
        PgType(90_005, name="_tz", kind="a", parts=(("element", ZONED.of),)),
        in_array(ZONED.texts),
        (),
        ('{"10000-01-01 00:00:00+00"}',),
    ),
    Type(
        PgType(90_006, name="pair", kind="c", parts=(("a\u2028", DECIMAL), ('B"', TEXT))),
        in_record(decimals(9, 8), TEXTS),
    ),
    Type(
        PgType(90_007, name="int4range", kind="r", parts=(("subtype", INTEGER),)),
        st.sampled_from(["empty", "[1,5)", "(,)", "[-3,)"]),
    ),
    Type(PgType(90_008, name="hstore", extension="hstore"), in_hstore(TEXTS)),
    Type(PgType(90_009, name="dom", kind="d", parts=(("base", ZONED.of),)), ZONED.texts),
    Type(PgType(90_010, name="jdom", kind="d", parts=(("base", JSONB),)), JSON_TEXTS),
)


@dataclass(frozen=True)
class Table:
    """A relation, and of each of its columns the texts."""

    record: RelationRecord
    texts: list[Texts]
    options: TableOptions


class Known(KnownRelations):
    """Relations by their versions, without a lake."""

    def __init__(self, *records: RelationRecord) -> None:
        self._records = {record.version: record for record in records}

    def _read(self) -> None:
        pass


@st.composite
def tables(draw: st.DrawFn, number: int, is_faulty: bool) -> Table:
    types = draw(st.lists(st.sampled_from(TYPES), max_size=6))
    names = draw(st.lists(TEXTS, min_size=len(types), max_size=len(types), unique=True))
    keys = draw(st.lists(st.booleans(), min_size=len(types), max_size=len(types)))
    columns, options, texts = [], {}, []
    for place, (name, one, is_key) in enumerate(zip(names, types, keys, strict=True)):
        of = one.of
        columns.append(Column(name, place + 1, of.oid, of.typmod, of.name, of.kind, is_key=is_key, type=of))
        options[name] = draw(st.sampled_from([ColumnOptions(), *one.options]))
        if draw(st.integers(0, 9)) == 0:
            options[name] = replace(options[name], excluded=True)
        texts.append(one.texts | st.sampled_from(one.faulty) if is_faulty and one.faulty else one.texts)
    name = TableName(draw(TEXTS.filter(bool)), draw(TEXTS.filter(bool)))
    relation = Relation(16_400 + number, name, tuple(columns), draw(st.sampled_from("dfi")))
    hidden = tuple(place for place in range(len(columns)) if draw(st.integers(0, 9)) == 0)
    record = replace(RelationRecord.of_catalog(relation), hidden=hidden)
    return Table(record, texts, TableOptions(columns=options))


@st.composite
def changes(draw: st.DrawFn, tables: list[Table]) -> dict[str, Any]:
    """Draw the content of one change; its position comes with its transaction."""
    table = draw(st.sampled_from(tables))
    columns = table.record.message.columns
    is_full = table.record.message.replica_identity == "f"
    after = [draw(st.none() | one) for one in table.texts]
    before = [
        draw(st.none() | one) if is_full or column.is_identity else None
        for one, column in zip(table.texts, columns, strict=True)
    ]
    op = draw(st.sampled_from("IIUUDT"))
    has_old = op == "D" or (op == "U" and (is_full or draw(st.booleans())))
    unchanged = None
    if op == "U" and columns and draw(st.integers(0, 3)) == 0:
        unchanged = sorted(draw(st.sets(st.integers(0, len(columns) - 1))))
        after = [None if place in unchanged else text for place, text in enumerate(after)]
    return {
        "relation_id": table.record.message.oid,
        "relation_version": table.record.version,
        "op": op,
        "new": after if op in "IU" else None,
        "old": before if has_old else None,
        "unchanged": unchanged,
    }


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Table], pa.Table]:
    is_faulty = draw(st.integers(0, 4)) == 0
    known = [draw(tables(number, is_faulty)) for number in range(draw(st.integers(1, 2)))]
    rows = []
    for number, count in enumerate(draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))):
        place = {
            "epoch": 1 + number // 2,
            "commit_lsn": (draw(st.integers(1, 2**31 - 1)) << 32) + number,
            "xid": draw(st.integers(3, 2**32 - 1)),
            "commit_ts": draw(MICROSECONDS),
        }
        rows += [{**place, "ordinal": ordinal, **draw(changes(known))} for ordinal in range(count)]
    rows += [{**row, "op": "R", "new": ["{}"]} for row in rows[:1]]
    whole_table = pa.Table.from_pylist(rows, schema=ROW_SCHEMA)
    begin = draw(st.integers(0, 1))
    chunks = [whole_table.slice(begin, 3), whole_table.slice(begin + 3)]
    return known, pa.concat_tables(chunks) if draw(st.booleans()) else whole_table.slice(begin)
