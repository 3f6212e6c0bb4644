"""app/operations/maintain.py: maintenance by hand, with or without the replication app's own."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.errors import (
    BusyError,
    ConfigError,
    LakeTableError,
    NoChangelogError,
    PgReplError,
)
from airflow_provider_pgrepl.replication.app import needed_changes
from airflow_provider_pgrepl.replication.app.operations import maintain as operation
from airflow_provider_pgrepl.replication.app.operations.maintain import MaintenanceReport, maintain
from airflow_provider_pgrepl.replication.app.operations.tables import remove_tables, retry_tables
from airflow_provider_pgrepl.replication.app.operations.teardown import teardown
from airflow_provider_pgrepl.replication.changelog import maintenance as retention
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import (
    live_files,
    open_changelog,
    read_durable_lsn,
    read_floor_lsn,
)
from airflow_provider_pgrepl.replication.lake import maintenance
from airflow_provider_pgrepl.replication.lake.files import compaction
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.kept import Kept
from tests.support.replicated import execute, wait_until

pytestmark = pytest.mark.slow

A, B, H = "public.a", "public.b", "public.h"
LATER = timedelta(hours=2)
SETTINGS: dict[str, Any] = {
    "per_table": {H: {"history": True}},
    "merge": "merge_on_read",
    "flush_interval_s": 0.05,
}


@pytest.fixture
def kept(dsn: str, tmp_path: Path) -> Kept:
    for name in "abh":
        execute(dsn, f"create table {name} (id int primary key, v text)")
        execute(dsn, f"insert into {name} select g, 'old' from generate_series(1, 50) g")
    found = Kept(dsn, tmp_path, ("public.*",), **SETTINGS)
    found.take(A, B, H)
    for number in range(1, 5):
        for name in "abh":
            execute(dsn, f"update {name} set v = 'n{number}' where id = {number}")
        found.bring_all_forward(A, B, H)
    return found


@pytest.fixture
def two_hours_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the store's clock forward, so that all hours in which something was received are closed."""
    real = StateDatabase.now
    monkeypatch.setattr(StateDatabase, "now", lambda state_db: real(state_db) + LATER)


def run(
    kept: Kept, *tables: str, wait: Callable[[float], bool] = lambda _: False, **how: Any
) -> MaintenanceReport:
    return maintain(kept.access, tables, wait=wait, **how)


def files(kept: Kept, table: str) -> int:
    return len(DeltaTable(kept.lake_path(table)).file_uris())


def data_files(kept: Kept, table: str) -> set[str]:
    return {
        file.name for file in Path(kept.lake_path(table)).rglob("*.parquet") if "_delta_log" not in file.parts
    }


def rows_of(kept: Kept, table: str) -> dict[int, str]:
    opened = DeltaTable(kept.lake_path(table))
    found = pa.table(QueryBuilder().register("t", opened).execute("select id, v from t").read_all())
    return dict(zip(found["id"].to_pylist(), found["v"].to_pylist(), strict=True))


def changelog_files(kept: Kept) -> int:
    changelog = open_changelog(changelog_uri(kept.pipeline.lake_root))
    return len(live_files(changelog, Epoch(1), LSN(0)))


@pytest.mark.usefixtures("two_hours_later")
def test_without_the_app_all_is_done(kept: Kept) -> None:
    before, found = files(kept, A), rows_of(kept, A)
    assert before > 2
    assert changelog_files(kept) > 3
    done = run(kept)
    assert [table.table for table in done.tables] == [A, B, H, f"{H}~history"]
    assert {table.compaction.after.files for table in done.tables} == {1}
    assert {table.compaction.after.marked for table in done.tables} == {0}
    assert (files(kept, A), done.app_runs, done.failures, done.exit_code) == (1, False, {}, 0)
    assert done.compacted_files > 3
    assert changelog_files(kept) <= 2, "two, when an hour ended meanwhile"
    assert rows_of(kept, A) == found
    again = run(kept)
    assert [table.compaction.before for table in again.tables] == [
        table.compaction.after for table in done.tables
    ]
    # Tables continue from where they are.
    execute(kept.dsn, "update a set v = 'after' where id = 1")
    kept.bring_forward(A)
    assert rows_of(kept, A) == found | {1: "after"}


def test_no_table_is_dropped_and_no_second_maintenance_begins_meanwhile(kept: Kept) -> None:
    others: tuple[Callable[[], object], ...] = (
        lambda: run(kept),
        lambda: remove_tables(kept.access, [A], drop_lake_tables=True, timeout_s=0),
        lambda: teardown(kept.access, drop_lake=True, timeout_s=0),
    )

    def meanwhile(_: object) -> None:
        for other in others:
            with pytest.raises(BusyError, match=r"at it already \(maintain\): pgrepl maintain"):
                other()

    assert len(run(kept, A, on_table=meanwhile).tables) == 1
    remove_tables(kept.access, [A], drop_lake_tables=True)
    assert not Path(kept.lake_path(A)).exists()


@pytest.mark.thorough("test_without_the_app_all_is_done")
def test_only_chosen_tables_are_compacted(kept: Kept) -> None:
    before = files(kept, A)
    assert [table.table for table in run(kept, B).tables] == [B]
    assert (files(kept, A), files(kept, B)) == (before, 1)
    with pytest.raises(ConfigError, match=r"public\.nope"):
        run(kept, "public.nope")


@pytest.mark.usefixtures("two_hours_later")
def test_beside_the_app_its_changelog_and_its_histories_are_left_to_it(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    real = maintenance.Maintenance.run
    monkeypatch.setattr(
        maintenance.Maintenance, "run", lambda self, **how: asked.append(how) or real(self, **how)
    )
    with kept.access.state_db("replicate") as app:
        app.lock(kept.pipeline.name, "replicate")
        done = run(kept)
        assert [table.table for table in done.tables] == [A, B, H]
        assert (done.app_runs, done.exit_code, files(kept, A)) == (True, 0, 1)
        assert "the replication app runs" in done.to_text()
        assert (asked[0]["needed_above"], asked[0]["reader_version"]) == (None, None)
    run(kept)
    assert asked[1]["needed_above"] is not None
    assert asked[1]["reader_version"] >= 0


@pytest.mark.parametrize("writer", ["replicate", "snapshot"])
def test_files_of_lake_tables_stay_while_a_process_runs_that_writes_points(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    """The process may know versions that its next point names."""
    kept.write_point(durable(kept), A, B, H)
    for value in ("in no point", "in the newest point"):
        execute(kept.dsn, f"update a set v = '{value}'")
        kept.bring_all_forward(A)
    kept.write_point(durable(kept), A, B, H)
    monkeypatch.setattr(maintenance.Maintenance, "_now", lambda *_, **__: datetime.now(UTC) + LATER)
    before = data_files(kept, A)
    with kept.access.state_db(writer) as app:
        app.lock(kept.pipeline.name, writer)
        done = run(kept)
        assert before <= data_files(kept, A)
        assert done.app_runs is (writer == "replicate")
    run(kept)
    assert not before <= data_files(kept, A)


@pytest.mark.thorough("test_without_the_app_all_is_done")
def test_maintain_reports_no_running_app_after_app_session_is_lost(kept: Kept) -> None:
    with kept.access.state_db("replicate") as app:
        app.lock(kept.pipeline.name, "replicate")
        app._connection.close()
        with kept.access.state_db("look") as state_db:
            wait_until(
                lambda: not state_db.is_locked(kept.pipeline.name, "replicate"), what="the session to be gone"
            )
    assert run(kept).app_runs is False


@pytest.mark.thorough("test_beside_the_app_its_changelog_and_its_histories_are_left_to_it")
def test_an_app_may_start_meanwhile(kept: Kept) -> None:
    def start(_: object) -> None:
        with kept.access.state_db("replicate") as app:
            app.lock(kept.pipeline.name, "replicate")

    assert len(run(kept, on_table=start).tables) == 4


def old_hours(kept: Kept) -> Kept:
    """The same pipeline, which keeps changes for no time at all."""
    settings = {
        "changelog_retention_h": 0.001,
        "consistent_point_retention_h": 0.001,
        "consistent_point_keep_all_h": 0.0005,
    }
    kept.pipeline = replace(kept.pipeline, **settings)
    return kept


@pytest.fixture
def long_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let maintenance expire changelog hours as if it were three hours later."""
    real = retention.drop_expired
    monkeypatch.setattr(
        maintenance, "drop_expired", lambda root, hours, needed, now: real(root, hours, needed, now + LATER)
    )


def floor(kept: Kept) -> int:
    return read_floor_lsn(open_changelog(changelog_uri(kept.pipeline.lake_root)), Epoch(1))


@pytest.mark.usefixtures("long_after")
def test_the_changelog_keeps_what_a_table_or_the_server_may_need(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_hours(kept)
    execute(kept.dsn, "insert into a values (100, 'x')")
    kept.receive()
    kept.set_states(A, TableState.PAUSED)
    kept.write_point(durable(kept), B, H)
    monkeypatch.setattr(needed_changes, "redelivery_above", lambda *_: LSN(1 << 62))
    assert dropped(kept) == 0, "a paused table has yet to take it"
    kept.set_states(A, TableState.CATCHING_UP)
    kept.bring_forward(A)
    kept.write_point(durable(kept), A, B, H)
    with monkeypatch.context() as as_it_is:
        as_it_is.setattr(needed_changes, "redelivery_above", lambda *_: LSN(1))
        assert dropped(kept) == 0, "the server may send it again"
    assert dropped(kept) > 0
    assert floor(kept) > 0


@pytest.mark.usefixtures("long_after")
@pytest.mark.thorough("test_the_changelog_keeps_what_a_table_or_the_server_may_need, and no more")
def test_changes_expire_while_all_tables_are_errored(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver goes on: without expiry, the changelog would fill the storage."""
    old_hours(kept)
    execute(kept.dsn, "insert into a values (100, 'x')")
    kept.receive()
    monkeypatch.setattr(needed_changes, "redelivery_above", lambda *_: LSN(1 << 62))
    *most, last = kept.states()
    for table in most:
        kept.fail(table)
    assert dropped(kept) == 0
    kept.fail(last)
    assert dropped(kept) > 0
    with pytest.raises(PgReplError, match="changelog"):
        retry_tables(kept.access, [A])


def durable(kept: Kept) -> LSN:
    return read_durable_lsn(open_changelog(kept.changelog))


def dropped(kept: Kept) -> int:
    rest = run(kept).rest
    assert rest is not None
    return rest.changelog_files


@pytest.mark.usefixtures("long_after")
def test_nothing_of_the_changelog_goes_while_the_source_is_away(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_hours(kept)
    kept.write_point(durable(kept), A, B, H)
    away = replace(kept.access, dsn="host=127.0.0.1 port=1 dbname=nope user=nobody connect_timeout=1")
    done = maintain(away, wait=lambda _: False)
    assert done.rest is not None
    assert (done.rest.changelog_files, done.failures, floor(kept)) == (0, {}, 0)
    monkeypatch.setattr(needed_changes, "redelivery_above", lambda *_: LSN(1 << 62))
    assert dropped(kept) > 0, "nothing else has kept it"


@pytest.mark.thorough("test_maintain_stops_between_tables_on_request_and_exits_75")
def test_the_time_is_up(kept: Kept) -> None:
    before = files(kept, A)
    done = run(kept, limit_s=0)
    assert all(table.compaction.is_left for table in done.tables)
    assert (files(kept, A), done.exit_code) == (before, 0)
    assert done.rest is not None
    assert "not finished: run the command again" in done.tables[0].to_text()


def test_maintain_stops_between_tables_on_request_and_exits_75(kept: Kept) -> None:
    asked = threading.Event()
    before = files(kept, B)
    done = run(kept, wait=asked.wait, on_table=lambda _: asked.set())
    assert (files(kept, A), files(kept, B), done.rest, done.exit_code) == (1, before, None, 75)
    assert done.to_text().endswith("stopped before the deletion")


def test_a_table_that_fails_stops_no_other(kept: Kept) -> None:
    for entry in Path(kept.lake_path(A), "_delta_log").iterdir():
        entry.write_text("{")
    done = run(kept)
    assert isinstance(done.failures[A], LakeTableError)
    assert (files(kept, B), done.exit_code) == (1, 78)
    assert done.tables[0].to_text().startswith(f"{A}: failed: cannot open the lake table")


@pytest.mark.thorough("test_a_table_that_fails_stops_no_other")
def test_a_table_that_is_copied_is_left_alone(kept: Kept) -> None:
    before = files(kept, A)
    kept.set_states(A, TableState.SNAPSHOTTING)
    assert A not in {table.table for table in run(kept).tables}
    assert files(kept, A) == before


def test_before_the_first_snapshot_there_is_nothing_to_maintain(dsn: str, tmp_path: Path) -> None:
    execute(dsn, "create table a (id int primary key)")
    kept = Kept(dsn, tmp_path, ("public.*",))
    kept.take()
    Path(kept.changelog).rename(tmp_path / "away")
    with pytest.raises(NoChangelogError):
        maintain(kept.access, wait=lambda _: False)


# The command.


@pytest.fixture
def line(kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("PGREPL_DSN", kept.dsn)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def given(*arguments: str) -> tuple[int, str]:
        code = main(["maintain", str(kept.file), *arguments])
        return code, capsys.readouterr().out

    yield given
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_command_tells_a_line_a_table(line: Any) -> None:
    code, out = line("--tables", f"{A},{B}")
    told = out.splitlines()
    assert (code, len(told)) == (0, 5)
    assert told[0].startswith(f"{A}: 5 files of ")
    assert " KiB, now 1 of " in told[1]
    assert told[2].startswith("changelog: compacted ")
    assert told[3].startswith("deleted: ")
    assert "_pgrepl/consistent_points: left alone: there is no consistent point" in told[4]


@pytest.mark.thorough("test_the_command_tells_a_line_a_table")
def test_the_command_tells_programs(line: Any) -> None:
    code, out = line("--json", "--limit-s", "100")
    report = json.loads(out)
    first = report["tables"][0]
    assert (code, first["table"], first["files_after"]) == (0, A, 1)
    assert first["files_before"] > first["files_after"]
    assert report["app_running"] is False
    assert report["errors"] == {}


@pytest.mark.thorough("test_the_command_tells_a_line_a_table; code 75 where maintenance stops on request")
def test_a_busy_table_is_told_with_a_code_that_says_try_again(
    line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = compaction.compact_thoroughly

    def busy(*arguments: Any) -> Any:
        done = real(*arguments)
        return replace(done, is_busy=True)

    monkeypatch.setattr(operation, "compact_thoroughly", busy)
    code, out = line("--tables", A)
    assert code == 75
    assert "too busy: its writer committed first each time" in out
