"""The history of a table: where it lies, what may have one, and what a snapshot does to it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from airflow_provider_pgrepl.errors import ConfigError, FencedError, LakeTableError, TruncatedError
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.lake.history import apply as history_apply
from airflow_provider_pgrepl.replication.lake.history.apply import apply_with_history, end_all_versions
from airflow_provider_pgrepl.replication.lake.history.table import (
    check_not_hidden,
    history_key,
    history_path,
    history_uri,
    path_of,
    prepare_history,
)
from airflow_provider_pgrepl.replication.lake.merge.merge import apply_changes
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import write_files
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import TableOptions, TablePolicy
from airflow_provider_pgrepl.replication.values import lake_schema, option_problems
from tests.support.changes import column, commit_ts, relation, table_of
from tests.support.model import Change

OF = relation(column("id", "bigint", key=True), column("v"))
WITH_W = relation(*OF.columns, column("w", "integer"))
EXPORTED = datetime(2024, 6, 1, tzinfo=UTC)


class DyingError(Exception):
    """An error that a test raises in place of a commit."""


class Lake:
    """A table that keeps its history, taken by a snapshot of one row at LSN 100."""

    def __init__(self, root: Path, **settings: object) -> None:
        self.pipeline = Pipeline(name="p", lake=str(root), tables=("public.t",), history=True, **settings)
        self.uri = f"{root}/{OF.table.path}"
        self.take(100, {"id": 1, "v": "a"})

    @property
    def history(self) -> DeltaTable:
        return open_table(history_uri(self.pipeline.lake_root, OF.table))

    def take(self, lsn: int, *rows: dict, of: Relation = OF, epoch: int = 1, dies: bool = False) -> None:
        moment = of, self.pipeline, LSN(lsn), Epoch(epoch), EXPORTED
        prepare_history(*moment)
        end_all_versions(*moment)
        if dies:
            return
        schema = lake_schema(of, self.pipeline.options(of.table))
        typed = pa.schema([schema.field(name) for name in rows[0]])
        batches = pa.Table.from_pylist(list(rows), typed).to_batches()
        files = write_files(
            iter(batches), of, self.pipeline.options(of.table), self.pipeline.lake_root, LSN(lsn), EXPORTED
        )
        commit_snapshot(self.uri, schema, files, LSN(lsn), "p", Epoch(epoch), EXPORTED)

    def handles(self) -> tuple[DeltaTable, DeltaTable]:
        return open_table(self.uri), self.history

    def apply(self, *changes: Change, through: tuple[DeltaTable, DeltaTable] | None = None) -> None:
        handles = through or self.handles()
        apply_with_history(
            *handles,
            table_of(changes),
            OF,
            self.pipeline.options(OF.table),
            app_id("p", Epoch(1)),
            self.pipeline.lake_root,
            self.pipeline.slice_bytes,
        )

    def ended(self, *more: str) -> list[tuple]:
        names = ", ".join(["id", "v", "_pgrepl_from_lsn", "_pgrepl_to_lsn", "_pgrepl_to_op", *more])
        found = QueryBuilder().register("t", self.history).execute(f"select {names} from t").read_all()
        return sorted(tuple(row.values()) for row in pa.table(found).to_pylist())


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def die(*_: object) -> None:
    raise DyingError


def insert(lsn: int, *row: str | None) -> Change:
    return Change("I", new=row, commit_lsn=lsn)


def update(lsn: int, *row: str | None) -> Change:
    return Change("U", new=row, commit_lsn=lsn)


def test_no_table_can_lie_where_a_history_does() -> None:
    assert history_path(TableName("public", "orders")) == "public/orders~history"
    assert TableName("public", "orders~history").path == "public/orders~7Ehistory"


@pytest.mark.parametrize("name", ["orders", "Or ders", "orders~history", 'a"b.c'])
def test_consistent_point_keys_resolve_to_table_and_history_paths(name: str) -> None:
    table = TableName("public", name)
    assert path_of(str(table)) == table.path
    assert path_of(history_key(table)) == history_path(table)


def test_a_history_begins_with_the_first_snapshot_and_is_empty(lake: Lake) -> None:
    assert lake.ended() == []


def test_a_version_has_the_times_of_the_commits_that_made_and_ended_it(lake: Lake) -> None:
    lake.apply(update(110, "1", "b"), update(120, "1", "c"))
    times = "_pgrepl_from_ts", "_pgrepl_to_ts"
    assert lake.ended(*times) == [
        (1, "a", 100, 110, "U", EXPORTED, commit_ts(110)),
        (1, "b", 110, 120, "U", commit_ts(110), commit_ts(120)),
    ]


def test_several_changes_in_one_transaction_are_one_version(lake: Lake) -> None:
    lake.apply(update(110, "1", "half"), update(110, "1", "whole"), insert(110, "2", "x"))
    lake.apply(Change("D", old=("2", None), commit_lsn=120), insert(120, "2", "y"))
    assert lake.ended() == [(1, "a", 100, 110, "U"), (2, "x", 110, 120, "U")]


def test_a_snapshot_ends_all_versions(lake: Lake) -> None:
    lake.apply(update(110, "1", "b"), insert(120, "2", "c"))
    lake.take(200, {"id": 1, "v": "b"})
    assert lake.ended() == [(1, "a", 100, 110, "U"), (1, "b", 110, 200, "S"), (2, "c", 120, 200, "S")]


def test_a_snapshot_after_one_that_died_ends_nothing_twice(lake: Lake) -> None:
    lake.take(200, dies=True)
    lake.take(300, dies=True)
    lake.take(400, {"id": 1, "v": "b"})
    lake.take(500, {"id": 1, "v": "c"})
    assert lake.ended() == [(1, "a", 100, 200, "S"), (1, "b", 400, 500, "S")]


def test_a_snapshot_of_a_new_epoch_ends_versions_of_the_old_one(lake: Lake) -> None:
    lake.take(50, {"id": 1, "v": "b"}, epoch=2)
    lake.take(60, {"id": 1, "v": "c"}, epoch=2)
    assert lake.ended("_pgrepl_from_epoch", "_pgrepl_to_epoch") == [
        (1, "a", 100, 50, "S", 1, 2),
        (1, "b", 50, 60, "S", 2, 2),
    ]
    with pytest.raises(FencedError):
        lake.apply(update(110, "1", "of a process that slept"))


@pytest.mark.parametrize("position", [105, 0xAB, 0x16_0000_00AB])
def test_a_snapshot_does_not_end_what_changes_ended_that_never_reached_the_table(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    lake.apply(insert(position, "2", "stays"))

    monkeypatch.setattr(history_apply, "apply_changes", die)
    with pytest.raises(DyingError):
        lake.apply(update(position + 5, "1", "b"))
    lake.take(position + 100, {"id": 1, "v": "b"})
    assert lake.ended() == [
        (1, "a", 100, position + 5, "U"),
        (2, "stays", position, position + 100, "S"),
    ]


def test_retry_after_writer_crash_does_not_append_history_versions_twice(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = insert(105, "2", "x"), update(110, "1", "b"), update(110, "2", "y")
    with monkeypatch.context() as patch:
        patch.setattr(history_apply, "apply_changes", die)
        with pytest.raises(DyingError):
            lake.apply(*first)
    lake.apply(*first, update(120, "1", "c"), Change("D", old=("2", None), commit_lsn=130))
    assert lake.ended() == [
        (1, "a", 100, 110, "U"),
        (1, "b", 110, 120, "U"),
        (2, "x", 105, 110, "U"),
        (2, "y", 110, 130, "D"),
    ]


def test_changes_are_refused_after_a_snapshot_that_did_not_replace_the_table(lake: Lake) -> None:
    lake.take(200, dies=True)
    with pytest.raises(LakeTableError, match="did not replace"):
        lake.apply(update(110, "1", "b"))


def test_a_history_that_was_off_meanwhile_is_noticed(lake: Lake) -> None:
    changes = table_of([update(110, "1", "b")])
    apply_changes(
        open_table(lake.uri),
        changes,
        OF,
        lake.pipeline.options(OF.table),
        app_id("p", Epoch(1)),
        lake.pipeline.slice_bytes,
    )
    with pytest.raises(LakeTableError, match="history was turned off"):
        lake.apply(update(120, "1", "c"))


def test_a_stale_writer_of_a_history_is_refused(lake: Lake) -> None:
    stale = lake.handles()
    lake.apply(insert(110, "2", "b"))
    with pytest.raises(FencedError):
        lake.apply(insert(110, "2", "b"), update(120, "1", "c"), through=stale)
    assert lake.ended() == []


def test_a_refused_truncate_ends_no_version(tmp_path: Path) -> None:
    lake = Lake(tmp_path, truncate="error")
    with pytest.raises(TruncatedError):
        lake.apply(update(110, "1", "b"), Change("T", new=("",), commit_lsn=120))
    assert lake.ended() == [(1, "a", 100, 110, "U")]


def test_columns_that_come_and_go_stay_in_the_history(lake: Lake) -> None:
    lake.take(200, {"id": 1, "v": "b", "w": 7}, of=WITH_W)
    lake.take(300, {"id": 1, "v": "c"})
    lake.apply(update(310, "1", "d"))
    assert lake.ended("w") == [
        (1, "a", 100, 200, "S", None),
        (1, "b", 200, 300, "S", 7),
        (1, "c", 300, 310, "U", None),
    ]


def test_a_column_of_another_type_is_refused_before_anything_changes(lake: Lake) -> None:
    other = relation(OF.columns[0], column("v", "integer"))
    with pytest.raises(LakeTableError, match='another type or spelling of "v"') as refused:
        lake.take(200, {"id": 1, "v": 2}, of=other)
    assert "move" in refused.value.hint
    assert lake.ended() == []


def test_a_choice_that_changed_meanwhile_ends_no_version(lake: Lake) -> None:
    lake.pipeline = replace(lake.pipeline, exclude_columns=("public.t.v",))
    with pytest.raises(LakeTableError, match='other columns than this pipeline gives it: "v"'):
        lake.apply(update(110, "1", "b"))
    assert lake.ended() == []


def test_a_history_that_never_began_takes_the_types_that_the_pipeline_has_now(tmp_path: Path) -> None:
    other = relation(OF.columns[0], column("v", "timestamp without time zone"))
    lake = Lake.__new__(Lake)
    lake.pipeline = Pipeline(name="p", lake=str(tmp_path), tables=("public.t",), history=True)
    lake.uri = f"{tmp_path}/{OF.table.path}"
    prepare_history(other, lake.pipeline, LSN(50), Epoch(1), EXPORTED)  # and the copy fails
    lake.take(100, {"id": 1, "v": "a"})
    lake.apply(update(110, "1", "b"))
    assert lake.ended() == [(1, "a", 100, 110, "U")]


def test_history_may_be_out_of_sight_where_its_folder_is_empty(lake: Lake) -> None:
    root, folder = lake.pipeline.lake_root, Path(history_uri(lake.pipeline.lake_root, OF.table))
    check_not_hidden(root, OF.table)
    away = folder.rename(f"{folder}.away")
    check_not_hidden(root, OF.table)  # moved away by choice, as a hint says
    folder.mkdir()
    with pytest.raises(LakeTableError, match=r"name its history, and it is not in .* exists, and no table"):
        check_not_hidden(root, OF.table)
    folder.rmdir()
    away.rename(folder)
    check_not_hidden(root, OF.table)


def test_history_needs_the_bookkeeping_columns() -> None:
    for settings in ({"history": True}, {"per_table": {"public.t": {"history": True}}}):
        for name in ("commit_lsn_column", "commit_ts_column"):
            with pytest.raises(ConfigError, match="history: needs"):
                Pipeline(name="p", lake="/l", tables=("public.t",), **settings, **{name: False})


def test_history_needs_a_key_and_names_of_its_own() -> None:
    options = TableOptions(TablePolicy(history=True))
    assert not list(option_problems(OF, options))
    (problem,) = option_problems(relation(column("v"), identity="f"), options)
    assert "needs a key" in problem
    (problem,) = option_problems(relation(*OF.columns, column("_pgrepl_to_op")), options)
    assert "_pgrepl_to_op" in problem
