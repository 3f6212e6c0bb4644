"""`pgrepl verify --repair`: differing rows are replaced by the source's in one commit, and compared again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.app import verify_repair
from airflow_provider_pgrepl.replication.app.verification import TableReport
from airflow_provider_pgrepl.replication.app.verify_repair import Repair, has_version
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.delta.live_files import COMMIT_METADATA, app_version
from airflow_provider_pgrepl.replication.lake.delta.table import (
    EXPORTED_APP,
    RELATION_APP,
    app_id,
    open_table,
)
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import SliceCommit
from airflow_provider_pgrepl.replication.lake.verify.repair import TableRepair
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.spark.test_verify import Verified
from tests.support.in_process import EndedAtOnce
from tests.support.received import EAGER
from tests.support.replicated import execute, repeating, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EQUAL, _DIFFERENT, _NOT_COMPARED = 0, 1, 2
_ROWS = 500
Change = Callable[[pa.Table], pa.Table]


def _create(dsn: str, *tables: str) -> None:
    """Create tables of equal rows, whose column v is sent only when it changes."""
    for table in tables:
        execute(
            dsn,
            f"create table {table} (id int primary key, n int, v text)",
            f"alter table {table} alter v set storage external",
            f"insert into {table} select g, g % 5, repeat('v' || g, 1000) from generate_series(1, {_ROWS}) g",
        )


def _begun(spark: SparkSession, dsn: str, folder: Path, *tables: str, **options: Any) -> Verified:
    _create(dsn, *(tables or ("t",)))
    names = tuple(f"public.{table}" for table in tables or ("t",))
    pipeline = Verified(spark, dsn, folder, names, **options)
    pipeline.snapshot()
    pipeline.catch_up()
    return pipeline


def _damage(pipeline: Verified, table: str, wanted: dict[str, list[Any]], change: Change) -> None:
    """Replace rows of a lake table in a commit of the pipeline's own, as an error of this package would."""
    record = read_epoch(pipeline.changelog)
    lake = open_table(pipeline.lake_path(table))
    position, rows = pipeline.position(table), FileRows(lake)
    assert position is not None
    commit = SliceCommit(
        lake, app_id(record.pipeline, record.epoch), position, None, app_version(lake, RELATION_APP) or 0
    )
    places = rows.find(pa.table(wanted))
    assert len(places)
    commit.replace(rows, places, change(rows.rows(places, rows.schema.names)), "rewrite")


def _set(name: str, values: Callable[[pa.Table], Any]) -> Change:
    def change(rows: pa.Table) -> pa.Table:
        at = rows.schema.get_field_index(name)
        return rows.set_column(at, rows.schema.field(at), pc.cast(values(rows), rows.schema.field(at).type))

    return change


def _with_copy(rows: pa.Table) -> pa.Table:
    return pa.concat_tables([rows, _set("id", lambda held: pc.negate(held["id"]))(rows)])


_DAMAGES: dict[str, tuple[list[int], Change, dict[str, int]]] = {
    "flipped": ([7], _set("n", lambda rows: pc.add(rows["n"], 1)), {"changed": 1}),
    "missing": ([7], lambda rows: rows.slice(0, 0), {"missing": 1}),
    "extra": ([7], _with_copy, {"extra": 1}),
    "swapped": ([5, 6], _set("id", lambda rows: pc.subtract(11, rows["id"])), {"changed": 2}),
    "doubled": ([7], lambda rows: pa.concat_tables([rows, rows]), {"extra": 1}),
}


def _last_commit(pipeline: Verified, table: str) -> dict[str, Any]:
    (commit,) = DeltaTable(pipeline.lake_path(table)).history(1)
    about: dict[str, Any] = json.loads(commit[COMMIT_METADATA])
    return about


def _counts(report: dict[str, Any]) -> dict[str, int]:
    return {name: report[name] for name in ("missing", "extra", "changed") if report[name]}


def _check_equal(pipeline: Verified, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = pipeline.verify(capsys)
    assert code == _EQUAL, found
    assert {report["status"] for report in found.values()} == {"equal"}


def test_damaged_rows_are_repaired_in_one_commit_and_compared_again(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each table has damage of its own."""
    pipeline = _begun(spark, dsn, tmp_path, *_DAMAGES)
    for name, (ids, change, _) in _DAMAGES.items():
        _damage(pipeline, f"public.{name}", {"id": ids}, change)
    # Changes that are not in the lake tables yet are applied before the repair.
    execute(dsn, *(f"update {name} set n = -1 where id = 400" for name in _DAMAGES))
    code, found = pipeline.verify(capsys, "--repair")
    assert code == _EQUAL, found
    for name, (_, _, expected) in _DAMAGES.items():
        table = f"public.{name}"
        report, about, position = found[table], _last_commit(pipeline, table), pipeline.position(table)
        assert (report["status"], _counts(report)) == ("repaired", expected), report
        assert (about["kind"], about["position"]) == ("repair", int(position or 0))
        assert str(position) == report["verified_through"]
        assert pipeline.states()[table].state is TableState.CATCHING_UP
    # The value of v is not sent with these changes: it comes from the repaired rows.
    execute(dsn, *(f"update {name} set n = n + 100 where id in (5, 6, 7)" for name in _DAMAGES))
    pipeline.catch_up()
    _check_equal(pipeline, capsys)
    assert {record.state for record in pipeline.states().values()} == {TableState.STREAMING}


_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "partitioned": {"partition_by": "n"},
    "vectors": {"merge": "merge_on_read"},
}


@pytest.mark.thorough("damaged rows, above; test_verify: tables with policies; property/test_policies")
@pytest.mark.parametrize("has_own_columns", [True, False])
def test_tables_with_settings_are_repaired(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_own_columns: bool
) -> None:
    tables = _SETTINGS if has_own_columns else {"plain": {}}
    pipeline = _begun(
        spark,
        dsn,
        tmp_path,
        *tables,
        per_table={f"public.{name}": options for name, options in tables.items() if options},
        exclude_columns=["public.plain.v"] if has_own_columns else [],
        commit_lsn_column=has_own_columns,
        commit_ts_column=has_own_columns,
    )
    for name in tables:
        _damage(pipeline, f"public.{name}", {"id": [11, 12]}, lambda rows: _with_copy(rows.slice(1)))
    code, found = pipeline.verify(capsys, "--repair")
    counts = {name: _counts(found[f"public.{name}"]) for name in tables}
    assert (code, counts) == (_EQUAL, {name: {"missing": 1, "extra": 1} for name in tables}), found
    pipeline.catch_up()
    _check_equal(pipeline, capsys)


def test_copies_of_row_without_key_are_repaired(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(dsn, "create table heap (a int, b double precision)", "alter table heap replica identity full")
    execute(dsn, f"insert into heap select g % 3, nullif(g % 3, 1) from generate_series(1, {_ROWS}) g")
    execute(dsn, "insert into heap values (9, '-0'), (9, 'NaN'), (9, '0')")
    pipeline = Verified(spark, dsn, tmp_path, ("public.heap",))
    pipeline.snapshot()
    pipeline.catch_up()
    # Three copies of one row too few, and two of another, with a NULL, too many.
    _damage(pipeline, "public.heap", {"a": [0]}, lambda rows: rows.slice(3))
    _damage(pipeline, "public.heap", {"a": [1]}, lambda rows: pa.concat_tables([rows, rows.slice(0, 2)]))
    _damage(pipeline, "public.heap", {"a": [9]}, _set("b", lambda rows: pc.negate(rows["b"])))
    code, found = pipeline.verify(capsys, "--repair")
    report = found["public.heap"]
    assert (code, report["status"]) == (_EQUAL, "repaired"), report
    assert (report["missing"], report["extra"]) == (3, 2)
    execute(dsn, "delete from heap where a in (1, 9)")
    pipeline.catch_up()
    _check_equal(pipeline, capsys)


_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "versions": ({"history": True}, "history"),
    "soft": ({"deletes": "soft"}, "soft"),
    "ignoring": ({"truncate": "ignore"}, "truncate"),
    "rewritten": ({}, "was not written by this pipeline"),
}


def test_table_that_source_does_not_describe_is_not_repaired_and_reason_named(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {f"public.{name}": options for name, (options, _) in _REFUSED.items() if options}
    pipeline = _begun(spark, dsn, tmp_path, *_REFUSED, per_table=options)
    for table in options:
        _damage(pipeline, table, {"id": [7]}, _set("n", lambda rows: pc.add(rows["n"], 1)))
    DeltaTable(pipeline.lake_path("public.rewritten")).update(updates={"n": "n + 1"}, predicate="id = 7")
    before = {name: DeltaTable(pipeline.lake_path(f"public.{name}")).version() for name in _REFUSED}
    code, found = pipeline.verify(capsys, "--repair")
    assert code == _DIFFERENT
    for name, (_, reason) in _REFUSED.items():
        report = found[f"public.{name}"]
        assert report["status"] == "different", name
        assert reason in report["not_repaired"]
        assert DeltaTable(pipeline.lake_path(f"public.{name}")).version() == before[name]
    assert all(pipeline.states()[table].state is TableState.STREAMING for table in options)


@pytest.mark.parametrize(
    "when", ["before", pytest.param("after", marks=pytest.mark.thorough("the same test, before"))]
)
def test_repair_that_is_killed_is_made_wholly_or_not_at_all(
    spark: SparkSession,
    dsn: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    pipeline = _begun(spark, dsn, tmp_path)
    _damage(pipeline, "public.t", {"id": [5, 6]}, _DAMAGES["swapped"][1])
    commit = TableRepair.commit

    def killed(*arguments: Any) -> None:
        if when == "after":
            commit(*arguments)
        raise EndedAtOnce

    with monkeypatch.context() as patched:
        patched.setattr(TableRepair, "commit", killed)
        # A killed process does not resume the table either. The next repair does.
        patched.setattr(verify_repair, "resume_tables", lambda *_, **__: None)
        with pipeline.receiving(EAGER):
            pipeline.run("verify", "--repair")
    assert pipeline.states()["public.t"].state is TableState.PAUSED
    assert pipeline.states()["public.t"].is_paused_by_repair
    capsys.readouterr()
    execute(dsn, "update t set n = n + 100 where id in (5, 6)")
    code, found = pipeline.verify(capsys)
    assert code == _NOT_COMPARED
    reason = found["public.t"]["not_compared"][0]["reason"]
    assert reason == "it is paused: it is being repaired by pgrepl verify --repair"
    code, found = pipeline.verify(capsys, "--repair")
    assert (code, found["public.t"]["status"]) == (_EQUAL, "repaired" if when == "before" else "equal")
    pipeline.catch_up()
    _check_equal(pipeline, capsys)


def test_repair_does_not_add_rows_that_another_process_has_copied_since_the_comparison(
    spark: SparkSession,
    dsn: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy is as of an earlier snapshot than the repair."""
    pipeline = _begun(spark, dsn, tmp_path)
    rows = pipeline.lake_rows("public.t")
    _damage(pipeline, "public.t", {"id": [7]}, _DAMAGES["missing"][1])
    repaired, copied = Repair._repaired, []

    def copy_first(repair: Repair, report: TableReport, *arguments: Any) -> TableReport:
        if not copied:
            assert report.verified_through is not None
            copied.append(_copy(pipeline, rows, LSN(report.verified_through - 1)))
        return repaired(repair, report, *arguments)

    monkeypatch.setattr(Repair, "_repaired", copy_first)
    code, found = pipeline.verify(capsys, "--repair")
    assert copied
    assert (code, found["public.t"]["status"]) == (_EQUAL, "equal"), found
    assert "the lake table was written by another process" in pipeline.log_tail()
    pipeline.assert_equal("public.t")


def _copy(pipeline: Verified, rows: pa.Table, position: LSN) -> LSN:
    """Commit these rows as a snapshot does."""
    record, lake = read_epoch(pipeline.changelog), open_table(pipeline.lake_path("public.t"))
    before = pipeline.position("public.t")
    assert before is not None
    assert before < position
    marks = {EXPORTED_APP: (app_version(lake, EXPORTED_APP) or 0) + 1}
    version, app = app_version(lake, RELATION_APP) or 0, app_id(record.pipeline, record.epoch)
    SliceCommit(lake, app, position, None, version, kind="snapshot", marks=marks).write(rows, "overwrite")
    return position


@pytest.mark.thorough("damaged rows, above; test_resync: rows change while tables are compared")
def test_changes_after_repair_win_under_traffic(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged rows change all the time, without the values of their large column being sent."""
    pipeline = _begun(spark, dsn, tmp_path)
    # Rows 301 to 350 keep their keys and are never inserted again, so that only the repair can correct them.
    ids = list(range(301, 351))
    _damage(pipeline, "public.t", {"id": ids}, _set("v", lambda rows: pc.utf8_upper(rows["v"])))

    def change(turn: int) -> None:
        key = turn % 100 + 1
        execute(
            dsn,
            f"update t set n = n + 1 where id % 10 = {turn % 10}",
            f"delete from t where id = {key}; insert into t values ({key}, {turn}, repeat('new', 1000))",
            f"update t set id = -id where id in ({key + 100}, {-key - 100})",
        )

    # Other threads need the time: without a pause these statements take half of a processor.
    with repeating(change, pause_s=0.03), pipeline.replicating(EAGER):
        code, found = pipeline.report(capsys, "--repair")
        assert (code, found["public.t"]["status"]) == (_EQUAL, "repaired"), found
        root, version = pipeline.pipeline.lake_root, found["public.t"]["repaired_version"]
        wait_until(lambda: has_version(root, TableName.parse("public.t"), version))
        code, found = pipeline.report(capsys)
        assert code == _EQUAL, found
    pipeline.catch_up()
    _check_equal(pipeline, capsys)
