"""The verification app: the lake is compared with PostgreSQL, and what differs is found and named."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app import verify as verify_app
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.tables import pause_tables
from airflow_provider_pgrepl.replication.app.verification import VerifyReport
from airflow_provider_pgrepl.replication.lake.verify import comparison
from airflow_provider_pgrepl.replication.receiver import receiver
from airflow_provider_pgrepl.replication.receiver.changelog_feed import KeepaliveRule
from airflow_provider_pgrepl.replication.source.connection import Connection
from tests.support import every_type
from tests.support.in_process import Borrowed, InProcess
from tests.support.received import EAGER
from tests.support.replicated import execute, repeating, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EQUAL, _DIFFERENT, _NOT_COMPARED = 0, 1, 2
_ROWS = 500


class Verified(InProcess):
    """A pipeline whose lake is verified while its receiver runs."""

    def verify(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
        """Run the app. Return its exit code, and its report of each table."""
        with self.receiving(EAGER):
            return self.report(capsys, *arguments)

    def report(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
        """Do the same while other parts run that the caller has started."""
        capsys.readouterr()
        code = self.run("verify", "--json", *arguments)
        out = capsys.readouterr().out
        assert code in (_EQUAL, _DIFFERENT, _NOT_COMPARED), self.log_tail()
        return code, {table["table"]: table for table in json.loads(out)["tables"]}


def _begun(spark: SparkSession, dsn: str, folder: Path, *tables: str, **options: Any) -> Verified:
    pipeline = Verified(spark, dsn, folder, tables, **options)
    pipeline.snapshot()
    return pipeline


def _slots(pg: Connection) -> list[str]:
    with pg.cursor() as cursor:
        cursor.execute("select slot_name from pg_replication_slots")
        return [row[0] for row in cursor.fetchall()]


def test_lake_of_every_type_equals_its_source(
    spark: SparkSession, dsn: str, pg: Connection, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(dsn, every_type.CREATE_TYPE, f"create table t (id int primary key, {every_type.declared()})")
    execute(dsn, *(every_type.insert(number, which) for number, which in enumerate((0, 1, None))))
    pipeline = _begun(spark, dsn, tmp_path, "public.t")
    execute(dsn, *(every_type.insert(number, which) for number, which in enumerate((0, 1, None), 3)))
    execute(dsn, "update t set c_text = 'other', c_double = 'NaN', c_float = '-0' where id = 1")
    pipeline.catch_up()
    # These changes are in the changelog alone.
    execute(dsn, *(every_type.insert(number, which) for number, which in enumerate((0, 1, None), 6)))
    execute(dsn, "delete from t where id = 0", "update t set id = 100 where id = 1")
    for check in ("values", "text"):
        code, found = pipeline.verify(capsys, f"--check={check}")
        assert code == _EQUAL, found
        assert (found["public.t"]["status"], found["public.t"]["not_compared"]) == ("equal", [])
        assert (found["public.t"]["source_rows"], found["public.t"]["lake_rows"]) == (8, 8)
        assert len(_slots(pg)) == 1
        verified = str(pipeline.states()["public.t"].verified_through)
        assert verified == found["public.t"]["verified_through"]


def _add_copy_of_row(table: DeltaTable) -> None:
    rows = pa.table(QueryBuilder().register("t", table).execute("select * from t where id = 5"))
    ids = pa.array([-1], rows["id"].type)
    write_deltalake(table, rows.set_column(0, rows.schema.field(0), ids), mode="append")


_DAMAGES: dict[str, tuple[Callable[[DeltaTable], Any], dict[str, Any]]] = {
    "flipped": (
        lambda table: table.update(updates={"n": "n + 1"}, predicate="id = 7"),
        {"changed": 1, "different_columns": {"n": 1}, "changed_keys": [["7"]]},
    ),
    "missing": (lambda table: table.delete("id = 7"), {"missing": 1, "missing_keys": [["7"]]}),
    "extra": (_add_copy_of_row, {"extra": 1, "extra_keys": [["-1"]]}),
    "swapped": (
        lambda table: table.update(updates={"id": "11 - id"}, predicate="id in (5, 6)"),
        {"changed": 2, "different_columns": {"n": 2, "v": 2}, "changed_keys": [["5"], ["6"]]},
    ),
}


@pytest.mark.thorough("test_verify_repair finds damaged rows; the test of texts below names columns and keys")
def test_damaged_rows_of_lake_tables_are_found_and_named(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each table has damage of its own."""
    execute(dsn, *(f"create table {name} (id int primary key, n bigint, v text)" for name in _DAMAGES))
    rows = f"select g, g * 10, 'secret ' || g from generate_series(1, {_ROWS}) g"
    execute(dsn, *(f"insert into {name} {rows}" for name in _DAMAGES))
    pipeline = _begun(spark, dsn, tmp_path, *(f"public.{name}" for name in _DAMAGES))
    pipeline.catch_up()
    for name, (do_damage, _) in _DAMAGES.items():
        do_damage(DeltaTable(pipeline.lake_path(f"public.{name}")))
    # A change that is not in the lake table yet is no difference, and hides none.
    execute(dsn, *(f"update {name} set v = 'changed' where id = 400" for name in _DAMAGES))
    _assert_damages_found(pipeline, capsys)
    _assert_damages_found(pipeline, capsys, "--check=text")


def _assert_damages_found(pipeline: Verified, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
    code, found = pipeline.verify(capsys, *arguments)
    assert code == _DIFFERENT
    counts = {"missing": 0, "extra": 0, "changed": 0, "different_columns": {}}
    for name, (_, expected) in _DAMAGES.items():
        table = found[f"public.{name}"]
        assert table["status"] == "different", name
        named = {field: value for field, value in expected.items() if field in counts}
        assert {field: table[field] for field in counts} == {**counts, **named}, name
        assert not [field for field in table if field.endswith("_keys")]
    _, found = pipeline.verify(capsys, "--show-keys", *arguments)
    for name, (_, expected) in _DAMAGES.items():
        keys = {
            field: sorted(keys) for field, keys in found[f"public.{name}"].items() if field.endswith("_keys")
        }
        assert keys == {field: keys for field, keys in expected.items() if field.endswith("_keys")}, name
    assert "secret" not in json.dumps(found) + pipeline.log_tail()


@pytest.mark.thorough("test_resync: rows change all the time, also while tables are compared")
def test_no_difference_is_reported_while_rows_change(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows are updated, moved to other keys, deleted and inserted, and a table without a key changes, too."""
    execute(dsn, "create table t (id int primary key, n bigint, v text)")
    execute(dsn, f"insert into t select g, g, 'v' || g from generate_series(1, {_ROWS}) g")
    execute(dsn, "create table heap (a int, b text)", "alter table heap replica identity full")
    execute(dsn, f"insert into heap select g % 7, 'same' from generate_series(1, {_ROWS}) g")
    # More merges would only take CPU time.
    pace = {"flush_interval_s": 0.2, "merge_interval_s": 0.5}
    pipeline = _begun(spark, dsn, tmp_path, "public.t", "public.heap", **pace)

    def change(turn: int) -> None:
        key = turn % _ROWS + 1
        execute(
            dsn,
            f"update t set n = n + 1, v = v || '.' where id % 50 = {turn % 50}",
            f"delete from t where id = {key}; insert into t values ({key}, {turn}, 'new')",
            f"update t set id = -id where id in ({key}, {-key})",
            f"delete from heap where ctid = (select min(ctid) from heap where a = {turn % 7});"
            f" insert into heap values ({turn % 7}, 'same'), ({turn % 7}, 'turn {turn}')",
        )

    # Without a pause, more changes would only wait to be compared.
    with repeating(change, pause_s=0.02), pipeline.replicating(EAGER):
        for _ in range(3):
            code, found = pipeline.report(capsys)
            assert code == _EQUAL, found


_WITHOUT_TEXT: dict[str, Any] = {
    "types": {"public.t.n": "decimal(38,4)"},
    "per_column": {"public.t.d": {"infinity": "null"}, "public.t.f": {"numeric_nan": "null"}},
}


def test_columns_whose_texts_the_lake_does_not_keep_are_named_and_not_compared(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = "id int primary key, n numeric, d date, f numeric(5,2), v numeric(5,2), e numeric"
    execute(dsn, f"create table t ({columns})")
    execute(dsn, "insert into t values (1, 1.5, 'infinity', 'NaN', 1.50, 2.00)")
    pipeline = _begun(spark, dsn, tmp_path, "public.t", **_WITHOUT_TEXT)
    pipeline.catch_up()
    code, found = pipeline.verify(capsys, "--check=text")
    assert code == _EQUAL, found
    parts = {part["part"]: part["reason"] for part in found["public.t"]["not_compared"]}
    assert parts == {
        "column n": "its decimals do not keep the zeros at the end of a number",
        "column d": "infinity null replaces values of the source",
        "column f": "numeric_nan null replaces values of the source",
    }
    assert pipeline.states()["public.t"].verified_through is None
    assert pipeline.run("verify", "--check=text", "--repair") == process.WILL_NOT_HELP
    DeltaTable(pipeline.lake_path("public.t")).update(updates={"v": "v + 1", "e": "'2.0'"})
    code, found = pipeline.verify(capsys, "--check=text", "--sample=100%", "--show-keys")
    assert (code, found["public.t"]["different_columns"]) == (_DIFFERENT, {"v": 1, "e": 1}), found
    assert found["public.t"]["changed_keys"] == [["1"]]


_POLICIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "soft": ({"deletes": "soft"}, ["soft-deleted rows"]),
    "ignored": ({"truncate": "ignore"}, ["rows that only the lake has"]),
    "soft_and_ignored": (
        {"deletes": "soft", "truncate": "ignore"},
        ["rows that only the lake has", "soft-deleted rows"],
    ),
    "history": ({"history": True}, ["history"]),
    "excluded": ({}, ["column v"]),
    "text": ({}, []),
    "partitioned": ({"partition_by": "n"}, []),
}
"""The policy of each table, and the parts that are not compared; options name columns of two."""
_OF_COLUMNS = {"exclude_columns": ["public.excluded.v"], "text_columns": ["public.text.n"]}


def test_tables_with_policies_are_compared_except_for_named_parts(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    per_table = {f"public.{name}": policy for name, (policy, _) in _POLICIES.items() if policy}
    parts = {name: parts for name, (_, parts) in _POLICIES.items()}
    _assert_compared_except(parts, spark, dsn, tmp_path, capsys, per_table=per_table, **_OF_COLUMNS)


def test_tables_are_compared_by_the_settings_with_which_they_were_copied(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("soft", "excluded", "text", "partitioned")
    per_table = {f"public.{name}": _POLICIES[name][0] for name in names}
    parts = {name: _POLICIES[name][1] for name in names}
    later = {"per_table": {}, "exclude_columns": [], "text_columns": []}
    options = {"per_table": per_table, **_OF_COLUMNS}
    _assert_compared_except(parts, spark, dsn, tmp_path, capsys, later, **options)


@pytest.mark.thorough("test_verify_repair: tables with settings are repaired")
def test_table_without_own_columns_is_compared(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"commit_lsn_column": False, "commit_ts_column": False}
    _assert_compared_except({"t": []}, spark, dsn, tmp_path, capsys, **options)


def _assert_compared_except(
    expected: dict[str, list[str]],
    spark: SparkSession,
    dsn: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    later: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Assert that equal tables are equal while changes wait, and that damage is found.

    `expected`: the parts of each table that are not compared. `later`: settings in the file that changed
    after the tables were copied.
    """

    def in_each(*statements: str) -> None:
        execute(dsn, *(text.replace("TABLE", name) for text in statements for name in expected))

    def verify(expected_code: int) -> list[dict[str, Any]]:
        code, found = pipeline.verify(capsys)
        assert code == expected_code, found
        return [found[f"public.{name}"] for name in expected]

    in_each("create table TABLE (id int primary key, n int, v text)")
    in_each(f"insert into TABLE select g, g % 5, 'v' || g from generate_series(1, {_ROWS}) g")
    pipeline = _begun(spark, dsn, folder, *(f"public.{name}" for name in expected), **options)
    pipeline.configure(**(later or {}))
    in_each("delete from TABLE where id < 20", "update TABLE set n = 7 where id = 30")
    pipeline.catch_up()
    in_each("truncate TABLE", "insert into TABLE values (30, 1, 'again'), (31, 2, 'x')")
    compared = verify(_EQUAL)
    named = [sorted(part["part"] for part in table["not_compared"]) for table in compared]
    assert named == list(expected.values())
    pipeline.catch_up()
    in_each("delete from TABLE where id = 31", "insert into TABLE values (32, 3, 'y')")
    assert [table["source_rows"] for table in verify(_EQUAL)] == [2] * len(expected)
    for name in expected:
        lake = DeltaTable(pipeline.lake_path(f"public.{name}"))
        lake.update(updates={"n": "null"}, predicate="id = 30")
    assert [table["different_columns"] for table in verify(_DIFFERENT)] == [{"n": 1}] * len(expected)


def test_published_part_of_table_is_compared(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row filter, column list, generated column, partitioned table, and a table without updates."""
    execute(
        dsn,
        "create table filtered (id int primary key, n int, v text)",
        "create table made (id int primary key, n int, twice int generated always as (n * 2) stored)",
        "create table parted (id int primary key, n int) partition by range (id)",
        "create table parted_1 partition of parted for values from (0) to (100)",
        "create table parted_2 partition of parted for values from (100) to (1000)",
        "create table appended (n int)",
        "create publication mine for table filtered (id, n) where (id > 10), made, appended, parted"
        " with (publish_via_partition_root)",
    )
    fill = f"from generate_series(1, {_ROWS}) g"
    execute(dsn, f"insert into filtered select g, g, 'v' {fill}", f"insert into made select g, g {fill}")
    execute(dsn, f"insert into parted select g, g {fill}", f"insert into appended select g % 3 {fill}")
    tables = tuple(f"public.{name}" for name in ("appended", "filtered", "made", "parted"))
    pipeline = _begun(
        spark,
        dsn,
        tmp_path,
        *tables,
        publication_mode="use",
        publication="mine",
        insert_only=["public.appended"],
    )
    execute(
        dsn,
        "update filtered set n = 0",
        "update made set n = 0 where id = 1",
        "insert into appended values (1)",
    )
    execute(dsn, "update parted set id = 999 where id = 1", "delete from parted where id = 200")
    code, found = pipeline.verify(capsys)
    assert code == _EQUAL, found
    rows = {table: report["source_rows"] for table, report in found.items()}
    assert list(rows.values()) == [_ROWS + 1, _ROWS - 10, _ROWS, _ROWS - 1]
    parts = {table: [part["part"] for part in report["not_compared"]] for table, report in found.items()}
    assert parts == {**{table: [] for table in tables}, "public.made": ["column twice"]}


@pytest.mark.thorough("test_verify_repair: copies of a row without key")
def test_equal_rows_of_table_without_key_are_counted(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(dsn, "create table heap (a int, b text)", "alter table heap replica identity full")
    execute(dsn, f"insert into heap select g % 2, null from generate_series(1, {_ROWS}) g")
    pipeline = _begun(spark, dsn, tmp_path, "public.heap")
    pipeline.catch_up()
    table = DeltaTable(pipeline.lake_path("public.heap"))
    rows = pa.table(QueryBuilder().register("t", table).execute("select * from t where a = 1 limit 2"))
    write_deltalake(table, rows, mode="append")
    code, found = pipeline.verify(capsys, "--show-keys")
    assert code == _DIFFERENT
    assert (found["public.heap"]["missing"], found["public.heap"]["extra"]) == (0, 2)


def test_table_that_cannot_be_compared_is_named_with_reason_and_is_not_equal(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(dsn, "create table t (id int primary key)", "create table other (id int primary key)")
    pipeline = _begun(spark, dsn, tmp_path, "public.t", "public.other")
    pipeline.catch_up()
    pause_tables(Access(pipeline.pipeline, dsn, dsn), ["public.other"])
    execute(dsn, "alter table t add v int default 1")
    code, found = pipeline.verify(capsys)
    assert code == _NOT_COMPARED
    assert {report["status"] for report in found.values()} == {"not_compared"}
    reasons = {table: report["not_compared"][0]["reason"] for table, report in found.items()}
    assert reasons["public.other"] == "it is paused"
    assert "other columns than the lake table; if it was altered recently" in reasons["public.t"]


def test_changelog_of_an_idle_source_advances_for_a_comparison(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replication app would otherwise record the LSN of a keepalive an hour later."""
    rule = KeepaliveRule(min_interval_s=3600, max_wait_s=3600, idle_wait_s=3600, renew_s=3600)
    monkeypatch.setattr(receiver, "KeepaliveRule", lambda: rule)
    monkeypatch.setattr(verify_app, "start_spark", lambda *_, **__: Borrowed(spark))
    execute(dsn, "create table t (id int primary key)", "insert into t select generate_series(1, 100)")
    pipeline = _begun(spark, dsn, tmp_path, "public.t")
    found: list[Any] = []

    def compare() -> None:
        try:
            wait_until(lambda: pipeline.slot().active_pid, what="the receiver")
            found.append(verify_app.verify(Access(pipeline.pipeline, dsn, dsn), timeout_s=300))
        except BaseException as error:
            found.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    comparing = threading.Thread(target=compare)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        comparing.start()
        assert pipeline.run("replicate") == process.DONE, pipeline.log_tail()
        comparing.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert isinstance(found[0], VerifyReport), found
    assert [report.status for report in found[0].tables.values()] == ["equal"]


def test_statement_of_the_application_goes_before_a_comparison(
    spark: SparkSession,
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The comparison holds the table's lock for hours if the table is large."""
    execute(dsn, "create table t (id int primary key)", "insert into t select generate_series(1, 100)")
    pipeline = _begun(spark, dsn, tmp_path, "public.t")
    pipeline.catch_up()
    compare, tries = comparison.TableComparer.compare, list[int]()

    def compare_amid_ddl(comparer: comparison.TableComparer) -> Any:
        tries.append(1)
        if len(tries) == 1:
            execute(dsn, "set lock_timeout = '60s'", "alter table t add check (id > 0) not valid")
        return compare(comparer)

    monkeypatch.setattr(comparison.TableComparer, "compare", compare_amid_ddl)
    code, found = pipeline.verify(capsys)
    assert (code, found["public.t"]["status"], len(tries)) == (_EQUAL, "equal", 2)


def test_sample_finds_changed_and_missing_rows_and_is_not_called_equal(
    spark: SparkSession, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(dsn, "create table t (id int primary key, n int, v text)")
    execute(dsn, "insert into t select g, g, repeat('v', 1000) from generate_series(1, 2000) g")
    pipeline = _begun(spark, dsn, tmp_path, "public.t")
    pipeline.catch_up()
    execute(dsn, "update t set n = n + 1 where id % 100 = 0")
    code, found = pipeline.verify(capsys, "--sample", "30%")
    table = found["public.t"]
    assert (code, table["status"]) == (_EQUAL, "sample_equal")
    assert 0 < table["sampled_rows"] < 2000
    assert [part["part"] for part in table["not_compared"]] == [
        "rows outside of the sample",
        "rows that only the lake has",
    ]
    assert pipeline.states()["public.t"].verified_through is None
    pipeline.catch_up()
    lake = DeltaTable(pipeline.lake_path("public.t"))
    lake.update(updates={"n": "-1"}, predicate="id % 2 = 0")
    lake.delete("id % 2 = 1")
    code, found = pipeline.verify(capsys, "--sample", "30%")
    table = found["public.t"]
    assert (code, table["missing"] + table["changed"]) == (_DIFFERENT, table["sampled_rows"])
    assert min(table["missing"], table["changed"]) > 0


@pytest.mark.thorough(
    "test_verify_repair: damaged rows are found; test_sample_finds_changed_and_missing_rows"
)
def test_many_differences_are_split_into_finer_ranges_and_listed_up_to_a_limit(
    spark: SparkSession,
    dsn: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparison, "LISTED_ROWS", 50)
    execute(dsn, "create table t (id int primary key, n int)")
    execute(dsn, f"insert into t select g, g from generate_series(1, {_ROWS}) g")
    pipeline = _begun(spark, dsn, tmp_path, "public.t")
    pipeline.catch_up()
    lake = DeltaTable(pipeline.lake_path("public.t"))
    lake.update(updates={"n": "-1"}, predicate="id % 50 = 0")
    _, found = pipeline.verify(capsys)
    table = found["public.t"]
    # The ranges of 10 rows have some 60 rows each.
    assert (table["changed"], table["listed_ranges"]) == (_ROWS // 50, table["differing_ranges"])
    lake.update(updates={"n": "-2"})
    code, found = pipeline.verify(capsys)
    table = found["public.t"]
    assert code == _DIFFERENT
    assert 0 < table["changed"] <= 50
    assert table["listed_ranges"] < table["differing_ranges"]
