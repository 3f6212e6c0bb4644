"""What creek's own Go client read of our streams, kept as a transcript: it must stay what we send.

tests/golden/creek_client.json was made with creek at b88e46c: tests/golden/creek_client.go, built beside
creek's source as cmd/readall, and named by PGREPL_CREEK_CLIENT for a run of this file.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from datetime import date, datetime, time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.choices import TableChoices
from airflow_provider_pgrepl.replication.events.creek.columns import INFINITIES
from airflow_provider_pgrepl.replication.events.creek.encoding import unique_long
from airflow_provider_pgrepl.replication.events.creek.events import CreekEvents
from airflow_provider_pgrepl.replication.events.creek.framing import unframed
from airflow_provider_pgrepl.replication.events.creek.messages import (
    SnapshotHeader,
    change_of,
    parsed_schema,
    row_of,
)
from airflow_provider_pgrepl.replication.events.table_selection import TableSelection
from tests.support.jetstream import CreekStream, running_nats
from tests.support.landed import Landed
from tests.support.publishing import publishing
from tests.support.replicated import execute, wait_until

PROGRAM = os.environ.get("PGREPL_CREEK_CLIENT", "")
FILE = Path(__file__).parents[1] / "golden" / "creek_client.json"
KEPT = ("epoch", "commit_lsn", "ordinal", "xid", "commit_ts", "relation_id", "relation_version", "op")
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


@pytest.mark.skipif(not PROGRAM, reason="makes the transcript anew: PGREPL_CREEK_CLIENT names creek's client")
def test_creeks_client_reads_all(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGREPL_DSN", dsn)
    declared = ", ".join(f"{name} {of[0]}" for name, of in COLUMNS.items())
    values = ", ".join(of[1] for of in COLUMNS.values())
    execute(dsn, f"create table every(id int primary key, {declared})")
    # The lake holds no infinities: in the snapshot they are null.
    landed = Landed(dsn, tmp_path, ("public.every",), flush_interval_s=0.05, infinity="null")
    landed.begin()
    landed.configure(publishers={"events": {"target": "nats", "database": "shop"}})
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
            said = subprocess.run(
                [PROGRAM, server.uri, "shop", "public", "every", "9"],
                capture_output=True,
                text=True,
                timeout=90,
                check=False,
            )
        assert said.returncode == 0, said.stderr
        lines = [json.loads(line) for line in said.stdout.splitlines()]
        messages = [base64.b64encode(unframed([one.data])).decode() for one in stream.raw(stream.wal)]
        snapshot = [base64.b64encode(unframed([one.data])).decode() for one in stream.raw("CREEK_snap_shop")]
        schemas = [base64.b64encode(unframed([one.data])).decode() for one in stream.raw(stream.schema)]
    rows = [
        {**{name: row[name] for name in KEPT}, **{name: row[name] for name in ("new", "old", "unchanged")}}
        for row in landed.changelog_rows()
        if row["op"] in "IUDT"
    ]
    records = RelationIndex(relations_uri(landed.pipeline.lake_root)).by_version()
    (record,) = {rows[0]["relation_version"]: records[rows[0]["relation_version"]]}.values()
    assert [one for one in lines if "after" in one] == [{"after": 0}], "the snapshot had all"
    FILE.write_text(
        json.dumps(
            {
                "relation": record.to_json(),
                "rows": rows,
                "changes": messages,
                "snapshot": snapshot,
                "schemas": schemas,
                "read": lines,
            },
            indent=1,
            default=lambda moment: moment.isoformat(),
        )
        + "\n"
    )


@pytest.fixture(scope="module")
def transcript() -> Any:
    return json.loads(FILE.read_text())


def read(transcript: Any, kind: str) -> list[Any]:
    return [line[kind] for line in transcript["read"] if kind in line]


def payloads(transcript: Any, kind: str) -> list[bytes]:
    return [base64.b64decode(one) for one in transcript[kind]]


def schema_of(transcript: Any) -> Any:
    (schema,) = payloads(transcript, "schemas")
    return parsed_schema(json.loads(schema)["schema"])


def test_what_is_sent_is_what_creeks_client_has_read(transcript):
    """Byte for byte, from the rows of the changelog that were sent then."""
    record = RelationRecord.from_json(transcript["relation"])
    rows = [{**row, "commit_ts": datetime.fromisoformat(row["commit_ts"])} for row in transcript["rows"]]
    schema = pa.schema([ROW_SCHEMA.field(name) for name in rows[0]])

    class Known:
        def find(self, _: int) -> RelationRecord:
            return record

    events = CreekEvents("shop", Known(), lambda _: TableChoices(), TableSelection())  # type: ignore[arg-type]
    made = events.of(pa.Table.from_pylist(rows, schema))
    for event, payload in zip(made, payloads(transcript, "changes"), strict=True):
        change = change_of(payload, schema_of(transcript), {}, 0)
        sent_at = int(change.sent_at.timestamp()) * 1_000_000 + change.sent_at.microsecond
        assert event.unstamped.stamped(change.lsn, unique_long(sent_at)) == payload


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
