"""A first snapshot that fails before the epoch begins leaves no slot and no publication at the source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError, LakeError
from airflow_provider_pgrepl.replication.app import snapshot, snapshot_tables
from airflow_provider_pgrepl.replication.app.operations.teardown import teardown
from airflow_provider_pgrepl.replication.app.snapshot import take_tables
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy
from airflow_provider_pgrepl.replication.source import slot_creation
from airflow_provider_pgrepl.replication.source.publication import read_identity
from airflow_provider_pgrepl.replication.source.slot import read_slot
from tests.support.kept import Kept
from tests.support.replicated import execute


class StoppedError(Exception):
    """Stands for the end of a run."""


def stop(*_: Any) -> Any:
    raise StoppedError


class NoSpark:
    """The session of a run that copies nothing."""

    def stop(self) -> None:
        pass


@pytest.fixture
def kept(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(snapshot, "start_spark", lambda *_: NoSpark())
    execute(dsn, "create table e (id int primary key, x int)", "insert into e values (1, 1)")
    return Kept(dsn, tmp_path, ("public.*",))


def left(kept: Kept) -> tuple[bool, bool]:
    """Return whether the pipeline's slot and publication exist."""
    with kept.source() as source:
        slot, publication = (
            read_slot(source, kept.pipeline.slot),
            read_identity(source, kept.pipeline.publication),
        )
    return slot is not None, publication is not None


def before_slot(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Call `do` whenever the slot is about to be created, after the publication."""
    original = slot_creation.create_slot

    def create(*arguments: Any, **options: Any) -> Any:
        do()
        return original(*arguments, **options)

    monkeypatch.setattr(f"{snapshot_tables.__name__}.create_slot", create)


def fail_to_begin(kept: Kept) -> Path:
    """Run a snapshot whose changelog cannot be created, because a file is in its place. Return that file."""
    blocking = Path(kept.pipeline.lake_root, "_pgrepl", "changelog")

    def block() -> None:
        blocking.parent.mkdir(parents=True)
        blocking.write_text("in the way")

    with pytest.MonkeyPatch.context() as patched, pytest.raises(LakeError, match="changelog"):
        before_slot(patched, block)
        take_tables(kept.access)
    return blocking


def assert_updates_need_no_key(kept: Kept) -> None:
    """A published table without a key rejects the updates of the application."""
    execute(kept.dsn, "alter table e drop constraint e_pkey", "update e set x = 2")
    execute(kept.dsn, "alter table e add primary key (id)")


def test_changelog_that_cannot_be_created_leaves_no_publication(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocking = fail_to_begin(kept)
    assert left(kept) == (False, False)
    assert_updates_need_no_key(kept)
    blocking.unlink()
    monkeypatch.setattr(SnapshotCopy, "run", stop)
    with pytest.raises(StoppedError):
        take_tables(kept.access)
    assert left(kept) == (True, True), "the epoch has begun"


def test_failed_setup_can_be_torn_down_and_begun_elsewhere(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint of the next run says so."""
    fail_to_begin(kept).unlink()
    former = kept.access
    kept.configure(lake=str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="is recorded with the lake") as caught:
        take_tables(kept.access)
    assert "run pgrepl teardown FILE.json" in caught.value.hint
    teardown(former)
    monkeypatch.setattr(SnapshotCopy, "run", stop)
    with pytest.raises(StoppedError):
        take_tables(kept.access)
    assert left(kept) == (True, True)


@pytest.mark.thorough("test_changelog_that_cannot_be_created_leaves_no_publication")
def test_tables_that_become_unfit_before_the_epoch_begins_leave_no_publication(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_slot(monkeypatch, lambda: execute(kept.dsn, "alter table e drop constraint if exists e_pkey"))
    assert take_tables(kept.access).failed
    assert left(kept) == (False, False)
    execute(kept.dsn, "update e set x = 3")


def test_publication_that_another_session_made_meanwhile_is_kept(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace() -> None:
        name = kept.pipeline.publication
        execute(kept.dsn, f"drop publication {name}", f"create publication {name} for table e")
        stop()

    before_slot(monkeypatch, replace)
    with pytest.raises(StoppedError):
        take_tables(kept.access)
    assert left(kept) == (False, True)
