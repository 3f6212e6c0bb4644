"""A commit that fails because of a setting of another program stops its table alone, and names it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import Field
from deltalake.exceptions import CommitFailedError

from airflow_provider_pgrepl.errors import (
    FencedError,
    LakeTableError,
    LakeUnavailableError,
    OvertakenError,
    Scope,
)
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA, changelog_uri
from airflow_provider_pgrepl.replication.changelog.writer import create_changelog
from airflow_provider_pgrepl.replication.lake.apply import merge_task
from airflow_provider_pgrepl.replication.lake.apply.merge_task import MergeJob, run_share
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableContext, TableResult
from airflow_provider_pgrepl.replication.lake.delta import snapshot_commit
from airflow_provider_pgrepl.replication.lake.delta.commit import (
    commit_nothing,
    commit_properties,
    fenced,
    try_commit,
)
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table, read_position
from airflow_provider_pgrepl.replication.lake.merge.merge import apply_changes
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.support.changelogs import epoch_record
from tests.support.changes import column, relation, table_of
from tests.support.foreign_settings import Settings, commit_by_another, set_by_another
from tests.support.model import Change

APP = app_id("p", Epoch(1))
OF = relation(column("id", "bigint", key=True), column("v"))
ANSWER = {"delta.identity.start": 1, "delta.identity.step": 1, "delta.identity.allowExplicitInsert": False}
INVARIANT = {"delta.invariants": json.dumps({"expression": {"expression": "v <> 'secret'"}})}
EXTRA = Field("extra", "string", nullable=True)
NO_SECRET = "delta.constraints.no_secret"


class Lake:
    """A table with the rows 0 to 2 at LSN 10."""

    def __init__(self, folder: Path, merge: str = "merge_on_read") -> None:
        self.uri = str(folder / "t")
        self.options = Pipeline(name="p", lake=str(folder), tables=("public.t",), merge=merge).options(
            OF.table
        )
        commit_snapshot(self.uri, lake_schema(OF, self.options), [], LSN(1), "p", Epoch(1))
        self.apply(*(Change("I", new=(str(number), "old"), commit_lsn=10) for number in range(3)))

    def apply(self, *changes: Change) -> None:
        apply_changes(open_table(self.uri), table_of(changes), OF, self.options, APP, 1 << 20)

    def change_at(self, lsn: int) -> None:
        """A row that is updated, one that goes, and one that comes."""
        self.apply(
            Change("U", new=("1", "secret"), commit_lsn=lsn),
            Change("D", old=("2", None), commit_lsn=lsn),
            Change("I", new=("9", "secret"), commit_lsn=lsn),
        )

    @property
    def position(self) -> int | None:
        return read_position(open_table(self.uri), APP)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


@pytest.mark.parametrize(
    ("settings", "what", "remedy"),
    [
        (
            Settings({"delta.appendOnly": "true"}),
            "property delta.appendOnly",
            "UNSET TBLPROPERTIES ('delta.appendOnly')",
        ),
        (
            Settings({"delta.enableRowTracking": "true"}, ["domainMetadata", "rowTracking"]),
            "table feature rowTracking, the table feature domainMetadata",
            "DROP FEATURE rowTracking; ALTER TABLE",
        ),
        (
            Settings({"delta.enableInCommitTimestamps": "true"}, ["inCommitTimestamp"]),
            "table feature inCommitTimestamp",
            "DROP FEATURE inCommitTimestamp",
        ),
        (
            Settings({"delta.enableTypeWidening": "true"}, ["typeWidening"], of_readers=True),
            "table feature typeWidening",
            "move the folder",
        ),
        (Settings({}, ["invented"]), "table feature invented", "move the folder"),
        (Settings(writer=6, of_columns={"id": ANSWER}), "table feature identityColumns", "move the folder"),
        (
            Settings({NO_SECRET: "v <> 'secret'"}, writer=3),
            "CHECK constraint no_secret",
            "DROP CONSTRAINT `no_secret`",
        ),
        (
            Settings(writer=4, of_columns={"v": {"delta.generationExpression": "cast(id as string)"}}),
            "generated column v",
            "move the folder",
        ),
        (Settings(of_columns={"v": INVARIANT}), "invariant of column v", "move the folder"),
    ],
    ids=lambda value: "" if isinstance(value, Settings) else None,
)
def test_rejected_commit_names_the_setting_and_the_statement_that_removes_it(
    lake: Lake, settings: Settings, what: str, remedy: str
) -> None:
    set_by_another(lake.uri, settings)
    with pytest.raises(LakeTableError) as raised:
        lake.change_at(20)
    assert raised.value.scope is Scope.TABLE
    assert f"another program has set the {what}" in raised.value.message
    assert remedy in raised.value.hint
    assert ("then retry the table" in raised.value.hint) != ("then resnapshot the table" in raised.value.hint)
    assert "secret" not in str(raised.value).replace("no_secret", "")
    assert lake.position == 10


def test_table_with_the_property_stops_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables that the same Spark task merges before and after it continue."""
    monkeypatch.setattr(merge_task, "SHARE_S", float("inf"))
    root, changelog = str(tmp_path), changelog_uri(str(tmp_path))
    create_changelog(changelog, epoch_record())
    relations = [replace(OF, oid=oid, table=TableName("public", f"t{oid}")) for oid in (7, 8, 9)]
    works = [TableContext(of, TableOptions(), APP, root, 1 << 20) for of in relations]
    for work in works:
        commit_snapshot(work.uri, lake_schema(work.relation, work.options), [], LSN(10), "p", Epoch(1))

    def merge(change: Change) -> list[TableResult]:
        """Apply this change to each table, and return the results."""
        (row,) = table_of([change]).select(ROW_SCHEMA.names).to_pylist()
        rows = [row | {"relation_id": of.oid, "relation_version": of.version} for of in relations]
        path = f"{change.commit_lsn}-1.parquet"
        pq.write_table(pa.Table.from_pylist(rows, ROW_SCHEMA), f"{changelog}/{path}")
        return run_share([MergeJob(work, LSN(10), 1, (path,), 1) for work in works])

    merge(Change("I", new=("1", "old"), commit_lsn=20))
    set_by_another(works[1].uri, Settings({"delta.appendOnly": "true"}))
    results = merge(Change("U", new=("1", "new"), commit_lsn=30))
    assert [read_position(open_table(work.uri), APP) for work in works] == [30, 20, 30]
    assert [result.error_kind for result in results] == ["", "LakeTableError", ""]
    assert not any(result.stops_pipeline for result in results)


def test_column_that_another_program_made_not_null_gets_no_null(lake: Lake) -> None:
    set_by_another(lake.uri, Settings(not_null=["v"]))
    with pytest.raises(LakeTableError, match="NOT NULL of column v") as raised:
        lake.apply(Change("U", new=("1", None), commit_lsn=20))
    assert "ALTER COLUMN `v` DROP NOT NULL" in raised.value.hint


def map_columns(lake: Lake) -> None:
    names = [field.name for field in open_table(lake.uri).schema().fields]
    of_columns = {
        name: {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": name}
        for number, name in enumerate(names, 1)
    }
    properties = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": str(len(names))}
    set_by_another(lake.uri, Settings(properties, ["columnMapping"], of_readers=True, of_columns=of_columns))


def test_table_with_mapped_columns_is_written_but_not_replaced(lake: Lake) -> None:
    """deltalake would commit, and could not open the table afterwards."""
    map_columns(lake)
    lake.change_at(20)
    with pytest.raises(LakeTableError, match=r"delta\.columnMapping\.mode") as raised:
        commit_snapshot(lake.uri, lake_schema(OF, lake.options), [], LSN(30), "p", Epoch(1))
    assert "then resnapshot the table" in raised.value.hint
    assert lake.position == 20


def test_column_that_cannot_be_added_because_columns_are_mapped_is_named(lake: Lake) -> None:
    map_columns(lake)
    table = open_table(lake.uri)
    properties = commit_properties(APP, LSN(10), "evolution")
    with pytest.raises(LakeTableError, match=r"delta\.columnMapping\.mode"):
        try_commit(table, lambda: table.alter.add_columns([EXTRA], commit_properties=properties))


def test_table_continues_once_the_property_is_removed(lake: Lake) -> None:
    set_by_another(lake.uri, Settings({"delta.appendOnly": "true"}))
    with pytest.raises(LakeTableError):
        lake.change_at(20)
    set_by_another(lake.uri, Settings({"delta.appendOnly": "false"}))
    lake.change_at(20)
    assert lake.position == 20


@pytest.mark.parametrize("merge", ["merge_on_read", "rewrite"])
def test_changes_are_applied_beside_commits_of_other_programs(tmp_path: Path, merge: str) -> None:
    lake = Lake(tmp_path, merge)
    stale = open_table(lake.uri)
    commit_by_another(lake.uri, "VACUUM START")
    apply_changes(
        stale, table_of([Change("D", old=("2", None), commit_lsn=20)]), OF, lake.options, APP, 1 << 20
    )
    assert lake.position == 20


def test_commit_behind_another_program_is_overtaken_and_not_fenced(lake: Lake) -> None:
    """Delta lets some commits pass after another's, and rejects others, as one that changes the metadata."""
    stale = open_table(lake.uri)
    version = set_by_another(lake.uri, Settings({"owner": "another team"}))
    with pytest.raises(OvertakenError, match=f"version {version} ") as raised:
        commit_nothing(stale, APP, LSN(20), commit_properties(APP, LSN(20), "changes"))
    assert raised.value.scope is Scope.TABLE
    assert lake.position == 10


def test_snapshot_replaces_a_table_to_which_another_program_commits_meanwhile(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, versions = snapshot_commit.check_ours, list[int]()

    def check_and_overtake(*arguments: object) -> None:
        check(*arguments)
        if not versions:
            versions.append(set_by_another(lake.uri, Settings({"owner": "another team"})))

    monkeypatch.setattr(snapshot_commit, "check_ours", check_and_overtake)
    commit_snapshot(lake.uri, lake_schema(OF, lake.options), [], LSN(30), "p", Epoch(1))
    assert versions
    assert lake.position == 30


@pytest.mark.parametrize("epoch", [1, 2])
def test_commit_behind_one_of_this_pipeline_is_fenced(lake: Lake, epoch: int) -> None:
    stale = open_table(lake.uri)
    if epoch == 1:
        lake.change_at(30)
    else:
        commit_snapshot(lake.uri, lake_schema(OF, lake.options), [], LSN(30), "p", Epoch(2))
    with pytest.raises(FencedError):
        commit_nothing(stale, APP, LSN(40), commit_properties(APP, LSN(40), "changes"))


def test_commit_that_finds_the_storage_full_is_no_lost_race(lake: Lake) -> None:
    """deltalake raises for it what it raises for a lost race."""

    def commit() -> None:
        raise CommitFailedError("Generic LocalFileSystem error: No space left on device (os error 28)")

    with pytest.raises(LakeUnavailableError, match="the storage is full"):
        fenced(open_table(lake.uri), APP, LSN(20), commit)
