"""An UPDATE that moves a row into a publication's row filter, and leaves a large value of it as it was.

The server sends an Insert without that value, unless the replica identity holds it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import Remedy
from airflow_provider_pgrepl.replication.events.changes import TypedChanges
from airflow_provider_pgrepl.replication.events.reader import OrderedReader
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from tests.support.handed import Handed
from tests.support.received import Received
from tests.support.replicated import execute

TABLES = ("public.t", "public.other")
MOVED = (
    "insert into t values (5, repeat('x', 9000), 'a'), (30, 'small', 'b')",
    "insert into other values (1)",
    "update t set id = 20 where id = 5",
    "insert into other values (2)",
)


@pytest.fixture(autouse=True)
def tables(dsn: str) -> None:
    execute(
        dsn,
        "create table t(id int primary key, body text, v text)",
        "alter table t alter body set storage external",
        "create table other(id int primary key)",
        "create publication theirs for table t where (id > 10), other with (publish_via_partition_root)",
    )


def handed(dsn: str, folder: Path, **options: object) -> Handed:
    return Handed(dsn, folder, TABLES, publication="theirs", publication_mode="use", **options)


def test_a_row_moved_into_the_filter_without_a_value_stops_its_table_only(dsn, tmp_path):
    pipeline = handed(dsn, tmp_path)
    position = LSN(pipeline.begin() - 1)
    moved_into, other = (pipeline.copy_at(position, table) for table in TABLES)
    execute(dsn, *MOVED)
    pipeline.receive()
    result = pipeline.hand(moved_into)
    assert result.error == (
        "public.t: an UPDATE moved a row into the publication's row filter, and the server did not send"
        " column body, a large value that the UPDATE did not change"
    )
    assert (result.error_kind, result.remedy, result.stops_pipeline) == (
        "IdentityError",
        Remedy.RESNAPSHOT,
        False,
    )
    assert "ALTER TABLE public.t REPLICA IDENTITY FULL" in result.hint
    assert pipeline.hand(other).error is None
    pipeline.assert_equal("public.other")


@pytest.mark.parametrize("excluded", [(), ("public.t.body",)])
def test_a_row_moved_into_the_filter_is_whole_if_the_lake_needs_no_unsent_value(dsn, tmp_path, excluded):
    if not excluded:
        execute(dsn, "alter table t replica identity full")
    pipeline = handed(dsn, tmp_path, exclude_columns=excluded)
    relation = pipeline.copy("public.t")
    execute(dsn, *MOVED)
    assert pipeline.stream(relation).error is None
    names = [name for name in ("id", "body", "v") if f"public.t.{name}" not in excluded]
    rows = [{"id": 20, "body": "x" * 9000, "v": "a"}, {"id": 30, "body": "small", "v": "b"}]
    expected = [{name: row[name] for name in names} for row in rows]
    found = pipeline.lake_rows("public.t").select(names).to_pylist()
    assert sorted(found, key=lambda row: row["id"]) == expected


@pytest.mark.parametrize("unchanged", ["mark", "fill", "look_up"])
def test_events_name_the_value_that_a_row_moved_into_the_filter_lacks(dsn, tmp_path, unchanged):
    received = Received(dsn, tmp_path, TABLES, publication="theirs", publication_mode="use")
    received.begin()
    execute(
        dsn,
        # A row that had the key before has another value.
        "insert into t values (20, repeat('y', 9000), 'old')",
        "update t set id = 40 where id = 20",
        *MOVED,
        "update t set v = 'c' where id = 20",
    )
    received.receive()
    reader = OrderedReader(received.pipeline, make=TypedChanges, unchanged=unchanged)
    found = [change for changes in reader.read() for change in changes if change.table == "public.t"]
    moved, updated = found[-2:]
    assert (moved.op, moved.data, moved.unchanged) == ("insert", {"id": 20, "v": "a"}, ("body",))
    assert (updated.op, updated.data, updated.unchanged) == ("update", {"id": 20, "v": "c"}, ("body",))
