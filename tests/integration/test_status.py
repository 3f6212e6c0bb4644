"""`pgrepl status` against a real server and a real lake, without any app."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, NamedTuple

import psycopg2.extensions
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.replication.app.status import status as status_module
from airflow_provider_pgrepl.replication.app.status import text
from airflow_provider_pgrepl.replication.app.status.health import (
    HealthLimits,
    ProblemKind,
    find_health_problems,
)
from airflow_provider_pgrepl.replication.app.status.status import read_status
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.writer import (
    ChangelogWriter,
    create_changelog,
    mark_torn_down,
)
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.table import app_id
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.server import read_server, wal_lsn
from airflow_provider_pgrepl.replication.source.stream import ReplicationStream
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.recorded_events import EventKind
from airflow_provider_pgrepl.replication.state.reports import CopyProgress
from airflow_provider_pgrepl.replication.state.tables import REPAIRING, TableState
from tests.support.changelogs import Written
from tests.support.recorded import Recorded

ROOT = Path(__file__).parents[2]
TO_STREAMING = (TableState.PENDING, TableState.SNAPSHOTTING, TableState.CATCHING_UP, TableState.STREAMING)
EPOCH = Epoch(1)


class Said(NamedTuple):
    """The exit code and the output of a command."""

    returncode: int
    stdout: str
    stderr: str


class Shop:
    """A pipeline as its apps leave it: two tables, one of them errored."""

    def __init__(self, dsn: str, pg: psycopg2.extensions.connection, folder: Path) -> None:
        self.dsn = dsn
        self.pg = pg
        # Slots are the server's, not the database's: each test needs one of its own.
        self.pipeline = Pipeline(name=f"shop_{os.urandom(4).hex()}", lake=str(folder), tables=("public.*",))
        self.file = folder / "pipeline.json"
        self.file.write_text(self.pipeline.to_json())

    def make_slot(self) -> LSN:
        with self.pg.cursor() as cursor:
            # Before version 18 the server ends a stream whose publication came after the slot.
            cursor.execute(f"create publication {self.pipeline.publication}")
            cursor.execute(
                "select lsn::text from pg_create_logical_replication_slot(%s, 'pgoutput')",
                (self.pipeline.slot,),
            )
            (lsn,) = cursor.fetchone() or ("0/0",)
            return LSN.parse(lsn)

    def set_up(self) -> LSN:
        """Everything at one LSN: the slot's consistent point."""
        at = self.make_slot()
        name, lake = self.pipeline.name, self.pipeline.lake_root
        record = self.epoch_record(at)
        create_changelog(changelog_uri(lake), record)
        with StateDatabase(self.dsn, "test") as state_db:
            state_db.migrate()
            state_db.register(self.pipeline, record.system_identifier, True, True)
            for table in ("orders", "broken"):
                for state in TO_STREAMING:
                    state_db.set_state(name, TableName("public", table), state)
            state_db.set_state(
                name,
                TableName("public", "broken"),
                TableState.ERRORED,
                error="ValueRangeError",
                reason="column price: a value of numeric(5,2) does not fit into decimal(5,2)",
                hint=f"resnapshot it: pgrepl snapshot FILE.json --tables public.broken, {'x' * 60}",
                lsn=at,
            )
            state_db.write_progress(
                name,
                received_lsn=at,
                durable_lsn=at,
                confirmed_lsn=at,
                changes_per_s=1234.0,
                holder="host:42",
            )
        version = self.write_table("orders", at)
        self.write_table("broken", at)
        moment = datetime.now(UTC) - timedelta(minutes=3)
        ConsistentPoints(lake).append(ConsistentPoint(EPOCH, LSN(at - 1), moment, {"public.orders": version}))
        return at

    def epoch_record(self, at: LSN) -> EpochRecord:
        """Return the record of the epoch that begins at an LSN."""
        pipeline, server = self.pipeline, read_server(self.pg)
        return EpochRecord(
            pipeline.name,
            EPOCH,
            server.system_identifier,
            1,
            pipeline.slot,
            pipeline.publication,
            16_400,
            at,
            database=server.database,
            database_oid=server.database_oid,
        )

    def write_table(self, table: str, position: LSN) -> int:
        uri = f"{self.pipeline.lake_root}/public/{table}"
        transaction = Transaction(app_id(self.pipeline.name, EPOCH), position - 1)
        properties = CommitProperties(app_transactions=[transaction])
        write_deltalake(uri, pa.table({"id": [1]}), commit_properties=properties)
        version: int = DeltaTable(uri).version()
        return version

    def status(self, *arguments: str, **environment: str) -> Said:
        """Run the command in the test's process."""
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(err):
            for name, value in {"PGREPL_DSN": self.dsn, **environment}.items():
                patched.setenv(name, value)
            try:
                code = main(["status", str(self.file), *arguments])
            except SystemExit as ended:
                code = int(str(ended.code))
        return Said(code, out.getvalue(), err.getvalue())

    def run(self, *arguments: str, **environment: str) -> Said:
        """Run the command as a process of its own."""
        command = [sys.executable, "-m", "airflow_provider_pgrepl", "status", str(self.file), *arguments]
        environment = {**os.environ, "PGREPL_DSN": self.dsn, **environment}
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
        )
        return Said(done.returncode, done.stdout, done.stderr)

    def json(self) -> dict[str, Any]:
        found = self.status("--json")
        assert found.returncode == 0, found.stderr
        status: dict[str, Any] = json.loads(found.stdout)
        return status


@pytest.fixture
def shop(dsn: str, pg: psycopg2.extensions.connection, tmp_path: Path) -> Shop:
    return Shop(dsn, pg, tmp_path)


def test_before_anything_is_set_up_it_says_what_to_run(shop: Shop) -> None:
    found = shop.status()
    assert found.returncode == 0, found.stderr
    assert f"Pipeline {shop.pipeline.name} has not been set up yet: run pgrepl snapshot" in found.stdout
    assert shop.json()["set_up"] is False
    assert shop.json()["tables"] == []


def test_states_positions_and_lag_are_shown_while_no_app_runs(shop: Shop) -> None:
    at = shop.set_up()
    with shop.pg.cursor() as cursor:
        cursor.execute("create table t as select repeat('x', 1000) from generate_series(1, 1000)")
    status = shop.json()
    end = wal_lsn(shop.pg)
    assert status["set_up"] is True
    assert status["epoch"] == 1
    behind = status["steps"]["durable"]["lag_bytes"]
    assert status["steps"]["durable"]["lsn"] == status["steps"]["confirmed"]["lsn"] == str(at)
    assert 1_000_000 < behind <= end - at
    assert status["steps"]["applied"] == {"lsn": str(LSN(at - 1)), "lag_bytes": behind}
    assert status["slot"]["active"] is False
    assert status["slot"]["held_bytes"] >= behind
    assert status["consistent_point"]["tables"] == {"public.orders": 0}
    assert 179 <= status["last_applied_commit_age_s"] < 300
    by_name = {table["table"]: table for table in status["tables"]}
    assert by_name["public.orders"]["state"] == "streaming"
    assert by_name["public.orders"]["position_lsn"] == str(LSN(at - 1))
    assert by_name["public.orders"]["lag_bytes"] == behind
    assert by_name["public.broken"]["state"] == "errored"
    assert by_name["public.broken"]["error_lsn"] == str(at)


class _Ahead(datetime):
    """The clock of a host that is an hour ahead of the server's."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        return datetime.now(tz) + timedelta(hours=1)


def test_ages_are_by_the_clock_of_the_records_and_not_of_this_host(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.set_up()
    monkeypatch.setattr(status_module, "datetime", _Ahead)
    monkeypatch.setattr(text, "datetime", _Ahead)
    assert re.search(r"was on host:42, last report [\d.]+ s ago", shop.status().stdout)
    monkeypatch.setenv("PGREPL_DSN", shop.dsn)
    kinds = {one.kind for one in find_health_problems(read_status(shop.pipeline), HealthLimits()).problems}
    assert ProblemKind.TABLE_ERRORED in kinds
    assert ProblemKind.NO_HEARTBEAT not in kinds


def test_tables_that_patterns_leave_out_are_named(shop: Shop) -> None:
    shop.set_up()
    with shop.pg.cursor() as cursor:
        for index in range(22):
            cursor.execute(f"create table keyless_{index:02} (id int)")
    (left_out,) = (problem for problem in shop.json()["problems"] if "leaves out" in problem)
    assert left_out.startswith("the pattern leaves out public.keyless_00, public.keyless_01, ")
    assert "public.keyless_19 and 2 more: no usable key" in left_out


def test_children_by_inheritance_outside_of_the_pipeline_are_named(
    dsn: str, pg: psycopg2.extensions.connection, tmp_path: Path
) -> None:
    with pg.cursor() as cursor:
        cursor.execute("create table parent (id int primary key)")
        cursor.execute("create table child (primary key (id)) inherits (parent)")
    recorded = Recorded(dsn, "public.parent", lake=str(tmp_path))
    problems = read_status(recorded.pipeline, recorded.access).problems
    warning = "public.parent: 1 of the tables that inherit from it is not in the pipeline (public.child)"
    assert any(problem.startswith(warning) for problem in problems)


def test_a_quiet_table_is_as_far_as_the_consistent_point_that_holds_it(shop: Shop) -> None:
    shop.set_up()
    before = {table["table"]: table["lag_bytes"] for table in shop.json()["tables"]}
    end = wal_lsn(shop.pg)
    ConsistentPoints(shop.pipeline.lake_root).append(ConsistentPoint(EPOCH, end, None, {"public.orders": 0}))
    status = shop.json()
    after = {table["table"]: table["lag_bytes"] for table in status["tables"]}
    assert after["public.orders"] == status["steps"]["applied"]["lag_bytes"]
    assert after["public.broken"] >= before["public.broken"]


def test_the_text_reads_well_at_a_hundred_columns(shop: Shop) -> None:
    at = shop.set_up()
    found = shop.status()
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert max(map(len, lines[3:])) <= 100
    assert "2 tables: " in found.stdout
    header = next(line for line in lines if line.startswith("table "))
    orders = next(line for line in lines if line.startswith("public.orders "))
    assert orders.index("streaming") == header.index("state")
    assert orders.index(str(LSN(at - 1))) == header.index("position")
    note = lines.index(next(line for line in lines if line.startswith("public.broken: ")))
    assert re.fullmatch(
        rf"public.broken: ValueRangeError at {at}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC", lines[note]
    )
    assert lines[note + 1 : note + 3] == [
        "  column price: a value of numeric(5,2) does not fit into decimal(5,2)",
        "  hint: resnapshot it: pgrepl snapshot FILE.json --tables public.broken,",
    ]
    assert "not running; was on host:42, last report" in found.stdout
    assert f"{shop.pipeline.slot}, no process reads it, holds " in found.stdout


def test_paused_tables_are_told_from_others_and_removed_ones_are_gone(shop: Shop) -> None:
    at = shop.set_up()
    with StateDatabase(shop.dsn, "test") as state_db:
        for table in ("paused", "removed", "old"):
            for state in TO_STREAMING:
                state_db.set_state(shop.pipeline.name, TableName("public", table), state)
            shop.write_table(table, at)
        state_db.set_state(shop.pipeline.name, TableName("public", "paused"), TableState.PAUSED)
        state_db.set_state(shop.pipeline.name, TableName("public", "removed"), TableState.REMOVED)
        # As a version that knew no classes has left it.
        state_db.set_state(
            shop.pipeline.name,
            TableName("public", "old"),
            TableState.ERRORED,
            reason="one line\nand another",
        )
    text = shop.status().stdout
    lines = text.splitlines()
    assert max(map(len, lines[3:])) <= 100
    assert "4 tables: 2 errored, " in text
    tables = {table["table"]: table for table in shop.json()["tables"]}
    assert tables["public.broken"]["error"] == "ValueRangeError"
    assert tables["public.paused"]["lag_bytes"] >= 0
    assert "public.removed" not in tables
    old = lines.index(next(line for line in lines if line.startswith("public.old: error, since ")))
    assert lines[old + 1 : old + 3] == ["  one line", "  and another"]
    assert not any(line.startswith("public.paused: ") for line in lines)
    assert "public.removed" not in text


def test_table_that_a_killed_snapshot_left_snapshotting_is_a_problem(shop: Shop) -> None:
    shop.set_up()
    with StateDatabase(shop.dsn, "snapshot") as state_db:
        state_db.set_state(shop.pipeline.name, TableName("public", "orders"), TableState.SNAPSHOTTING)
        state_db.lock(shop.pipeline.name, "snapshot")
        assert not [problem for problem in shop.json()["problems"] if "not being copied" in problem]
    (problem,) = [problem for problem in shop.json()["problems"] if "not being copied" in problem]
    assert problem.startswith("public.orders: not being copied, because the snapshot was killed: run pgrepl")


@pytest.mark.thorough("test_table_that_a_killed_snapshot_left_snapshotting_is_a_problem")
def test_table_that_a_killed_repair_left_paused_is_a_problem(shop: Shop) -> None:
    shop.set_up()
    with StateDatabase(shop.dsn, "verify") as state_db:
        orders = state_db.read_tables(shop.pipeline.name)[TableName("public", "orders")]
        assert state_db.move(shop.pipeline.name, orders, TableState.PAUSED, reason=REPAIRING)
        state_db.lock(shop.pipeline.name, "verify")
        assert not [problem for problem in shop.json()["problems"] if "paused" in problem]
        assert f"public.orders: paused, since {datetime.now(UTC):%Y}" in shop.status().stdout
    (problem,) = [problem for problem in shop.json()["problems"] if "paused" in problem]
    assert problem.startswith("public.orders: still paused, because the repair was killed: run pgrepl verify")


@pytest.mark.thorough("test_app_that_starts_is_reported_as_running")
def test_a_slot_whose_reader_says_nothing_is_not_taken_for_an_app_that_runs(shop: Shop) -> None:
    shop.set_up()
    slot, publication = shop.pipeline.slot, shop.pipeline.publication
    with ReplicationStream(shop.dsn, slot, publication) as stream, shop.pg.cursor() as cursor:
        # On a busy machine the command itself may take long.
        cursor.execute("update _pgrepl.progress set updated_at = now() + interval '1 minute'")
        assert "running on host:42" in shop.status().stdout
        cursor.execute("update _pgrepl.progress set updated_at = now() - interval '1 minute'")
        text = shop.status().stdout
        assert "starts, hangs, or has ended unnoticed; was on host:42" in text
        assert f"free the slot: select pg_terminate_backend({stream.sender_pid})" in text
        assert max(map(len, text.splitlines()[3:])) <= 100


def test_a_state_of_an_older_version_is_a_problem_and_not_a_failure(shop: Shop) -> None:
    shop.set_up()
    with shop.pg.cursor() as cursor:
        cursor.execute("alter table _pgrepl.tables drop column error")
    found = shop.status()
    assert found.returncode == 0, found.stderr
    assert "schema _pgrepl is of an older version" in found.stdout


def test_a_slot_that_is_gone_and_a_lake_that_is_not_ours_are_said(shop: Shop) -> None:
    shop.set_up()
    with shop.pg.cursor() as cursor:
        cursor.execute("select pg_drop_replication_slot(%s)", (shop.pipeline.slot,))
    shown = " ".join(shop.status().stdout.split())
    assert f"there is no replication slot {shop.pipeline.slot} in database" in shown
    assert "is a copy of the source" in shown
    assert "--new-epoch" not in shown
    record = replace(shop.epoch_record(LSN(1)), pipeline="other")
    DeltaTable(changelog_uri(shop.pipeline.lake_root)).alter.set_table_description(record.to_json())
    found = shop.status()
    assert found.returncode == 0
    assert "is not at this source" in found.stdout
    assert "belongs to the pipeline 'other'" in " ".join(found.stdout.split())
    assert shop.json()["slot"] is None


def test_after_a_teardown_that_kept_the_lake_no_new_epoch_has_to_be_asked_for(shop: Shop) -> None:
    shop.set_up()
    with shop.pg.cursor() as cursor:
        cursor.execute("select pg_drop_replication_slot(%s)", (shop.pipeline.slot,))
        cursor.execute("drop schema _pgrepl cascade")
    shown = shop.status().stdout
    assert "is gone" not in shown, "a copy of the source may have been cleaned"
    mark_torn_down(changelog_uri(shop.pipeline.lake_root))
    found = shop.status()
    assert "is gone, and this database records no such pipeline" in found.stdout
    assert "new epoch" not in found.stdout


def test_the_durable_lsn_is_the_changelogs_whatever_was_reported(shop: Shop) -> None:
    at = shop.set_up()
    ChangelogWriter(changelog_uri(shop.pipeline.lake_root)).record_keepalive(LSN(at + 8))
    assert shop.json()["steps"]["durable"]["lsn"] == str(LSN(at + 8))


def test_a_source_that_cannot_be_reached_is_one_sentence_and_may_be_tried_again(shop: Shop) -> None:
    found = shop.run(PGREPL_DSN="host=127.0.0.1 port=1 dbname=x user=u password=hunter2")
    assert found.returncode == 75
    assert "Traceback" not in found.stderr
    assert "hunter2" not in found.stderr
    assert 1 <= len(found.stderr.strip().splitlines()) <= 3


@pytest.mark.parametrize(
    ("content", "environment", "said"),
    [
        ("{", {}, "not JSON"),
        ('{"name": "a"}', {}, "lake: is missing"),
        (None, {"PGREPL_DSN": ""}, "PGREPL_DSN is not set"),
        (None, {"PGREPL_DSN": "no=such option"}, "cannot be read"),
    ],
)
def test_status_with_invalid_file_or_dsn_exits_78_without_traceback(
    shop: Shop, content: str | None, environment: dict[str, str], said: str
) -> None:
    if content is not None:
        shop.file.write_text(content)
    found = shop.status(**environment)
    assert found.returncode == 78
    assert said in found.stderr
    assert "Traceback" not in found.stderr


def test_a_wrong_command_ends_with_78_and_the_usage(shop: Shop) -> None:
    found = shop.run("--nonsense")
    assert found.returncode == 78
    assert "usage: pgrepl" in found.stderr


def test_check_prints_problems_with_hints_and_exits_1(shop: Shop) -> None:
    shop.set_up()
    found = shop.status("--check")
    assert found.returncode == 1, found.stderr
    assert f"failure: slot {shop.pipeline.slot} is not read by any process\n  hint: " in found.stdout
    assert "failure: table public.broken is errored: ValueRangeError: column price" in found.stdout
    found = shop.status("--check", "--json")
    assert found.returncode == 1
    problems = json.loads(found.stdout)["problems"]
    assert {"slot_inactive", "table_errored"} <= {problem["kind"] for problem in problems}


def test_oldest_change_that_no_table_has_applied_is_dated(shop: Shop) -> None:
    at = shop.set_up()
    assert shop.json()["changelog"]["oldest_needed_at"] is None
    written = Written(changelog_uri(shop.pipeline.lake_root))
    written.transaction(at + 8, r7=1)  # dated at the epoch of PostgreSQL's timestamps
    written.flush()
    assert shop.json()["changelog"]["oldest_needed_at"].startswith("2000-01-01T")
    assert f"failure: pipeline {shop.pipeline.name} lags " in shop.status("--check").stdout


def test_app_that_starts_is_reported_as_running(shop: Shop) -> None:
    shop.set_up()
    with StateDatabase(shop.dsn, "replicate") as state_db:
        state_db.lock(shop.pipeline.name, "replicate")
        state_db.write_progress(shop.pipeline.name, holder="host:43")
        text = shop.status().stdout
        state_db.record_run(shop.pipeline.name, EventKind.STARTED)
    assert "running on host:43, does not read the slot: starts, or connects again; last report" in text
    assert "app       not running; was on host:43" in shop.status().stdout
    with StateDatabase(shop.dsn, "replicate") as state_db:
        state_db.record_run(shop.pipeline.name, EventKind.STOPPED)
    assert re.search(r"app       not running, stopped [\d.]+ s ago; was on host:43", shop.status().stdout)
    assert shop.json()["app"]["ended"]["kind"] == "stopped"


def test_status_shows_the_progress_of_a_copy(shop):
    shop.set_up()
    table = TableName("public", "orders")
    with StateDatabase(shop.dsn, "test") as state_db:
        state_db.set_state(shop.pipeline.name, table, TableState.SNAPSHOTTING)
        state_db.record_copies(
            shop.pipeline.name, {table: CopyProgress(1_200_000, 5_000_000, 2, 9, 250_000.0, 15.0)}
        )
    assert "public.orders: copying 1.2 M of 5 M rows, 250 k/s, 15 s left" in shop.status().stdout
    tables = {one["table"]: one for one in json.loads(shop.status("--json").stdout)["tables"]}
    assert (tables["public.orders"]["copying"]["rows"], tables["public.broken"]["copying"]) == (
        1_200_000,
        None,
    )
