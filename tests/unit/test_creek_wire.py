"""creek's wire: fingerprints and bytes as creek at b88e46c wrote them, read back by another decoder."""

from __future__ import annotations

import io
import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import fastavro
import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import TargetError, ValueRangeError
from airflow_provider_pgrepl.replication.avro.codec import crc64, fingerprint_text, long, to_text
from airflow_provider_pgrepl.replication.avro.columns import CreekColumn, avro_name, avro_names
from airflow_provider_pgrepl.replication.creek.messages import change_of, parsed_schema, row_of
from airflow_provider_pgrepl.replication.creek.snapshot import SnapshotRows
from airflow_provider_pgrepl.replication.creek.wire import CreekEnvelope, EncodedChange, code_of
from airflow_provider_pgrepl.replication.events.columns import PublishedColumn, PublishedColumns
from airflow_provider_pgrepl.replication.events.formats.avro import avro_column
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, PgType, Relation
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions, LakeType, TableOptions
from tests.support.histories import Known

OTHER, WIDE = TableName("public", "other"), TableName("public", "ty")
TX_AT = datetime(2023, 1, 23, 12, 30, 0, 123456, UTC)
STAMP = LSN.parse("0/1A2B3C8")
POSITION = EventPosition.after_transaction(Epoch(1), STAMP)


def column(name: str, oid: int, *, key: bool = False, typmod: int = -1, **named: Any) -> CreekColumn:
    kind = named.pop("type", None)
    found = Column(name, 1, oid, typmod, "any", is_key=key, type=kind)
    choice = named.pop("choice", ColumnOptions())
    options = TableOptions(columns={name: choice})
    return avro_column(
        PublishedColumn(found, name), named.pop("table", OTHER), options, "d", is_of_identity=key
    )


def array_column(name: str, element: int, *, typmod: int = -1, key: bool = False) -> CreekColumn:
    kind = PgType(1000, typmod, "_any", "a", parts=(("element", PgType(element, typmod)),))
    return column(name, 1000, typmod=typmod, type=kind, key=key)


def microseconds(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


OTHER_ENVELOPE = CreekEnvelope("test_db", OTHER, [column("id", 23, key=True), column("data", 25)])


def row(columns: list[CreekColumn], *texts: str | None) -> bytes:
    parts = [
        one.encode(pa.array([text], pa.large_string()))[0] for one, text in zip(columns, texts, strict=True)
    ]
    return b"\x02" + b"".join(parts)


def message(
    envelope: CreekEnvelope,
    op: str,
    before: tuple[str | None, ...] | None,
    after: tuple[str | None, ...] | None,
) -> bytes:
    rows = b"\x00" if before is None else row(envelope.keys, *before)
    rows += b"\x00" if after is None else row(list(envelope.columns), *after)
    head = envelope.head(microseconds(TX_AT), 745)
    sent = long(microseconds(TX_AT + timedelta(seconds=1)))
    return EncodedChange(head, code_of(op, has_old=False), rows).stamped(STAMP, sent)


def decoded(envelope: CreekEnvelope, body: bytes) -> dict[str, Any]:
    assert body[:2] == b"\xc3\x01"
    assert body[2:10] == envelope.fingerprint
    stream = io.BytesIO(body[10:])
    found = fastavro.schemaless_reader(stream, fastavro.parse_schema(json.loads(to_text(envelope.schema))))
    assert stream.read() == b"", "all of it was read"
    return found


SCHEMA = (
    '{"name":"publish_message","type":"record","fields":[{"name":"fingerprint","type":"string"},'
    '{"name":"source","type":{"name":"source","type":"record","fields":[{"name":"name","type":"string"},'
    '{"name":"tx_at","type":{"type":"long","logicalType":"timestamp-micros"}},{"name":"db","type":"string"},'
    '{"name":"schema","type":"string"},{"name":"table","type":"string"},{"name":"tx_id","type":"long"},'
    '{"name":"lsn","type":"string"}]}},{"name":"op","type":{"name":"op","type":"enum","symbols":'
    '["c","u","u_pk","d","t","r"]}},{"name":"sent_at","type":{"type":"long","logicalType":'
    '"timestamp-micros"}},{"name":"before","type":["null",{"name":"before.other","type":"record","fields":'
    '[{"name":"id","type":"int","pgKey":true,"pgType":"int4"}]}]},{"name":"after","type":["null",'
    '{"name":"after.other","type":"record","fields":[{"name":"id","type":"int","pgKey":true,"pgType":"int4"},'
    '{"name":"data","type":["null","string"],"pgKey":false,"pgType":"text"}]}]}]}'
)
START = (
    "182d476d316b76616a646d733d0a64756d6d798091b7ecb1bbf9050e746573745f64620c7075626c69630a6f74686572"
    "d20b12302f31413242334338"
)
SENT = "809ab1edb1bbf905"


def test_the_schema_and_its_fingerprint_are_creeks():
    assert to_text(OTHER_ENVELOPE.schema) == SCHEMA
    assert OTHER_ENVELOPE.fingerprint.hex() == "f869b592f6a3766b"
    assert fingerprint_text(OTHER_ENVELOPE.fingerprint) == "-Gm1kvajdms="


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"null"', "63dd24e7cc258f8a"),
        ('"string"', "8f014872634503c7"),
        ('["null","int"]', "d51cc0922b46b1d7"),
        ('{"type":"array","items":"int"}', "522b814fc963b4be"),
    ],
)
def test_the_checksum_is_hambas(text, expected):
    assert crc64(text.encode()).to_bytes(8, "big").hex() == expected


@pytest.mark.parametrize(
    ("op", "before", "after", "expected"),
    [
        ("insert", None, ("1", "test"), "00" + SENT + "00" + "0202020874657374"),
        ("insert", None, ("1", None), "00" + SENT + "00" + "020200"),
        ("update", ("1",), ("1", "cool"), "02" + SENT + "0202" + "0202" + "0208636f6f6c"),
        ("delete", ("100",), None, "06" + SENT + "02c801" + "00"),
        ("truncate", None, None, "08" + SENT + "0000"),
    ],
)
def test_messages_are_byte_for_byte_creeks(op, before, after, expected):
    body = message(OTHER_ENVELOPE, op, before, after)
    assert body.hex() == "c301f869b592f6a3766b" + START + expected
    assert decoded(OTHER_ENVELOPE, body)["source"]["lsn"] == "0/1A2B3C8"


def wide(nn: CreekColumn) -> CreekEnvelope:
    numeric = ((10 << 16) | 5) + 4
    return CreekEnvelope(
        "test_db",
        WIDE,
        [
            column("ts", 1184, key=True),
            column("d", 1082),
            column("tm", 1083),
            column("n", 1700, typmod=numeric),
            nn,
            array_column("ia", 23),
            column("j", 3802),
            column("u", 2950),
            column("by", 17),
            column("en", 99_999),
        ],
    )


def test_a_wide_table_has_creeks_fingerprint():
    # creek's schema of a numeric without precision is bytes, into which it cannot put a value; ours a text.
    bytes_of_creek = column("nn", 3802)
    assert wide(bytes_of_creek).fingerprint.hex() == "9a0ab85a939f3df1"
    assert wide(column("nn", 1700)).fingerprint.hex() != "9a0ab85a939f3df1"


def test_a_wide_row_is_creeks_and_another_decoder_reads_it():
    envelope = wide(column("nn", 1700))
    texts = (
        "2023-01-23 12:30:00.123456+00",
        "2023-01-23",
        "01:00:00",
        "231.11200",
        None,
        "{1,2}",
        '{"a":1}',
        "46145d05-8bc7-403b-8098-1baf99e97b56",
        None,
        "x",
    )
    uuid = texts[7].encode().hex()
    expected = (
        "02008091b7ecb1bbf905 02e8ae02 0280909de91a 02080160a620 00 0204020400 020e7b2261223a317d"
        f"0248{uuid} 00 020278"
    )
    assert row(list(envelope.columns), *texts).hex() == expected.replace(" ", "")
    after = decoded(envelope, message(envelope, "insert", None, texts))["after"]
    assert after == {
        "ts": TX_AT,
        "d": date(2023, 1, 23),
        "tm": time(1),
        "n": Decimal("231.112"),
        "nn": None,
        "ia": [1, 2],
        "j": b'{"a":1}',
        "u": UUID(texts[7]),
        "by": None,
        "en": "x",
    }


@pytest.mark.parametrize(
    ("made", "text", "expected"),
    [
        (column("v", 16), "t", True),
        (column("v", 20), "-9223372036854775808", -(2**63)),
        (column("v", 20), "9223372036854775807", 2**63 - 1),
        (column("v", 700), "1.5", 1.5),
        (column("v", 701), "-Infinity", float("-inf")),
        (column("v", 1700), "NaN", "NaN"),
        (column("v", 1700, typmod=((6 << 16) | 2) + 4), "-0.01", Decimal("-0.01")),
        (column("v", 1700, typmod=((6 << 16) | 2) + 4), "0.00", Decimal("0.00")),
        (column("v", 1700, typmod=((6 << 16) | 2) + 4), "-1.28", Decimal("-1.28")),
        (column("v", 1700, typmod=((6 << 16) | 2) + 4), "5", Decimal("5.00")),
        (column("v", 1700, typmod=((2 << 16) | 5) + 4), "0.00012", "0.00012"),
        (column("v", 1042), "ab  ", "ab  "),
        (column("v", 17), "\\x00ff", "\\x00ff"),
        (column("v", 1184), "infinity", "infinity"),
        (column("v", 1114), "-infinity", "negative_infinity_ca5991f51367e3e4"),
        (column("v", 1083), "23:59:59.000001", time(23, 59, 59, 1)),
        (column("v", 114), '{"a": 12345678901234567890}', b'{"a": 12345678901234567890}'),
        (array_column("v", 25), '{"a,b",c}', ["a,b", "c"]),
        (array_column("v", 25), "{}", []),
        (
            array_column("v", 1114),
            "{infinity,2024-01-01 00:00:00}",
            ["infinity", datetime(2024, 1, 1, tzinfo=UTC)],
        ),
        (array_column("v", 1700, typmod=((6 << 16) | 2) + 4), "{1.25,0.00}", [Decimal("1.25"), Decimal(0)]),
        (column("v", 23, choice=ColumnOptions(lake_type=LakeType("string"))), "12", "12"),
        (column("Straße 1", 25), "x", "x"),
    ],
)
def test_values_come_back_exactly(made, text, expected):
    envelope = CreekEnvelope("db", OTHER, [column("id", 23, key=True), made])
    after = decoded(envelope, message(envelope, "insert", None, ("1", text)))["after"]
    assert after[avro_name(made.name)] == expected


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (array_column("v", 23), "{1,NULL}"),
        (array_column("v", 23), "{{1},{2}}"),
        (array_column("v", 23), "[0:1]={1,2}"),
        (column("v", 1700, typmod=((6 << 16) | 2) + 4), "NaN"),
    ],
)
def test_value_outside_avro_type_raises_range_error_without_showing_value(made, text):
    with pytest.raises(ValueRangeError, match=r'column "v" of public\.other') as caught:
        made.encode(pa.array([text], pa.large_string()))
    assert text not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"), [("a", "a"), ("a b", "a_b"), ("1a", "_1a"), ("Ünde", "_nde"), ("", "_")]
)
def test_names_are_made_such_as_avro_allows(name, expected):
    assert avro_name(name) == expected
    made = column(name, 25)
    (unique,) = avro_names([made])
    field = made.field(unique, "x")
    assert (field.get("pgName", name), field["name"]) == (name, expected)


def test_columns_whose_names_would_become_one_keep_names_of_their_own():
    columns = [column(name, 25) for name in ("a b", "a_b", "a-b", "a_b_2", "a.b")]
    assert avro_names(columns) == ["a_b_3", "a_b", "a_b_4", "a_b_2", "a_b_5"]


def test_a_column_has_one_name_before_a_change_and_after_it():
    columns = [column("x y", 23, key=True), column("x_y", 25)]
    envelope = CreekEnvelope("db", OTHER, columns)
    found = decoded(envelope, message(envelope, "update", ("1",), ("1", "v")))
    assert found["before"] == {"x_y_2": 1}
    assert found["after"] == {"x_y_2": 1, "x_y": "v"}


def test_a_key_of_a_table_that_is_not_identified_by_it_may_be_null():
    published = PublishedColumn(Column("id", 1, 23, -1, "integer"), "id")
    made = avro_column(published, OTHER, TableOptions(), "i", is_of_identity=True)
    assert made.field("id", "x") == {"name": "id", "type": ["null", "int"], "pgKey": True, "pgType": "int4"}


def relation_of(table: TableName, *columns: Column) -> Relation:
    return Relation(1, table, columns)


def snapshot_of(relation: Relation) -> SnapshotRows:
    return SnapshotRows(relation, TableOptions(), PublishedColumns(Known()))


def test_a_snapshots_header_is_creeks():
    relation = relation_of(
        OTHER, Column("id", 1, 23, -1, "integer", is_key=True), Column("data", 2, 25, -1, "text")
    )
    header = snapshot_of(relation).header(POSITION, STAMP, TX_AT, 2)
    assert header.decode() == (
        '{"topic":"","fingerprint":"tehSZhnhMvI=","schema":"{\\"type\\":\\"record\\",\\"name\\":\\"other\\",'
        '\\"fields\\":[{\\"name\\":\\"id\\",\\"type\\":\\"int\\",\\"pgType\\":\\"int4\\",\\"pgKey\\":true},'
        '{\\"name\\":\\"data\\",\\"type\\":[\\"null\\",\\"string\\"],\\"pgType\\":\\"text\\",\\"pgKey\\":false}]}",'
        '"tx_id":0,"lsn":"0/1A2B3C8","at":"2023-01-23T12:30:00.123456Z","approx_rows":2,'
        '"position":"1:0/1A2B3C8:end"}'
    )


def test_a_snapshots_row_of_a_wide_table_has_creeks_fingerprint():
    array = PgType(1007, -1, "_int4", "a", parts=(("element", PgType(23)),))
    # creek's schema of a numeric without precision is bytes.
    relation = relation_of(
        WIDE,
        Column("ts", 1, 1184, -1, "timestamptz", is_key=True),
        Column("d", 2, 1082, -1, "date"),
        Column("tm", 3, 1083, -1, "time"),
        Column("n", 4, 1700, (10 << 16 | 5) + 4, "numeric(10,5)"),
        Column("nn", 5, 3802, -1, "jsonb"),
        Column("ia", 6, 1007, -1, "integer[]", type=array),
        Column("j", 7, 3802, -1, "jsonb"),
        Column("u", 8, 2950, -1, "uuid"),
        Column("by", 9, 17, -1, "bytea"),
        Column("en", 10, 99_999, -1, "any"),
    )
    snapshot = snapshot_of(relation)
    header = json.loads(snapshot.header(POSITION, STAMP, TX_AT, 1))
    assert header["fingerprint"] == "jbnZxqKfgPs="
    rows = pa.table(
        {
            "ts": pa.array([TX_AT], pa.timestamp("us", "UTC")),
            "d": pa.array([date(2023, 1, 23)], pa.date32()),
            "tm": ["01:00:00"],
            "n": pa.array([Decimal("231.11200")], pa.decimal128(10, 5)),
            "nn": pa.nulls(1, pa.string()),
            "ia": [[1, 2]],
            "j": ['{"a":1}'],
            "u": ["46145d05-8bc7-403b-8098-1baf99e97b56"],
            "by": pa.nulls(1, pa.binary()),
            "en": ["x"],
            "_pgrepl_commit_lsn": [1],
        }
    )
    (row_,) = snapshot.encode(rows)
    decoded = row_of(row_, parsed_schema(header["schema"]))
    assert decoded["ts"] == TX_AT
    assert decoded["tm"] == time(1, 0)
    assert (decoded["n"], decoded["ia"], decoded["j"]) == (Decimal("231.11200"), [1, 2], b'{"a":1}')
    assert (decoded["by"], decoded["en"]) == (None, "x")


def test_a_snapshot_is_refused_where_the_lake_leaves_a_column_out():
    relation = Relation(
        1,
        OTHER,
        (Column("id", 1, 23, -1, "integer", is_key=True), Column("w", 2, 25, -1, "text")),
        ignored=(2,),
    )
    with pytest.raises(TargetError, match=r"lake table public\.other lacks w"):
        snapshot_of(relation)


@pytest.mark.parametrize(
    ("oid", "text", "expected"),
    [
        (1082, "0044-03-15 BC", "0044-03-15 BC"),
        (1082, "12345-01-01", "12345-01-01"),
        (1083, "24:00:00", "24:00:00"),
        (1184, "0044-03-15 12:00:00.5+00 BC", "0044-03-15 12:00:00.5 BC"),
        (1114, "2024-01-01 00:00:00", datetime(2024, 1, 1, tzinfo=UTC)),
        (1184, "infinity", "infinity"),
        (1184, "-infinity", "-infinity"),
        (25, "negative_infinity_ca5991f51367e3e4", "negative_infinity_ca5991f51367e3e4"),
        (25, "infinity", "infinity"),
    ],
)
def test_a_client_reads_what_python_cannot_hold_as_postgresql_writes_it(oid, text, expected):
    envelope = CreekEnvelope("db", OTHER, [column("x", oid)])
    schema = parsed_schema(to_text(envelope.schema))
    payload = message(envelope, "insert", None, (text,))
    assert change_of(payload, schema, {}, 7).after == {"x": expected}
