"""Settings are bound to tables as they were selected, whatever renames them before they are copied."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from airflow_provider_pgrepl.errors import SlotError, TableError
from airflow_provider_pgrepl.replication.app import snapshot, snapshot_tables
from airflow_provider_pgrepl.replication.app import snapshot_tables as epoch_beginning
from airflow_provider_pgrepl.replication.app.snapshot import add_tables, resnapshot, take_tables
from airflow_provider_pgrepl.replication.app.snapshot_tables import TableSnapshotter
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy
from airflow_provider_pgrepl.replication.lake.snapshot.table_queue import CopyResult
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.receiver.changelog_feed import PublicationWatch
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import SnapshotHolder
from airflow_provider_pgrepl.replication.source.publication import read_publication
from airflow_provider_pgrepl.replication.source.slot import read_slot
from tests.support.kept import Kept
from tests.support.received import wait_until_seen
from tests.support.replicated import execute

E, OTHER = TableName("public", "e"), TableName("public", "other")
SECRET = "classified"
REPLACED = ("alter table e rename ssn to ssn_plain", "alter table e add ssn text")
SWAPPED = (
    "alter table e rename ssn to tmp",
    "alter table e rename note to ssn",
    "alter table e rename tmp to note",
)
RENAMED = ("alter table e rename ssn to ssn_old",)
RENAMES = pytest.mark.parametrize("ddl", [REPLACED, SWAPPED, RENAMED], ids=["replaced", "swapped", "renamed"])


class NoSpark:
    """The session of a run that copies nothing."""

    def stop(self) -> None:
        pass


@pytest.fixture
def kept(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(snapshot, "start_spark", lambda *_: NoSpark())
    execute(
        dsn,
        "create table e (id int primary key, ssn text, note text)",
        f"insert into e values (1, '{SECRET}', 'n')",
    )
    return Kept(dsn, tmp_path, ("public.*",), exclude_columns=("public.e.ssn",))


def before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, do: Callable[[], object]) -> None:
    """Call `do` before the first call of the function `name` of `owner`."""
    original, is_done = getattr(owner, name), False

    def call(*args: Any, **options: Any) -> Any:
        nonlocal is_done
        if not is_done:
            is_done = True
            do()
        return original(*args, **options)

    monkeypatch.setattr(owner, name, call)


def has_slot(kept: Kept) -> bool:
    with kept.source() as source:
        return read_slot(source, kept.pipeline.slot) is not None


def assert_guarded_after_a_change(kept: Kept, column: str) -> None:
    execute(kept.dsn, f"insert into e (id, {column}) values (2, '{SECRET}')")
    kept.receive()
    assert [row["new"][0] for row in kept.changelog_rows("I")] == ["2"]
    for file in Path(kept.pipeline.lake_root).rglob("*"):
        if file.suffix == ".parquet":
            assert SECRET not in str(pq.read_table(file, partitioning=None).to_pydict()), file


@RENAMES
@pytest.mark.thorough("the same test, of swapped columns", "replaced", "renamed")
def test_column_renamed_while_its_table_waits_for_the_first_copy_stays_out(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, ddl: tuple[str, ...]
) -> None:
    """The copy gives way, and the table is selected again: by its name another column is excluded then."""
    before(monkeypatch, SnapshotCopy, "run", lambda: execute(kept.dsn, *ddl))
    outcome = take_tables(kept.access)
    assert outcome.copied == ()
    assert "is, or may be, public.e.ssn of exclude_columns" in outcome.failed[E].message
    assert kept.states() == {str(E): "errored"}
    assert_guarded_after_a_change(kept, {REPLACED: "ssn_plain", SWAPPED: "note", RENAMED: "ssn_old"}[ddl])


@RENAMES
@pytest.mark.thorough("the same test, of a replaced column", "swapped")
def test_column_renamed_between_selection_and_first_snapshot_stays_out(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, ddl: tuple[str, ...]
) -> None:
    before(monkeypatch, epoch_beginning, "create_slot", lambda: execute(kept.dsn, *ddl))
    outcome = take_tables(kept.access)
    assert outcome.copied == ()
    assert "is, or may be, public.e.ssn of exclude_columns" in outcome.failed[E].message
    assert not has_slot(kept)
    with pytest.raises(TableError, match=r"is, or may be, public\.e\.ssn of exclude_columns"):
        take_tables(kept.access)


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        (REPLACED, "is, or may be, public.e.ssn of exclude_columns"),
        (("alter table e drop constraint e_pkey",), "no primary key"),
    ],
    ids=["column", "key"],
)
def test_added_table_that_is_unfit_by_its_snapshot_leaves_the_publication_again(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, ddl: tuple[str, ...], said: str
) -> None:
    """Without a key, a published table refuses the updates of the application."""
    execute(kept.dsn, "create table other (id int primary key)")
    kept.configure(tables=("public.other",), exclude_columns=())
    kept.take(str(OTHER))
    kept.configure(tables=("public.other", "public.e"), exclude_columns=("public.e.ssn",))
    before(monkeypatch, snapshot_tables, "export_snapshot", lambda: execute(kept.dsn, *ddl))
    outcome = add_tables(kept.access, [E])
    assert said in outcome.failed[E].message
    assert kept.states() == {str(E): "errored", str(OTHER): "streaming"}
    with kept.source() as source:
        found = read_publication(source, kept.pipeline.publication)
    assert found is not None
    assert found.tables == {OTHER}
    execute(kept.dsn, "update e set note = 'm'")


def test_column_renamed_while_executors_are_waited_for_stays_out(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(kept.dsn, "create table other (id int primary key)")
    kept.configure(tables=("public.other",), exclude_columns=())
    kept.take(str(OTHER))
    kept.configure(tables=("public.*",), exclude_columns=("public.e.ssn",))
    before(monkeypatch, snapshot, "_prepare_executors", lambda: execute(kept.dsn, *REPLACED))
    outcome = take_tables(kept.access)
    assert "is, or may be, public.e.ssn of exclude_columns" in outcome.failed[E].message
    assert kept.states() == {str(E): "errored", str(OTHER): "streaming"}


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        (REPLACED, r"column public\.e\.ssn_plain is, or may be"),
        (("alter table e rename to f",), r"column public\.f\.ssn is, or may be"),
        (("create schema s", "alter table e set schema s"), r"column s\.e\.ssn is, or may be"),
        (("alter table p detach partition p_1",), r"name public\.p_1\.ssn there"),
    ],
    ids=["column", "table", "schema", "partition"],
)
def test_settings_are_bound_by_a_run_that_made_no_slot(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, ddl: tuple[str, ...], said: str
) -> None:
    def fails() -> None:
        raise SlotError("no slot could be made in time")

    execute(
        kept.dsn,
        "create table p (id int primary key, ssn text) partition by range (id)",
        "create table p_1 partition of p for values from (0) to (9)",
    )
    kept.configure(tables=("public.*", "s.*"), exclude_columns=("public.e.ssn", "public.p.ssn"))
    before(monkeypatch, epoch_beginning, "create_slot", fails)
    with suppress(SlotError):
        take_tables(kept.access)
    execute(kept.dsn, *ddl)
    with pytest.raises(TableError, match=said):
        take_tables(kept.access)


def test_table_altered_between_selection_and_snapshot_is_selected_again(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks at a table's selection hold for the table that is copied."""
    copied: list[list[str]] = []

    def copy(_: TableSnapshotter, keeper: SnapshotHolder, *__: object, **___: object) -> CopyResult:
        copied.extend([column.name for column in relation.columns] for relation in keeper.relations)
        return CopyResult(done=dict.fromkeys([E], 1))

    before(
        monkeypatch, epoch_beginning, "create_slot", lambda: execute(kept.dsn, "alter table e add more int")
    )
    monkeypatch.setattr(TableSnapshotter, "copy", copy)
    examine, examined = TableSnapshotter.examine, []

    def look(*args: Any) -> Any:
        examined.append(examine(*args))
        return examined[-1]

    monkeypatch.setattr(TableSnapshotter, "examine", look)
    outcome = take_tables(kept.access)
    assert (outcome.copied, outcome.failed) == ((E,), {})
    assert copied == [["id", "ssn", "note", "more"]]
    assert len(examined) == 1


def test_column_selected_while_a_receiver_runs_is_hidden_by_it(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message had the column by the name that it had at the selection. The change comes before the
    receiver next looks how its tables are published, for which it reads the index again."""
    monkeypatch.setattr(PublicationWatch, "look", lambda _: None)
    kept.take(str(E))
    with kept.receiving() as receiver:
        execute(kept.dsn, "insert into e values (3, null, 'n')")
        wait_until_seen(receiver, kept.source_lsn())
        execute(kept.dsn, "alter table e drop column ssn", "alter table e rename note to ssn")
        before(monkeypatch, snapshot_tables, "export_snapshot", lambda: execute(kept.dsn, *RENAMED))
        outcome = resnapshot(kept.access, [E])
        assert "is, or may be, public.e.ssn of exclude_columns" in outcome.failed[E].message
        execute(kept.dsn, f"insert into e (id, ssn_old) values (2, '{SECRET}')")
        wait_until_seen(receiver, kept.source_lsn())
    assert [row["new"] for row in kept.changelog_rows("I")] == [["3", None, "n"], ["2", None]]
