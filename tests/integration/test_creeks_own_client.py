"""A transcript of our streams as creek's own Go client read them: the same must be sent in the future.

tests/golden/creek_client.json was made with creek at b88e46c, by tests/golden/creek_client.go, built next to
creek's source as cmd/readall. PGREPL_CREEK_CLIENT names that program for a run of this file.
creek_consumer.json was made with creek-pg-client at 2c8718e, built with creek at 38f5909.
PGREPL_CREEK_CONSUMER names it.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg2.extensions
import pyarrow as pa
import pytest

from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.avro.codec import unique_long
from airflow_provider_pgrepl.replication.avro.columns import INFINITIES
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.creek.events import CreekEvents
from airflow_provider_pgrepl.replication.creek.messages import (
    SnapshotHeader,
    change_of,
    parsed_schema,
    row_of,
)
from airflow_provider_pgrepl.replication.creek.wire import unframed
from airflow_provider_pgrepl.replication.events.relations import TableSelection
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from tests.conftest import closing_connection
from tests.support.histories import Known
from tests.support.jetstream import CreekStream, running_nats
from tests.support.landed import Landed
from tests.support.publishing import publishing
from tests.support.replicated import execute, kill, wait_until

CLIENT, CONSUMER = (os.environ.get(name, "") for name in ("PGREPL_CREEK_CLIENT", "PGREPL_CREEK_CONSUMER"))
FOLDER = Path(__file__).parents[1] / "golden"
KEPT = (
    *("epoch", "commit_lsn", "ordinal", "xid", "commit_ts", "relation_id", "relation_version", "op"),
    *("new", "old", "unchanged"),
)
CONSUMED = ("b", "i2", "i8", "f4", "f8", "vc", "tx", "d", "ts", "tz", "u", "jb", "n", "ia")
"""Columns that creek's consumer can write."""
COLUMNS = {
    "b": ("bool", "true"),
    "i2": ("int2", "-300"),
    "i8": ("int8", "9007199254740993"),
    "f4": ("float4", "2.25"),
    "f8": ("float8", "0.1"),
    "c": ('"char"', "'x'"),
    "vc": ("varchar(9)", "'a b'"),
    "bp": ("char(4)", "'a'"),
    "tx": ("text", "'ü\"\\'"),
    "d": ("date", "'2024-02-29'"),
    "dinf": ("date", "'-infinity'"),
    "tm": ("time", "'13:45:00.5'"),
    "ts": ("timestamp", "'2024-02-29 13:45:00.123456'"),
    "tz": ("timestamptz", "'2024-02-29 13:45:00+02'"),
    "tzinf": ("timestamptz", "'infinity'"),
    "u": ("uuid", "'46145d05-8bc7-403b-8098-1baf99e97b56'"),
    "j": ("json", "'[1, 2]'"),
    "jb": ("jsonb", "'{\"a\": 12345678901234567890}'"),
    "n": ("numeric(10,2)", "-12345.67"),
    "nn": ("numeric", "1.50"),
    "ia": ("int4[]", "'{1,2}'"),
    "ta": ("text[]", "array['a,b', '']"),
    "by": ("bytea", "'\\x00ff'"),
    "iv": ("interval", "'1 year 2 days'"),
    "r": ("int4range", "'[1,5)'"),
}


@pytest.mark.skipif(not CLIENT, reason="makes the transcript anew: PGREPL_CREEK_CLIENT names creek's client")
def test_creeks_client_reads_all(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ", ".join(f"{name} {of[0]}" for name, of in COLUMNS.items())
    values = ", ".join(of[1] for of in COLUMNS.values())
    execute(dsn, f"create table every(id int primary key, {declared})")
    landed = begin(dsn, tmp_path, monkeypatch, "v2")
    execute(
        dsn,
        f"insert into every values (1, {values})",
        "insert into every (id) values (2), (3)",
        "update every set tx = 'changed' where id = 1",
        "update every set id = 4 where id = 2",
        "delete from every where id = 3",
        "truncate every",
        f"insert into every values (5, {values}), (6, {values})",
    )
    landed.receive()
    landed.apply()
    with running_nats() as server:
        monkeypatch.setenv(TARGET_VARIABLE, server.uri)
        stream = CreekStream(server.uri, "shop")
        with publishing(landed):
            wait_until(lambda: len(stream.raw(stream.wal)) == 9, 90)
            said = run(CLIENT, server.uri, "shop", "public", "every", "9")
        lines = [json.loads(line) for line in said.splitlines()]
        assert [one for one in lines if "after" in one] == [{"after": 0}], "the snapshot had all"
        write("client", landed, stream, "CREEK_wal_shop", "CREEK_schema_shop", "CREEK_snap_shop", read=lines)


@pytest.mark.skipif(not CONSUMER, reason="likewise: PGREPL_CREEK_CONSUMER names creek's consumer")
def test_creeks_postgresql_consumer_keeps_a_copy(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {name: COLUMNS[name] for name in CONSUMED}
    declared = ", ".join(f"{name} {of[0]}" for name, of in chosen.items())
    values = ", ".join(of[1] for of in chosen.values())
    execute(dsn, f"create table every(id int primary key, {declared})")
    landed = begin(dsn, tmp_path, monkeypatch, "v1")
    execute(dsn, f"insert into every select g, {values} from generate_series(1, 50) g")
    landed.receive()
    landed.apply()
    parts = psycopg2.extensions.parse_dsn(dsn)
    copy = f"{parts['dbname']}_copy"
    execute(dsn, f"create database {copy}")
    uri = f"postgres://{parts['user']}@{parts['host']}:{parts['port']}/{copy}?sslmode=disable"
    with running_nats() as server:
        monkeypatch.setenv(TARGET_VARIABLE, server.uri)
        monkeypatch.setenv("PROMETHEUS_PORT", "0")
        stream = CreekStream(server.uri, "shop")
        ours = (CONSUMER, "--nats-uri", server.uri, "--db-uri", uri)
        pair = "shop.public.every:public.every"
        with publishing(landed):
            wait_until(lambda: len(stream.raw("CREEK_wal")) == 50, 90)
            for command in ("create-schemas", "snapshot", "add-tables"):
                run(*ours, command, pair)
            serving = subprocess.Popen([*ours, "serve"], start_new_session=True)
            try:
                execute(
                    dsn,
                    "update every set tx = 'changed' where id <= 10",
                    "delete from every where id between 40 and 45",
                    "update every set id = 100 where id = 20",
                    f"insert into every select g, {values} from generate_series(200, 220) g",
                )
                landed.receive()
                source = rows_of(dsn)
                wait_until(lambda: rows_of(dsn.replace(parts["dbname"], copy)) == source, 60)
            finally:
                kill(serving)
        assert len(source) == 65
        write("consumer", landed, stream, "CREEK_wal", "CREEK_schema", "CREEK_snap", read=[])


def begin(dsn: str, folder: Path, monkeypatch: pytest.MonkeyPatch, wire: str) -> Landed:
    monkeypatch.setenv("PGREPL_DSN", dsn)
    # The lake holds no infinities: in the snapshot they are null.
    landed = Landed(dsn, folder, ("public.every",), flush_interval_s=0.05, infinity="null")
    landed.begin()
    landed.configure(publishers={"events": {"target": "nats", "database": "shop", "wire": wire}})
    return landed


def run(*command: str) -> str:
    said = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert said.returncode == 0, said.stderr
    return said.stdout


def rows_of(dsn: str) -> list[Any]:
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(f"select id, {', '.join(CONSUMED)} from every order by id")
        return cursor.fetchall()


def write(
    name: str, landed: Landed, stream: CreekStream, wal: str, schema: str, snap: str, read: Any
) -> None:
    kept = {
        kind: [base64.b64encode(unframed([one.data])).decode() for one in stream.raw(of)]
        for kind, of in (("changes", wal), ("schemas", schema), ("snapshot", snap))
    }
    rows = [{key: row[key] for key in KEPT} for row in landed.changelog_rows() if row["op"] in "IUDT"]
    records = RelationIndex(relations_uri(landed.pipeline.lake_root)).by_version()
    record = records[rows[0]["relation_version"]]
    text = json.dumps(
        {"relation": record.to_json(), "rows": rows, **kept, "read": read},
        indent=1,
        default=lambda moment: moment.isoformat(),
    )
    (FOLDER / f"creek_{name}.json").write_text(f"{text}\n")


@pytest.fixture(scope="module")
def transcript() -> Any:
    return read_transcript("client")


def read_transcript(name: str) -> Any:
    return json.loads((FOLDER / f"creek_{name}.json").read_text())


def read(transcript: Any, kind: str) -> list[Any]:
    return [line[kind] for line in transcript["read"] if kind in line]


def payloads(transcript: Any, kind: str) -> list[bytes]:
    return [base64.b64decode(one) for one in transcript[kind]]


def schema_of(transcript: Any) -> Any:
    (schema,) = payloads(transcript, "schemas")
    return parsed_schema(json.loads(schema)["schema"])


@pytest.mark.parametrize(("name", "has_last"), [("client", False), ("consumer", True)])
def test_encoded_events_match_recorded_creek_payloads_byte_for_byte(name, has_last):
    """Byte for byte, from the rows of the changelog that were sent then."""
    transcript = read_transcript(name)
    record = RelationRecord.from_json(transcript["relation"])
    rows = [{**row, "commit_ts": datetime.fromisoformat(row["commit_ts"])} for row in transcript["rows"]]
    schema = pa.schema([ROW_SCHEMA.field(key) for key in rows[0]])

    class Same(Known):
        def find(self, _: int) -> RelationRecord:
            return record

    events = CreekEvents("shop", has_last, False, Same(), lambda _: TableOptions(), TableSelection())
    made = events.of(pa.Table.from_pylist(rows, schema))
    for event, payload in zip(made, payloads(transcript, "changes"), strict=True):
        sent = row_of(payload[10:], schema_of(transcript))
        stamps = [LSN.parse(sent["source"].get(name, "0/0")) for name in ("lsn", "last_lsn")]
        sent_at = (sent["sent_at"] - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        assert event.unstamped.stamped(stamps[0], unique_long(sent_at), stamps[1]) == payload
        assert ("last_lsn" in sent["source"]) == has_last


def test_another_decoder_reads_what_creeks_client_has_read(transcript):
    changes = [
        change_of(payload, schema_of(transcript), {}, 0) for payload in payloads(transcript, "changes")
    ]
    for change, by_go in zip(changes, read(transcript, "change"), strict=True):
        source = by_go["source"]
        assert (change.op, str(change.lsn), change.tx_id) == (by_go["op"], source["lsn"], source["tx_id"])
        assert change.tx_at == datetime.fromisoformat(source["tx_at"])
        for row, same in ((change.before, by_go["before"]), (change.after, by_go["after"])):
            assert as_go(row) == without_kinds(same)


def test_another_decoder_reads_the_snapshot_that_creeks_client_has_read(transcript):
    header, *rows, end = payloads(transcript, "snapshot")
    (by_go,), (topics,) = read(transcript, "header"), read(transcript, "snapshots")
    assert by_go == {**json.loads(header), "topic": topics[0]["Name"]}
    found = SnapshotHeader.parse(by_go["topic"], header)
    assert [list(found.keys)] == read(transcript, "keys")
    assert (topics[0]["Messages"], read(transcript, "rows_again"), end) == (len(rows), [len(rows)], b"EOF")
    for row, same in zip(rows, read(transcript, "row"), strict=True):
        decoded = as_go(row_of(row, parsed_schema(found.schema)))
        assert without_kinds(same) == decoded


def without_kinds(row: Any) -> Any:
    return {name: without_kind(value) for name, value in row.items()} if row else row


def without_kind(value: Any) -> Any:
    """Go's value of a union, without the name of its branch, of which creek's client knows some."""
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
    return INFINITIES.get(value, value) if isinstance(value, str) else value


def as_go(value: Any) -> Any:
    """A value as Go's JSON writes what creek's client makes of it."""
    if isinstance(value, dict):
        return {name: as_go(one) for name, one in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime):
        written = f"{value:%Y-%m-%dT%H:%M:%S.%f}".rstrip("0").rstrip(".")
        return f"{written}Z"
    if isinstance(value, date):
        return f"{value}T00:00:00Z"
    if isinstance(value, time):
        seconds = value.hour * 3600 + value.minute * 60 + value.second
        return seconds * 1_000_000_000 + value.microsecond * 1_000
    if isinstance(value, Decimal):
        return str(Fraction(value))
    return str(value) if isinstance(value, UUID) else value
