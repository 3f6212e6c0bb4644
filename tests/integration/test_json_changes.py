"""events/formats/json_text.py and `pgrepl changes`: JSON that says exactly what PostgreSQL does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.replication.events.formats.json import JsonEvents
from airflow_provider_pgrepl.replication.events.formats.json_text import to_json
from airflow_provider_pgrepl.replication.events.reader import ChangeReader, OrderedReader
from airflow_provider_pgrepl.replication.events.stream import json_lines
from airflow_provider_pgrepl.replication.source.connection import Connection
from tests.support.received import Received
from tests.support.replicated import execute

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# Of each column its type, values, and what PostgreSQL says they are in JSON.
COLUMNS = {
    "small": ("smallint", ("-32768", "null"), "{}"),
    "big": ("bigint", ("9223372036854775807", "-9223372036854775808"), "{}"),
    "exact": ("numeric", ("1e-30", "12345678901234567890.10"), "{}::text"),
    "money_like": ("numeric(10,2)", ("1.50", "-0.01"), "{}::text"),
    "double_": ("double precision", ("1e300", "0.1", "'nan'", "'-infinity'", "5e-324"), "{}"),
    "single": ("real", ("1.5", "'infinity'"), "{}"),
    "yes": ("boolean", ("true", "false", "null"), "{}"),
    "words": ("text", ("E'a\"b\\\\c\\n\\t\\x01 é \\u2028 💡'", "''", "'null'"), "{}"),
    "bytes_": ("bytea", ("'\\x00ff0a'", "''"), "replace(encode({}, 'base64'), E'\\n', '')"),
    "doc": ("jsonb", ('\'{"a": [1.10, 1e400, null], "é\\n": "x"}\'', "'null'", "'[]'"), "{}"),
    "written": ("json", ('E\'{"a" :\\n 1.0,\\r\\n"b":"x  y"}\'',), "{}"),
    "id_": ("uuid", ("'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'",), "{}"),
    "day": ("date", ("'2024-02-29'", "'0001-01-01'"), "{}"),
    "at": (
        "timestamptz",
        ("'2024-05-01 12:00:00.123456+02'", "'2024-05-01 00:00:00Z'"),
        "replace(to_char({} at time zone 'utc', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'), '.000000Z', 'Z')",
    ),
    "local": (
        "timestamp",
        ("'2024-05-01 12:00:00.5'", "'2024-05-01 00:00:00'"),
        "replace(to_char({}, 'YYYY-MM-DD\"T\"HH24:MI:SS.US'), '.000000', '')",
    ),
    "list_": ("int[]", ("'{1,null,3}'", "'{}'"), "{}"),
    "texts": ("text[]", ("array['a\"', null, 'b,c']",), "{}"),
    "mood_": ("mood", ("'sad'", "null"), "{}"),
    "span": ("interval", ("'1 day 02:03:04'",), "{}::text"),
}


def test_each_value_is_what_postgresql_says(dsn: str, tmp_path: Path, pg: Connection) -> None:
    columns = ", ".join(f"{name} {kind}" for name, (kind, *_) in COLUMNS.items())
    execute(dsn, "create type mood as enum ('sad', 'ok')", f"create table t(id int primary key, {columns})")
    received = Received(dsn, tmp_path, ("public.t",), flush_interval_s=0.05)
    received.begin()
    for number in range(max(len(values) for _, values, _ in COLUMNS.values())):
        values = ", ".join(values[number % len(values)] for _, values, _ in COLUMNS.values())
        execute(dsn, f"insert into t values ({number}, {values})")
    received.receive()
    said = ", ".join(f"'{name}', {how.format(name)}" for name, (_, _, how) in COLUMNS.items())
    with pg.cursor() as cursor:
        cursor.execute(f"select json_build_object('id', id, {said})::text from t order by id")
        expected = [exactly(text) for (text,) in cursor.fetchall()]
    lines = "".join(json_lines(received.pipeline)).splitlines()
    assert [exactly(line)["data"] for line in lines] == expected
    assert bodies(received) == lines, "a publisher makes them from columns"


def bodies(received: Received) -> list[str]:
    reader = OrderedReader(received.pipeline, make=partial(JsonEvents, few=0))
    return [event.body.decode() for batch in reader.read() for event in batch]


def exactly(text: str) -> Any:
    """Numbers as they are written, so that no digit is lost; `-0` is 0."""
    return json.loads(text, parse_float=_plain, parse_int=_plain)


def _plain(number: str) -> str:
    """PostgreSQL writes 1e+300 and Python 1e+300; 1.0 and 1 are one double."""
    return re.sub(r"\.0$", "", number)


def test_a_change_is_one_line(dsn: str, tmp_path: Path) -> None:
    execute(
        dsn, "create table t(id int primary key, doc text)", "alter table t alter doc set storage external"
    )
    received = Received(dsn, tmp_path, ("public.t",), flush_interval_s=0.05)
    received.begin()
    execute(dsn, "insert into t select 1, repeat(md5('1'), 300)", "update t set id = 2", "truncate t")
    received.receive()
    (inserted, updated, truncated) = [
        one for batch in ChangeReader(received.pipeline).read() for one in batch
    ]
    found = [json.loads(to_json(one)) for one in (inserted, updated, truncated)]
    assert list(found[0]) == ["table", "op", "data", "old", "id", "commit_lsn", "commit_ts", "xid"]
    assert (found[1]["data"], found[1]["old"], found[1]["unchanged"]) == ({"id": 2}, {"id": 1}, ["doc"])
    assert (found[2]["op"], found[2]["data"], found[2]["old"]) == ("truncate", None, None)
    assert [one["id"] for one in found] == [inserted.id, updated.id, truncated.id]
    assert found[0]["commit_lsn"] == str(inserted.commit_lsn)
    assert found[0]["xid"] == inserted.xid
    assert bodies(received) == [to_json(one) for one in (inserted, updated, truncated)]


@pytest.fixture
def file(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Received, Path]:
    execute(dsn, "create table t(id int primary key)", "create table u(id int primary key)")
    received = Received(dsn, tmp_path, ("public.t", "public.u"), flush_interval_s=0.05)
    received.begin()
    execute(dsn, *(f"insert into {table} values ({n})" for n in (1, 2) for table in "tu"))
    received.receive()
    path = tmp_path / "p.json"
    path.write_text(received.pipeline.to_json())
    return received, path


def test_the_command_prints_them_from_any_place_on(file, capsys):
    _, path = file

    def said(*arguments: str) -> list[dict[str, Any]]:
        assert main(["changes", str(path), *arguments]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    found = said()
    assert [(one["table"], one["data"]["id"]) for one in found] == [
        ("public.t", 1), ("public.u", 1), ("public.t", 2), ("public.u", 2)
    ]  # fmt: skip
    assert said("public.u") == [one for one in found if one["table"] == "public.u"]
    assert said("--after", found[1]["id"]) == said("--after", found[1]["commit_lsn"]) == found[2:]
    assert said("--after", "2001-01-01T00:00:00Z") == found
    assert main(["changes", str(path), "--after", "yesterday"]) == 78
    assert "not one of: ID of a change, LSN, timestamp" in capsys.readouterr().err


@pytest.mark.thorough("the command in the test above; test_change_stream: one that follows gets what comes")
def test_it_follows_until_it_is_interrupted_or_nobody_reads(file, dsn):
    received, path = file
    command = [sys.executable, "-m", "airflow_provider_pgrepl", "changes", str(path), "public.t"]
    with (
        received.receiving(),
        subprocess.Popen([*command, "--follow"], cwd=ROOT, stdout=subprocess.PIPE) as running,
    ):
        ids = []
        for line in running.stdout:
            ids.append(json.loads(line)["data"]["id"])
            if len(ids) == 2:
                execute(dsn, "insert into t values (3)")
            if len(ids) == 3:
                break
        running.send_signal(signal.SIGINT)
        assert (running.wait(120), ids) == (0, [1, 2, 3])
    execute(dsn, "alter table t add w text default '€ëЖ'", "insert into t values (4)")
    received.receive()
    latin = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60, env=latin)
    assert json.loads(printed.stdout.decode().splitlines()[-1])["data"] == {"id": 4, "w": "€ëЖ"}
    read_end, write_end = os.pipe()
    os.close(read_end)
    closed = subprocess.run(
        command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, check=False, timeout=60
    )
    os.close(write_end)
    assert (closed.returncode, closed.stderr) == (0, b"")
