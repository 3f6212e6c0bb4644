"""A copy that has not ended is continued: the files of ranges with the same rows stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.teardown import teardown
from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.lake.snapshot.copy_report import TableCopy
from tests.support.in_process import InProcess
from tests.support.replicated import execute

T, OTHER = "public.t", "public.other"
ROWS = 12_000
KEPT = re.compile(r"public\.t: (\d+) of (\d+) ranges are those of an earlier copy")
END_KEEPERS = """
select pg_terminate_backend(pid) from pg_stat_activity
where datname = current_database() and application_name like '%keeper%'
"""


@pytest.fixture
def replicated(spark, dsn, tmp_path) -> InProcess:
    execute(
        dsn,
        "create table other (id int primary key)",
        "create table t (id int primary key, v text, d date) with (autovacuum_enabled = off)",
        f"insert into t select g, repeat('v', 100), '2026-01-01' from generate_series(1, {ROWS}) g",
    )
    return InProcess(spark, dsn, tmp_path, (T, OTHER), snapshot_range_bytes=1 << 16)


@pytest.fixture
def errored(replicated, dsn) -> InProcess:
    """The same, with a table whose copy has failed at its last row, which is right now."""
    execute(dsn, f"update t set d = 'infinity' where id = {ROWS}")
    assert replicated.run("snapshot") != 0
    assert replicated.states()[T].error == "ValueRangeError"
    execute(dsn, f"update t set d = null where id = {ROWS}")
    return replicated


def when_ranges_are_copied(
    number: int, then: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> list[TableCopy]:
    """Call `then` when this many ranges of a copy are finished, once. Return the list of all copies."""
    finish, seen, copies = TableCopy.finish, set[int](), list[TableCopy]()

    def counted(copy: TableCopy, place: int, files: Any) -> None:
        finish(copy, place, files)
        if copy not in copies:
            copies.append(copy)
        is_first = len(seen) < number
        seen.add(place)
        if is_first and len(seen) == number:
            then()

    monkeypatch.setattr(TableCopy, "finish", counted)
    return copies


def data_files(replicated: InProcess) -> set[str]:
    return {path.name for path in Path(replicated.lake_path(T)).glob("*.parquet")}


def open_files(replicated: InProcess) -> set[str]:
    """The files of the newest version."""
    return {uri.rpartition("/")[2] for uri in open_table(replicated.lake_path(T)).file_uris()}


def records(replicated: InProcess) -> list[Path]:
    return list(Path(f"{replicated.pipeline.lake_root}/_pgrepl/copies").rglob("*.json"))


def kept(replicated: InProcess) -> list[tuple[int, int]]:
    return [(int(some), int(of)) for some, of in KEPT.findall(replicated.log.read_text())]


def assert_whole(replicated: InProcess) -> None:
    """The lake equals the source, and nothing of any copy is left."""
    replicated.catch_up()
    replicated.assert_equal(T)
    assert not records(replicated)


def test_copy_whose_snapshot_is_lost_keeps_ranges_that_have_not_changed(replicated, dsn, monkeypatch):
    replicated.configure(tables=(T,))

    def change_and_lose() -> None:
        execute(
            dsn,
            "update t set v = 'changed' where id = 1",
            "delete from t where id = 1000",
            "insert into t values (0, 'new', null)",
            END_KEEPERS,
        )

    copies = when_ranges_are_copied(20, change_and_lose, monkeypatch)
    replicated.snapshot()
    ((some, of),) = kept(replicated)
    # The rest of the first two, which have changed, and ranges that were copied later are not among them.
    assert 10 <= some < of - 2
    # A range without rows has no file: changed rows may have fitted into pages of earlier ones.
    rows = copies[-1]._rows
    assert len(rows) == of
    assert len(data_files(replicated)) == sum(count > 0 for count in rows.values())
    assert_whole(replicated)


def test_table_that_errored_at_one_value_keeps_the_other_ranges_for_its_next_copy(errored):
    before = data_files(errored)
    assert records(errored)
    errored.resnapshot(T)
    ((some, of),) = kept(errored)
    assert of - 3 <= some < of
    assert len(before & data_files(errored)) == some
    assert_whole(errored)


def test_epoch_that_begins_again_since_no_table_was_copied_keeps_ranges(replicated, dsn):
    replicated.configure(tables=(T,))
    execute(dsn, f"update t set d = 'infinity' where id = {ROWS}")
    assert replicated.run("snapshot") != 0
    execute(dsn, f"update t set d = null where id = {ROWS}")
    replicated.snapshot()
    ((some, of),) = kept(replicated)
    assert of - 3 <= some < of
    assert_whole(replicated)


def test_new_epoch_on_request_keeps_no_range(errored, dsn):
    before = data_files(errored)
    assert errored.run("snapshot", "--new-epoch") == 0, errored.log_tail()
    assert not kept(errored)
    assert not before & open_files(errored)
    assert_whole(errored)


def test_epoch_after_a_teardown_keeps_no_range(errored):
    before = data_files(errored)
    teardown(Access(errored.pipeline, errored.dsn, errored.dsn))
    errored.snapshot()
    assert not kept(errored)
    assert not before & open_files(errored)
    assert_whole(errored)


@pytest.mark.parametrize(
    "change", [{"text_columns": ("public.t.v",)}, {"commit_ts_column": False}, {"history": True}]
)
def test_ranges_of_other_settings_are_not_kept(errored, change):
    before = data_files(errored)
    errored.configure(**change)
    errored.resnapshot(T)
    assert not kept(errored)
    assert not before & open_files(errored)
    assert_whole(errored)


def test_ranges_whose_files_are_gone_are_copied(errored):
    before = sorted(data_files(errored))
    Path(errored.lake_path(T), before[0]).unlink()
    Path(errored.lake_path(T), before[1]).write_bytes(b"torn")
    Path(f"{records(errored)[0].parent}/torn.json").write_bytes(b'{"layout": 1, "ranges"')
    errored.resnapshot(T)
    ((some, _),) = kept(errored)
    assert some <= len(before) - 2
    assert_whole(errored)
