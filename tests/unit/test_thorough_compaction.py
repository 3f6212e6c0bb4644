"""lake/files/compaction.py: a table in as few files as possible, while other processes write it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import FencedError
from airflow_provider_pgrepl.replication.lake.delta.table import open_table, read_position
from airflow_provider_pgrepl.replication.lake.files import compaction
from airflow_provider_pgrepl.replication.lake.files.compaction import (
    Compaction,
    FileStatistics,
    compact,
    compact_thoroughly,
)
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import SliceCommit
from tests.support.model import Change
from tests.unit.test_merge_on_read import APP, Lake, by_datafusion


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    found = Lake(tmp_path)
    for key in range(6):
        found.update(key, key + 10, value=f"n{key}")
    return found


def thoroughly(lake: Lake, is_over: Any = lambda: False, wait: Any = lambda _: None) -> Compaction:
    return compact_thoroughly(lake.uri, APP, ["id"], is_over, wait)


def files_of(lake: Lake) -> FileStatistics:
    return FileStatistics.table(open_table(lake.uri))


def test_small_files_and_marked_rows_are_gone(lake: Lake) -> None:
    before, position = files_of(lake), read_position(open_table(lake.uri), APP)
    assert (before.files, before.marked) == (7, 1)
    done = thoroughly(lake)
    assert (done.before, done.after) == (before, files_of(lake))
    assert (done.after.files, done.after.marked, done.is_busy, done.is_left) == (1, 0, False, False)
    assert by_datafusion(lake.uri) == lake.expected
    assert read_position(open_table(lake.uri), APP) == position
    version = open_table(lake.uri).version()
    assert thoroughly(lake).after == done.after
    assert open_table(lake.uri).version() == version, "nothing was left to do"


def test_files_of_many_rows_are_small_only_where_all_is_to_be_joined(lake: Lake) -> None:
    """A snapshot of a large table leaves such files: compacting them with the changes would rewrite the whole
    table."""
    assert compact(open_table(lake.uri), APP, at_least=2, gone_share=1.0, row_bytes=16 << 20) == 0
    assert compact(open_table(lake.uri), APP, at_least=2, gone_share=1.0, row_bytes=0) == 7


def test_nothing_begins_when_it_is_time_to_end(lake: Lake) -> None:
    version = open_table(lake.uri).version()
    done = thoroughly(lake, is_over=lambda: True)
    assert (done.is_left, done.before) == (True, done.after)
    assert open_table(lake.uri).version() == version


def before_each_commit(monkeypatch: pytest.MonkeyPatch, what: Any) -> None:
    def late(table: DeltaTable, app: str, *how: Any, **more: Any) -> int:
        what()
        return compact(table, app, *how, **more)

    monkeypatch.setattr(compaction, "compact", late)


def test_a_table_whose_writer_is_faster_each_time_is_busy(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_each_commit(monkeypatch, lambda: lake.update(50))
    waits: list[float] = []
    done = thoroughly(lake, wait=waits.append)
    assert (done.is_busy, waits) == (True, [0.5, 1.0, 2.0, 4.0, 8.0])
    assert by_datafusion(lake.uri) == lake.expected


def test_a_table_that_is_written_now_and_then_is_compacted(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter([True, True])
    before_each_commit(monkeypatch, lambda: next(turns, False) and lake.update(50))
    done = thoroughly(lake)
    assert (done.is_busy, done.after.marked) == (False, 0)
    assert by_datafusion(lake.uri) == lake.expected


def test_thorough_compaction_ends_within_two_rounds_despite_new_commits(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []

    def busy(table: DeltaTable, app: str, *how: Any, **more: Any) -> int:
        went = compact(table, app, *how, **more)
        rounds.append(went)
        lake.update(70)
        return went

    monkeypatch.setattr(compaction, "compact", busy)
    thoroughly(lake)
    assert len(rounds) <= 2


# Its effect on the table's writer.


def test_a_writer_that_merges_takes_a_compaction_by_another_process_for_none(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that it has looked up have moved, as after a commit of another writer."""
    lake.options = lake.options.__class__(**{**vars(lake.options), "policy": rewriting(lake)})
    real, tries = SliceCommit._replace, []

    def replace(commit: SliceCommit, *what: Any) -> None:
        tries.append(commit)
        if len(tries) == 1:
            thoroughly(lake)
        real(commit, *what)

    monkeypatch.setattr(SliceCommit, "_replace", replace)
    lake.update(3, value="merged")
    assert len(tries) == 2
    assert by_datafusion(lake.uri) == lake.expected


def rewriting(lake: Lake) -> Any:
    policy = lake.options.policy
    return policy.__class__(**{**vars(policy), "merge": "rewrite"})


def test_a_writer_that_merges_is_fenced_by_another_as_before(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.options = lake.options.__class__(**{**vars(lake.options), "policy": rewriting(lake)})
    real, turns = SliceCommit._replace, iter([True])

    def replace(commit: SliceCommit, *what: Any) -> None:
        if next(turns, False):
            lake.apply(Change("U", new=("9", "theirs"), commit_lsn=lake.lsn + 500))
        real(commit, *what)

    monkeypatch.setattr(SliceCommit, "_replace", replace)
    with pytest.raises(FencedError):
        lake.update(3, value="ours")
    assert by_datafusion(lake.uri)[3] == "n3"


def test_both_at_once_lose_nothing(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    ended = threading.Event()

    def again_and_again() -> None:
        while not ended.is_set():
            thoroughly(lake, wait=ended.wait)

    worker = threading.Thread(target=again_and_again)
    worker.start()
    for key in range(40):
        lake.update(key, (key * 7) % 100, value=f"n{key}")
    ended.set()
    worker.join()
    assert by_datafusion(lake.uri) == lake.expected
    assert pa.table(open_table(lake.uri).get_add_actions()).num_rows
