"""A run that ends before its copies leaves no table `snapshotting`, and none published that was not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import (
    PgReplError,
    PrivilegeError,
    PublicationError,
    SnapshotError,
    SourceConnectionError,
)
from airflow_provider_pgrepl.replication.app import snapshot_tables
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from airflow_provider_pgrepl.replication.app.snapshot_tables import TableSnapshotter
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.snapshot.table_queue import CopyResult
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier
from airflow_provider_pgrepl.replication.source.preflight.selection import RequestedTables
from airflow_provider_pgrepl.replication.source.publication import read_publication
from airflow_provider_pgrepl.replication.source.slot_creation import export_snapshot
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.kept import A, B, Kept, kept_tables
from tests.support.replicated import execute

C = "public.c"
NO_SLOT = SnapshotError("no slot is free")


@pytest.fixture
def kept(dsn, tmp_path):
    kept = kept_tables(dsn, tmp_path)
    execute(dsn, "create table c (id int primary key)")
    return kept


@pytest.fixture
def snapshotter(kept: Kept) -> Iterator[TableSnapshotter]:
    def spark() -> Any:
        raise AssertionError("nothing is copied")

    with kept.access.state_db("snapshot") as state_db, kept.source() as source:
        yield TableSnapshotter(kept.access, source, state_db, spark)


def take(kept: Kept, snapshotter: TableSnapshotter, *tables: str) -> PgReplError:
    """The error by which a run on these tables ends."""
    with pytest.raises(PgReplError) as caught:
        snapshotter.take(
            [TableName.parse(table) for table in tables],
            RequestedTables(),
            read_epoch(kept.changelog),
        )
    return caught.value


def published(kept: Kept) -> set[str]:
    with kept.source() as source:
        found = read_publication(source, kept.pipeline.publication)
    assert found is not None
    return {str(table) for table in found.tables}


def failing(error: BaseException, after: int = 0) -> Callable[..., Any]:
    """A snapshot export that fails after some that did not."""
    calls = iter(range(9))

    def exported(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= after:
            raise error
        return export_snapshot(*arguments, **options)

    return exported


def test_tables_are_errored_with_the_cause_when_a_later_export_fails(kept, snapshotter, monkeypatch):
    monkeypatch.setattr(snapshot_tables, "_PAUSES_S", (0.0,) * 4)
    monkeypatch.setattr(snapshot_tables, "export_snapshot", failing(NO_SLOT, after=1))
    lost = SnapshotError("the connection that kept the snapshot was lost")
    monkeypatch.setattr(TableSnapshotter, "copy", lambda *_: CopyResult(lost=lost))
    assert take(kept, snapshotter, A, C) is NO_SLOT
    assert kept.states() == {A: "errored", B: "streaming", C: "errored"}
    assert [(kept.record(table).error, kept.record(table).reason) for table in (A, C)] == [
        ("SnapshotError", "no slot is free")
    ] * 2
    assert published(kept) == {A, B, C}


@pytest.mark.parametrize("error", [SourceConnectionError("the source is away"), KeyboardInterrupt()])
@pytest.mark.thorough("the same test, of a source that is away", "error1")
def test_tables_are_errored_when_the_copies_of_a_run_stop(kept, snapshotter, monkeypatch, error):
    def stops(*_: object) -> None:
        raise error

    monkeypatch.setattr(TableSnapshotter, "copy", stops)
    with pytest.raises(type(error)):
        snapshotter.take([TableName.parse(A)], RequestedTables(), read_epoch(kept.changelog))
    assert kept.states()[A] == "errored"
    assert kept.record(A).hint


@pytest.mark.thorough("test_tables_are_errored_with_the_cause_when_a_later_export_fails")
def test_table_that_an_earlier_run_left_snapshotting_is_errored_when_no_snapshot_can_be_made(
    kept, snapshotter, monkeypatch
):
    kept.set_states(A, TableState.SNAPSHOTTING)
    monkeypatch.setattr(snapshot_tables, "export_snapshot", failing(NO_SLOT))
    take(kept, snapshotter, A)
    assert kept.record(A).reason == "no slot is free"


@contextmanager
def unchanged(kept: Kept) -> Iterator[None]:
    before = kept.states(), published(kept)
    yield
    assert (kept.states(), published(kept)) == before


@pytest.mark.parametrize("error", [NO_SLOT, KeyboardInterrupt()])
@pytest.mark.thorough("the same test, of a slot that is not free", "error1")
def test_new_and_removed_tables_are_as_before_when_no_snapshot_can_be_made(
    kept, snapshotter, monkeypatch, error
):
    remove_tables(kept.access, [B])
    monkeypatch.setattr(snapshot_tables, "export_snapshot", failing(error))
    with unchanged(kept), pytest.raises(type(error)):
        snapshotter.take(
            [TableName.parse(B), TableName.parse(C)], RequestedTables(), read_epoch(kept.changelog)
        )
    assert kept.record(B).membership == "removed"


def test_new_table_leaves_the_publication_when_the_walsender_cannot_be_renewed(
    kept, snapshotter, monkeypatch
):
    def fails(*_: object) -> None:
        raise PrivilegeError("the role may not end sessions")

    monkeypatch.setattr(snapshot_tables, "renew_walsender", fails)
    with unchanged(kept):
        take(kept, snapshotter, C)


@pytest.mark.thorough("test_new_and_removed_tables_are_as_before_when_no_snapshot_can_be_made")
def test_tables_are_as_before_when_a_state_cannot_be_recorded(kept, snapshotter, monkeypatch):
    kept.set_states(A, TableState.PAUSED)
    set_state = type(snapshotter.state_db).set_state

    def fails(state_db: Any, name: str, table: TableName, state: TableState, **more: Any) -> None:
        if state is TableState.SNAPSHOTTING:
            raise SourceConnectionError("the state database is away")
        set_state(state_db, name, table, state, **more)

    monkeypatch.setattr(type(snapshotter.state_db), "set_state", fails)
    for table in (A, C):
        with unchanged(kept):
            take(kept, snapshotter, table)


@pytest.fixture
def renewed(monkeypatch) -> list[str]:
    """The slots whose walsenders are renewed by runs that can make no snapshot."""
    slots = list[str]()
    monkeypatch.setattr(snapshot_tables, "renew_walsender", lambda _, slot: slots.append(slot))
    monkeypatch.setattr(snapshot_tables, "export_snapshot", failing(NO_SLOT))
    return slots


def test_walsender_is_renewed_for_a_table_that_a_killed_run_published(kept, snapshotter, renewed):
    """The run may have been killed between publishing the table and renewing the walsender."""
    execute(kept.dsn, f"alter publication {kept.pipeline.publication} add table c")
    take(kept, snapshotter, A)
    assert renewed == []
    take(kept, snapshotter, C)
    assert renewed == [kept.pipeline.slot]


@pytest.mark.parametrize(
    "states",
    [
        (TableState.PENDING,),
        (TableState.PENDING, TableState.ERRORED),
        (TableState.PENDING, TableState.SNAPSHOTTING),
    ],
    ids=lambda states: states[-1].value,
)
def test_walsender_is_renewed_for_a_recorded_table_that_its_owner_published(
    kept, snapshotter, renewed, states
):
    """An earlier run has recorded the table without publishing it. The owner of the publication takes no
    lock, so the walsender may have decided, for a transaction that was open, that it is not published."""
    kept.set_states(C, *states)
    execute(kept.dsn, f"alter publication {kept.pipeline.publication} add table c")
    take(kept, snapshotter, A, C)
    assert renewed == [kept.pipeline.slot]


def disown(kept: Kept) -> None:
    """Record what an epoch records that began with `publication_mode: use`. The file has `create` by now."""
    execute(kept.dsn, "update _pgrepl.pipelines set publication_owned = false")


def test_table_is_not_added_to_a_publication_that_the_pipeline_does_not_own(kept, snapshotter):
    disown(kept)
    with unchanged(kept):
        error = take(kept, snapshotter, C)
    assert isinstance(error, PublicationError)
    assert "lacks public.c, and was not made by" in error.message
    name = quote_identifier(kept.pipeline.publication)
    for part in ('`publication_mode` to "use"', f"ALTER PUBLICATION {name} ADD TABLE public.c"):
        assert part in error.hint


def test_table_is_not_dropped_from_a_publication_that_the_pipeline_does_not_own(
    kept, snapshotter, monkeypatch, caplog
):
    disown(kept)
    execute(kept.dsn, f"alter publication {kept.pipeline.publication} add table c")
    monkeypatch.setattr(snapshot_tables, "export_snapshot", failing(NO_SLOT))
    with unchanged(kept):
        take(kept, snapshotter, C)
    assert "was not made by" in caplog.text
