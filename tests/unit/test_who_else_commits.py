"""Commits of others between a writer's commit and its flush: the ones kept, and the position confirmed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from airflow_provider_pgrepl.errors import FencedError, LakeUnavailableError
from airflow_provider_pgrepl.replication.changelog.layout import DURABLE_APP
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog
from airflow_provider_pgrepl.replication.changelog.remains import read_remains
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, mark
from airflow_provider_pgrepl.replication.delta import single_writer_log
from airflow_provider_pgrepl.replication.delta.log import put_version
from airflow_provider_pgrepl.replication.storage import durable
from tests.support.changelogs import Written, new_changelog
from tests.support.recorded_disk import RecordedDisk, opened_path


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedDisk:
    folder = tmp_path / "disk"
    folder.mkdir()
    return RecordedDisk(folder).install(monkeypatch)


def interrupted(monkeypatch: pytest.MonkeyPatch, between: Callable[[], object]) -> None:
    """Call `between` once, between the receiver's next commit and its flush to disk."""
    put, once = put_version, [between]

    def put_and_be_interrupted(*arguments: Any) -> bool:
        is_done = put(*arguments)
        if is_done and once:
            once.pop()()
        return is_done

    monkeypatch.setattr(single_writer_log, "put_version", put_and_be_interrupted)


def refuse(_: int) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_incomplete_commit_of_another_process_is_named(disk: RecordedDisk) -> None:
    one = Written(new_changelog(disk.folder))
    version = one.writer.version + 1
    (Path(one.uri, "_delta_log") / f"{version:020}.json").write_text('{"add": {"path"')
    one.transaction(100, r7=3)
    with pytest.raises(
        LakeUnavailableError, match=f"version {version} of the log of {one.uri} is incomplete"
    ):
        one.flush()


def test_a_replaced_writer_that_cannot_flush_leaves_its_successors_commits(
    disk: RecordedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, good = Written(new_changelog(disk.folder)), os.fsync
    successors: list[Written] = []

    def replaced() -> None:
        successors.append(Written(one.uri))
        successors[0].transaction(1000, r7=3)
        successors[0].flush()
        monkeypatch.setattr(os, "fsync", refuse)

    interrupted(monkeypatch, replaced)
    one.transaction(100, r7=3)
    with pytest.raises(LakeUnavailableError):
        one.flush()
    with pytest.raises(FencedError):
        ChangelogWriter(one.uri, one.writer.sequence)
    monkeypatch.setattr(os, "fsync", good)
    assert DeltaTable(one.uri).transaction_version(DURABLE_APP) == 1008
    successors[0].transaction(2000, r7=1)
    successors[0].flush()
    assert ChangelogWriter(one.uri).durable_lsn == 2008


def test_unflushable_commit_is_set_aside_despite_later_marker_commit(
    disk: RecordedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Written(new_changelog(disk.folder))
    version, lsn, good = one.writer.version, one.writer.durable_lsn, os.fsync
    failing = f"{version + 1:020d}.json"

    def refuse_ours(descriptor: int) -> None:
        if opened_path(descriptor).name == failing:
            raise OSError(errno.EIO, "Input/output error")
        good(descriptor)

    def marked() -> None:
        """Commit a marker as another process, whose flushes succeed."""
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(os, "fsync", lambda _: None)
            mark(one.uri)

    one.transaction(100, r7=3)
    with monkeypatch.context() as broken:
        interrupted(broken, marked)
        broken.setattr(os, "fsync", refuse_ours)
        with pytest.raises(LakeUnavailableError):
            one.flush()
    assert DeltaTable(one.uri).transaction_version(DURABLE_APP) == lsn
    assert ChangelogWriter(one.uri).durable_lsn == lsn


def test_commit_from_killed_writer_is_flushed_despite_many_later_markers(
    disk: RecordedDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Written(new_changelog(disk.folder))
    with monkeypatch.context() as dead:
        dead.setattr(durable, "flush_commits", lambda *_, **__: None)
        one.transaction(100, r7=3)
        one.flush()
    for _ in range(durable.NEWEST + 1):
        mark(one.uri)
    assert ChangelogWriter(one.uri).durable_lsn == 108
    left = DeltaTable(str(disk.cut_to(tmp_path / "left") / "changelog"))
    assert left.transaction_version(DURABLE_APP) == 108
    assert len(left.file_uris()) == 1


def test_a_marker_says_nothing_of_how_far_the_changelog_was_durable(
    disk: RecordedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Written(new_changelog(disk.folder))
    one.transaction(100, r7=3)
    one.flush()

    def slowly(uri: str) -> DeltaTable:
        table = open_changelog(uri)
        one.transaction(200, r7=3)
        one.flush()
        return table

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("airflow_provider_pgrepl.replication.changelog.writer.open_changelog", slowly)
        mark(one.uri)
    assert read_remains(one.uri, None).durable_lsn == 208


def test_marker_that_cannot_be_flushed_leaves_commits_of_the_receiver_before_it(
    disk: RecordedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, good = Written(new_changelog(disk.folder)), os.fsync
    failing = f"{one.writer.version + 2:020d}.json"

    def overtaken(uri: str) -> DeltaTable:
        table = open_changelog(uri)
        one.transaction(100, r7=3)
        one.flush()
        return table

    def refuse_marker(descriptor: int) -> None:
        if opened_path(descriptor).name == failing:
            raise OSError(errno.EIO, "Input/output error")
        good(descriptor)

    with monkeypatch.context() as broken, pytest.raises(LakeUnavailableError):
        broken.setattr("airflow_provider_pgrepl.replication.changelog.writer.open_changelog", overtaken)
        broken.setattr(os, "fsync", refuse_marker)
        mark(one.uri)
    assert DeltaTable(one.uri).version() == one.writer.version
    assert ChangelogWriter(one.uri).durable_lsn == one.writer.durable_lsn == 108


@pytest.mark.parametrize("is_overtaken", [True, False])
def test_marker_fails_only_if_no_other_commit_moved_the_version(
    disk: RecordedDisk, monkeypatch: pytest.MonkeyPatch, *, is_overtaken: bool
) -> None:
    one = Written(new_changelog(disk.folder))

    def fail(*_: Any, **__: Any) -> None:
        if is_overtaken:
            one.transaction(100, r7=3)
            one.flush()
        raise CommitFailedError("too many attempts")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", fail)
    with nullcontext() if is_overtaken else pytest.raises(LakeUnavailableError):
        mark(one.uri)
