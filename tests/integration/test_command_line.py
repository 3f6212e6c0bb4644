"""`pgrepl`: what each command says and with which code it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.replication.source.connection import rows
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from tests.support.kept import Kept
from tests.support.replicated import execute

A, B = "public.a", "public.b"


class Line:
    """The command line of one pipeline."""

    def __init__(self, kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
        self.kept = kept
        self._capsys = capsys

    def __call__(self, command: str, *arguments: str) -> tuple[int, str, str]:
        """The exit code, and what was said on stdout and stderr."""
        try:
            code = main([command, str(self.kept.file), *arguments])
        except SystemExit as ended:
            code = int(str(ended.code))
        said = self._capsys.readouterr()
        return code, said.out, said.err


@pytest.fixture
def line(dsn, tmp_path, monkeypatch, capsys):
    execute(
        dsn, "create table a (id int primary key, t text)", "create table b (id int primary key, at date)"
    )
    kept = Kept(dsn, tmp_path, ("public.*",))
    kept.take(A, B)
    monkeypatch.setenv("PGREPL_DSN", dsn)
    return Line(kept, capsys)


def test_tables_are_paused_and_resumed(line):
    assert line("pause", A, B) == (0, f"{A}: paused\n{B}: paused\n", "")
    assert line("resume", A) == (0, f"{A}: catching_up\n", "")
    assert line.kept.states() == {A: "catching_up", B: "paused"}


@pytest.mark.thorough("test_tables_are_paused_and_resumed")
def test_resume_prints_state_of_table_that_was_not_paused(line):
    assert line("resume", A) == (0, f"{A}: streaming\n", "")
    assert line.kept.states() == {A: "streaming", B: "streaming"}


def test_pausing_unknown_table_exits_78_with_hint(line):
    code, out, err = line("pause", "public.c")
    assert (code, out) == (78, "")
    assert err.startswith(
        f"not among the tables of pipeline {line.kept.pipeline.name}: public.c\n  hint: its"
    )


def test_source_that_has_its_token_needs_no_acceptance(line):
    assert line("accept-source", "7/shop") == (0, "nothing to accept: the source has the token\n", "")


@pytest.mark.thorough(
    "test_hidden_own_tables: points that are given up; --yes in test_a_lake_table_is_dropped_only_with_yes"
)
def test_points_that_are_lost_are_given_up_by_choice(line):
    assert line("accept-missing") == (0, "nothing is missing\n", "")
    root = line.kept.pipeline.lake_root
    line.kept.write_point(line.kept.begin(), A, B)
    shutil.rmtree(f"{root}/_pgrepl/consistent_points")
    code, out, err = line("accept-missing")
    assert (code, out) == (78, "")
    lost = f"the table of consistent points of this lake is not in {root}/_pgrepl/consistent_points"
    assert f"with --yes the lake goes on without:\n{lost}\n" in err
    assert line("accept-missing", "--yes") == (0, f"given up: {lost}\n", "")


def test_retry_says_what_stays_in_error(line):
    assert line("retry") == (0, "no table is errored\n", "")
    line.kept.fail(A)
    line.kept.fail(B)
    execute(line.kept.dsn, "alter table b alter at type text")
    code, out, err = line("retry")
    assert (code, out) == (78, f"{A}: catching_up\n")
    assert err.startswith(f"stays errored: {B}: the type of column at changed from date to text")
    assert "\n  hint: resnapshot it: pgrepl snapshot FILE.json --tables 'public.b'" in err
    code, out, err = line("retry", B)
    assert (code, out) == (78, "")
    assert line.kept.states() == {A: "catching_up", B: "errored"}
    assert line("retry", A) == (0, "none of these tables is errored\n", "")


@pytest.mark.thorough("test_retry_says_what_stays_in_error")
def test_retry_prints_no_new_state_for_table_that_another_process_changed(line, monkeypatch):
    line.kept.fail(A)
    monkeypatch.setattr(StateDatabase, "move", lambda *_, **__: False)
    code, out, err = line("retry", A)
    overtaken = "changed by another process during the retry; see pgrepl status FILE.json"
    assert (code, out, err) == (0, f"{A}: {overtaken}\n", "")
    assert line.kept.states() == {A: "errored", B: "streaming"}


def test_a_lake_table_is_dropped_only_with_yes(line):
    assert line("remove", A) == (0, f"{A}: removed, lake table kept\n", "")
    code, out, err = line("remove", "public.c", "--drop-lake-tables")
    assert (code, out, "not among the tables" in err) == (78, "", True)
    code, out, err = line("remove", A, "--drop-lake-tables")
    assert (code, out) == (78, "")
    assert err.splitlines() == [
        line.kept.access.describe(),
        f"this would drop the lake tables of {A}, with their histories, in {line.kept.pipeline.lake_root}",
        "nothing was changed: run the same with --yes to do it",
    ]
    assert Path(line.kept.lake_path(A)).exists()
    assert line("remove", A, "--drop-lake-tables", "--yes") == (0, f"{A}: removed, lake table dropped\n", "")
    assert not Path(line.kept.lake_path(A)).exists()


def test_teardown_first_says_what_it_would_do(line):
    slot, publication = line.kept.pipeline.slot, line.kept.pipeline.publication
    code, out, err = line("teardown")
    assert (code, out) == (78, "")
    assert err.splitlines()[:4] == [
        line.kept.access.describe(),
        "with --yes, teardown would do this:",
        f"would drop: slot {slot}",
        f"would drop: publication {publication}",
    ]
    assert line.kept.slot().name == slot
    code, out, err = line("teardown", "--drop-lake", "--yes")
    assert (code, err) == (0, "")
    root = line.kept.pipeline.lake_root
    assert f"dropped: lake table {root}/public/a\n" in out
    assert f"dropped: the changelog of the lake {root}\n" in out
    assert line("teardown", "--drop-lake") == (0, "nothing to drop\n", "")


def test_teardown_exits_75_and_names_running_replicate_process(line):
    with line.kept.access.state_db("replicate") as app:
        app.lock(line.kept.pipeline.name, "replicate")
        code, _, err = line("teardown", "--yes", "--timeout", "0.1")
    assert code == 75
    assert "another process is at it already (replicate)" in err


def test_drift_is_said_and_unsafe_drift_ends_with_78(line):
    code, out, _ = line("drift")
    assert (code, "none has drifted" in out) == (0, True)
    execute(line.kept.dsn, "drop table b")
    code, out, _ = line("drift", "--no-mark-errored", "--json")
    assert (code, json.loads(out)["tables"][0]["table"]) == (78, B)
    assert line.kept.states()[B] == "streaming"
    code, out, _ = line("drift")
    assert (code, "public.b: unsafe, now errored: the table was dropped" in out) == (78, True)
    assert line.kept.states()[B] == "errored"


def test_a_migration_is_checked_and_leaves_nothing(line, tmp_path):
    migration = tmp_path / "migration.sql"
    code, _, err = line("check-migration", str(migration))
    assert (code, err) == (78, f"cannot read the migration {migration}: No such file or directory\n")
    migration.write_text("alter table a alter t type int using 1; drop table b;")
    code, out, _ = line("check-migration", str(migration))
    assert code == 78
    assert "public.a: unsafe" in out
    assert "public.b: unsafe" in out
    migration.write_text("create index on a (t);")
    assert line("check-migration", str(migration))[0] == 0


@pytest.mark.parametrize("arguments", [("pause",), ("remove",), ("teardown", "public.a"), ("restart",)])
@pytest.mark.thorough("the same test, of a command without tables", "arguments1", "arguments2", "arguments3")
def test_a_wrong_command_line_ends_with_78_and_the_usage(line, arguments):
    code, _, err = line(*arguments)
    assert code == 78
    assert "usage: " in err


def test_a_database_named_by_mistake_is_left_as_it_is(dsn, tmp_path, monkeypatch, capsys):
    kept = Kept(dsn, tmp_path, ("public.*",))
    monkeypatch.setenv("PGREPL_DSN", dsn)
    line = Line(kept, capsys)
    name = kept.pipeline.name
    said = (
        f"pipeline {name} is not recorded in this database\n  hint: if the pipeline exists, set"
        " PGREPL_STATE_DSN, or state_conn_id, to the database with its records; only for a new pipeline run"
        " pgrepl snapshot FILE.json, or PgSnapshotOperator\n"
    )
    for command in (("drift",), ("pause", A), ("resume", A), ("retry",), ("remove", A), ("retry", A)):
        assert line(*command) == (78, "", said)
    with kept.source() as source:
        assert rows(source, "select 1 from pg_namespace where nspname = '_pgrepl'") == []
