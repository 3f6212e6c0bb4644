"""Marking rows where others write too: their commits, their checkpoints, and a log that was cleaned."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, QueryBuilder, Transaction, write_deltalake

from airflow_provider_pgrepl.replication.changelog.reader import ChangelogFile
from airflow_provider_pgrepl.replication.lake.apply.merge_task import MergeJob
from airflow_provider_pgrepl.replication.lake.delta import commit
from airflow_provider_pgrepl.replication.lake.delta import live_files as log
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version, live_files
from airflow_provider_pgrepl.replication.lake.delta.statistics import declaration
from airflow_provider_pgrepl.replication.lake.files.compaction import compact
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import SliceCommit
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from tests.support.changes import work_of

APP = "p:1"
SCHEMA = pa.schema([("id", pa.int64()), ("d", pa.date32())])
FAR = pa.scalar(3_000_000, pa.int32()).cast(pa.date32())
"""A day that not every reader's JSON takes: with it the column has no bounds any more."""


def rows_of(*ids: int, day: pa.Scalar | date = date(2020, 1, 1)) -> pa.Table:
    days = pa.array([day.value] * len(ids), pa.int32()) if isinstance(day, pa.Scalar) else None
    column = pa.array([day] * len(ids), pa.date32()) if days is None else days.cast(pa.date32())
    return pa.table([pa.array(ids, pa.int64()), column], SCHEMA)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """Make a table of three files with a hundred ids each, and return its path."""
    for first in (0, 100, 200):
        write_deltalake(
            str(tmp_path / "t"),
            rows_of(*range(first, first + 100)),
            mode="append",
            configuration=declaration(["id", "d"]) if not first else None,
            commit_properties=CommitProperties(app_transactions=[Transaction(APP, 5)]),
        )
    return str(tmp_path / "t")


def ids(uri: str) -> list[int]:
    found = QueryBuilder().register("t", DeltaTable(uri)).execute("select id from t order by id")
    return list(pa.table(found.read_all())["id"].to_pylist())


def mark(table: DeltaTable, gone: list[int], comes: pa.Table, lsn: int = 6) -> None:
    commit = SliceCommit(table, APP, LSN(lsn), None, 1, "merge_on_read")

    def replace() -> None:
        found = FileRows(table)
        commit.replace(found, found.find(rows_of(*gone).select(["id"])), comes, "mark")

    commit.make(replace)


def meanwhile(monkeypatch: pytest.MonkeyPatch, what: Callable[[str], Any]) -> None:
    """Call `what` once, right after the next commit of this package, as another writer."""
    put, done = getattr(commit, "put_version"), list[bool]()  # noqa: B009 - it is not its to export

    def put_and_lose(uri: str, *commit: Any) -> bool:
        is_ours = put(uri, *commit)
        if not done:
            done.append(True)
            what(uri)
        return is_ours

    monkeypatch.setattr(commit, "put_version", put_and_lose)


def optimize(uri: str) -> None:
    assert DeltaTable(uri).optimize.compact()["numFilesRemoved"] == 3


def test_an_optimize_behind_the_commit_of_bounds_makes_no_row_twice(uri, monkeypatch):
    meanwhile(monkeypatch, optimize)
    mark(DeltaTable(uri), [3, 4, 5], rows_of(3, 4, day=FAR))
    assert ids(uri) == [number for number in range(300) if number != 5]


def test_an_optimize_behind_the_commit_of_bounds_keeps_compaction_from_its_files(uri, monkeypatch):
    mark(DeltaTable(uri), [3], rows_of(3, day=FAR))
    # Declare the bounds now, as for a table of an earlier version, which did not declare them.
    commit._declare_bounds(DeltaTable(uri), APP, ["id", "d"])
    meanwhile(monkeypatch, lambda uri: DeltaTable(uri).optimize.compact())
    compact(DeltaTable(uri), APP, at_least=2, gone_share=0.0)
    assert ids(uri) == list(range(300))


def with_fields_of_sparks_checkpoint(uri: str) -> None:
    """Tags, and a parsed copy of the statistics, as its own writer adds them."""
    DeltaTable(uri).create_checkpoint()
    (file,) = Path(uri, "_delta_log").glob("*.checkpoint.parquet")
    checkpoint = pq.read_table(file)
    actions = checkpoint.to_pylist()
    old = checkpoint.schema.field("add").type
    parsed = pa.struct([("numRecords", pa.int64()), ("maxValues", pa.struct([("d", pa.date32())]))])
    kind = pa.struct([*(old.field(number) for number in range(old.num_fields)), ("stats_parsed", parsed)])
    for action in actions:
        if action["add"]:
            action["add"]["tags"] = [("made", "elsewhere")]
            action["add"]["stats_parsed"] = {"numRecords": 100, "maxValues": {"d": date(2020, 1, 1)}}
    schema = pa.schema(
        [pa.field("add", kind) if field.name == "add" else field for field in checkpoint.schema]
    )
    pq.write_table(pa.Table.from_pylist(actions, schema), file)


def test_a_checkpoint_with_more_than_a_commit_holds_is_read_as_one(uri):
    with_fields_of_sparks_checkpoint(uri)
    log._followed.clear()
    mark(DeltaTable(uri), [3], rows_of())
    log._followed.clear()
    assert ids(uri) == [number for number in range(300) if number != 3]
    (marked,) = [file for file in live_files(DeltaTable(uri)).values() if file.vector]
    assert marked.action["tags"] == {"made": "elsewhere"}
    assert "stats_parsed" not in marked.action


def test_a_log_that_was_cleaned_beyond_what_this_process_has_read_is_read_anew(uri):
    live_files(DeltaTable(uri))
    for number in range(3):
        write_deltalake(
            uri,
            rows_of(300 + number),
            mode="append",
            commit_properties=CommitProperties(app_transactions=[Transaction(APP, 6 + number)]),
        )
    DeltaTable(uri).create_checkpoint()
    for version in (0, 1, 3, 4):
        Path(uri, "_delta_log", f"{version:020d}.json").unlink()
    table = DeltaTable(uri)
    assert len(live_files(table)) == 6
    assert app_version(table, APP) == table.transaction_version(APP) == 8


def test_app_versions_are_those_of_the_version_at_which_the_handle_stands(uri):
    for number in range(5):
        mark(DeltaTable(uri), [number], rows_of(number), lsn=10 + number)
    for version in (7, 3, 6, 2, 0):
        table = DeltaTable(uri, version=version)
        assert app_version(table, APP) == table.transaction_version(APP)
        assert app_version(table, "another") is None


def test_a_checkpoint_that_fails_is_no_other_writer(uri, monkeypatch, caplog):
    monkeypatch.setattr(commit, "CHECKPOINT_EVERY", 1)

    def fail(_: DeltaTable) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(DeltaTable, "create_checkpoint", fail)
    table = DeltaTable(uri)
    mark(table, [3], rows_of())
    assert app_version(table, APP) == 6
    assert "no checkpoint could be written" in caplog.text


def test_a_plan_has_not_read_what_lies_behind_its_end():
    files = [ChangelogFile("a", 1, LSN(100), LSN(200), 1, 9), ChangelogFile("b", 1, LSN(300), LSN(350), 1, 9)]
    job = MergeJob.plan(work_of(7), LSN(5), files, (3, LSN(300)), 1 << 20)
    assert job.reach_lsn == 299
