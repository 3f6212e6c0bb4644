"""A first snapshot that fails leaves no slot and no publication at the source, or an epoch that continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError, LakeError, SlotError, TableError
from airflow_provider_pgrepl.replication.app import snapshot, snapshot_tables
from airflow_provider_pgrepl.replication.app.copy_states import CopyStates
from airflow_provider_pgrepl.replication.app.operations.teardown import teardown
from airflow_provider_pgrepl.replication.app.snapshot import (
    add_tables,
    begin_new_epoch,
    resnapshot,
    take_over,
    take_tables,
)
from airflow_provider_pgrepl.replication.app.start_check import check_snapshot
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import RangeCopies
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
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


E = TableName("public", "e")


def fail_all_copies(
    kept: Kept, run: Callable[[], snapshot_tables.SnapshotResult] | None = None
) -> EpochRecord:
    """Run a snapshot that begins an epoch, and whose copies all fail. Return the record of the epoch."""

    def fail(*_: Any) -> Any:
        raise TableError("cannot be copied")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RangeCopies, "run", fail)
        result = run() if run else take_tables(kept.access)
    assert E in result.failed
    assert not result.copied
    return read_epoch(kept.changelog)


def use_publication(kept: Kept) -> None:
    """Create a publication, as a person does, and name it in the pipeline file: `--take-over` requires it."""
    execute(kept.dsn, "create publication other for table e")
    kept.configure(publication="other", publication_mode="use")


def confirmed(kept: Kept, slot: str = "") -> LSN:
    with kept.source() as source:
        found = read_slot(source, slot or kept.pipeline.slot)
    assert found is not None
    assert found.confirmed_flush_lsn is not None
    return found.confirmed_flush_lsn


def copied_into(kept: Kept, monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> EpochRecord:
    """Call `run` until it copies the first rows, and return the epoch into which it would copy them."""
    monkeypatch.setattr(SnapshotCopy, "run", stop)
    with pytest.raises(StoppedError):
        run()
    return read_epoch(kept.changelog)


@pytest.mark.parametrize(
    "command",
    [
        lambda kept: take_tables(kept.access),
        lambda kept: resnapshot(kept.access, [E]),
        lambda kept: resnapshot(kept.access, [E], compares=True),
        lambda kept: add_tables(kept.access, [E]),
        lambda kept: take_over(kept.access, "nobody"),
    ],
    ids=["plain", "--tables", "--resync", "--add", "--take-over"],
)
def test_epoch_whose_copies_all_failed_continues_where_it_began(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, command: Callable[[Kept], object]
) -> None:
    """Another epoch would leave out the changes that were committed, or received, since the first began."""
    use_publication(kept)
    began = fail_all_copies(kept)
    execute(kept.dsn, "insert into e values (2, 2)")
    assert copied_into(kept, monkeypatch, lambda: command(kept)) == began
    assert confirmed(kept) == began.consistent_point


def test_epoch_without_its_publication_begins_again(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    began = fail_all_copies(kept)
    execute(kept.dsn, f"drop publication {kept.pipeline.publication}")
    assert copied_into(kept, monkeypatch, lambda: take_tables(kept.access)).epoch == began.epoch + 1


@pytest.mark.thorough("test_epoch_without_its_publication_begins_again")
def test_epoch_with_another_publication_or_on_request_begins_again(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = fail_all_copies(kept)
    use_publication(kept)
    later = copied_into(kept, monkeypatch, lambda: take_tables(kept.access))
    assert (later.epoch, later.publication) == (began.epoch + 1, "other")
    assert copied_into(kept, monkeypatch, lambda: begin_new_epoch(kept.access)).epoch == began.epoch + 2


@pytest.fixture
def other(kept: Kept) -> Iterator[str]:
    """The slot of another program, which it can advance."""
    name = f"other_{kept.pipeline.slot}"
    yield name
    execute(kept.dsn, f"select pg_drop_replication_slot('{name}')")


def test_epoch_that_began_after_another_slot_takes_it_over(
    kept: Kept, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_publication(kept)
    execute(kept.dsn, f"select pg_create_logical_replication_slot('{other}', 'pgoutput')")
    execute(kept.dsn, "insert into e values (2, 2)")
    began = fail_all_copies(kept)
    taken = copied_into(kept, monkeypatch, lambda: take_over(kept.access, other))
    assert taken.consistent_point == confirmed(kept, other) < began.consistent_point
    assert copied_into(kept, monkeypatch, lambda: take_over(kept.access, other)) == taken


def test_epoch_gives_way_to_a_slot_that_was_read_on(
    kept: Kept, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other program was started again, and has published what the failed run had taken over."""
    use_publication(kept)
    execute(kept.dsn, f"select pg_create_logical_replication_slot('{other}', 'pgoutput')")
    began = fail_all_copies(kept, lambda: take_over(kept.access, other))
    assert began.consistent_point == confirmed(kept, other)
    execute(kept.dsn, "insert into e values (2, 2)")
    execute(kept.dsn, f"select pg_replication_slot_advance('{other}', pg_current_wal_insert_lsn())")
    taken = copied_into(kept, monkeypatch, lambda: take_over(kept.access, other))
    assert taken.consistent_point == confirmed(kept, other) > began.consistent_point


def test_epoch_keeps_its_slot_if_the_named_one_cannot_be_taken_over(kept: Kept, other: str) -> None:
    use_publication(kept)
    execute(kept.dsn, f"select pg_create_physical_replication_slot('{other}')")
    began = fail_all_copies(kept)
    with pytest.raises(SlotError, match="cannot be taken over"):
        take_over(kept.access, other)
    assert confirmed(kept) == began.consistent_point
    assert read_epoch(kept.changelog) == began


def test_epoch_keeps_its_slot_if_a_new_one_could_not_have_its_table(kept: Kept, other: str) -> None:
    use_publication(kept)
    execute(kept.dsn, f"select pg_create_logical_replication_slot('{other}', 'pgoutput')")
    execute(kept.dsn, "insert into e values (2, 2)")
    began = fail_all_copies(kept)
    execute(kept.dsn, "alter table e drop constraint e_pkey")
    with pytest.raises(TableError, match="it has no primary key"):
        take_over(kept.access, other)
    assert confirmed(kept) == began.consistent_point


def test_epoch_whose_beginning_was_killed_copies_tables_of_the_epoch_before(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are still recorded as streaming."""
    kept.configure(lake_tables="none")
    assert take_tables(kept.access).copied == (E,)
    with monkeypatch.context() as patched, pytest.raises(StoppedError):
        patched.setattr(CopyStates, "begin", stop)
        begin_new_epoch(kept.access)
    began = read_epoch(kept.changelog)
    assert began.epoch == 2
    assert take_tables(kept.access).copied == (E,)
    assert read_epoch(kept.changelog) == began
    assert take_tables(kept.access).copied == ()


def test_lost_table_keeps_no_other_one_from_being_copied(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Airflow as on the command line."""
    execute(kept.dsn, "create table f (id int primary key)")
    kept.configure(tables=("public.e", "public.f"))
    fail_all_copies(kept)
    execute(kept.dsn, "drop table f")
    check_snapshot(kept.access)
    copied_into(kept, monkeypatch, lambda: take_tables(kept.access))
