"""Tables that are added, removed, resnapshotted, or fail, while the others continue."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from airflow_provider_pgrepl.errors import ConfigError, SnapshotError, TableError
from airflow_provider_pgrepl.lake import open_lake
from airflow_provider_pgrepl.replication.app import snapshot as snapshot_app
from airflow_provider_pgrepl.replication.app import snapshot_tables
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.tables import new_tables
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.snapshot import copy_report, range_copy, snapshot_copy
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.publication import read_publication
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.conftest import closing_connection
from tests.support.in_process import InProcess
from tests.support.replicated import execute, wait_until
from tests.support.sessions import close_sessions

COMMAND = re.compile(r"pgrepl (snapshot) FILE\.json --tables '([^']+)'")
LEAST_SESSIONS = 7
"""What a snapshot needs, docs/reference/source-statements.md."""


def table(name: str, rows: int = 3) -> tuple[str, str]:
    return (
        f"create table {name} (id int primary key, v text)",
        f"insert into {name} select i, 'v' || i from generate_series(1, {rows}) i",
    )


@pytest.fixture
def replicated(spark, dsn, tmp_path) -> InProcess:
    execute(dsn, *table("a"), *table("b"))
    return InProcess(spark, dsn, tmp_path, ("public.a", "public.b"), lock_timeout_s=0.3)


def states(replicated: InProcess) -> dict[str, str]:
    return {name.removeprefix("public."): record.state for name, record in replicated.states().items()}


def published(replicated: InProcess) -> set[str]:
    with replicated.source() as source:
        found = read_publication(source, replicated.pipeline.publication)
    assert found is not None
    return {found.name for found in found.tables}


def set_membership(replicated: InProcess, name: str, membership: str) -> None:
    with StateDatabase(replicated.dsn, "test") as state_db:
        state_db.set_membership(replicated.pipeline.name, TableName.parse(name), membership)


def log_since(replicated: InProcess, start: int) -> str:
    return replicated.log.read_text()[start:]


@contextmanager
def traffic(dsn: str, *tables: str) -> Iterator[None]:
    """Transactions over all of these tables at once, all the while; one of two sessions is slow."""
    stop, failed = threading.Event(), list[BaseException]()

    def write(offset: int, pause: float) -> None:
        try:
            with closing_connection(dsn) as connection, connection.cursor() as cursor:
                number = offset
                while not stop.is_set():
                    number += 2
                    cursor.execute("begin")
                    for name in tables:
                        cursor.execute(f"insert into {name} values ({number}, 'new')")
                        # Rows of its own, so that the two never wait for each other.
                        cursor.execute(f"update {name} set v = v || '.' where id % 14 = {number % 14}")
                        cursor.execute(f"delete from {name} where id = {number - 20}")
                        stop.wait(pause)
                    cursor.execute("commit")
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write, args=arguments) for arguments in ((10000, 0.01), (10001, 0.02))]
    for writer in writers:
        writer.start()
    try:
        yield
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert not failed, failed


def test_either_hint_for_tables_that_swapped_names_makes_both_equal_again(replicated):
    execute(replicated.dsn, "alter table a add secret int", "alter table b add secret int")
    replicated.configure(exclude_columns=("public.a.secret",), per_table={"public.a": {"truncate": "ignore"}})
    replicated.snapshot()
    with replicated.replicating() as running:
        swap = ("alter table a rename to x", "alter table b rename to a", "alter table x rename to b")
        execute(replicated.dsn, "; ".join(swap), "insert into a values (100, 'that was b')")
        running.wait_for(replicated.source_lsn())
        wait_until(lambda: set(states(replicated).values()) == {"errored"}, what="both tables to stop")
        commands = [COMMAND.search(record.hint).groups() for record in replicated.states().values()]
        assert {tables for _, tables in commands} == {"public.a,public.b", "public.b,public.a"}
        app, tables = commands[0]
        replicated.configure(
            exclude_columns=("public.a.secret", "public.b.secret"),
            per_table={"public.b": {"truncate": "ignore"}, "public.a": {}},
        )
        assert replicated.run(app, "--tables", tables) == 0, replicated.log_tail()
        execute(replicated.dsn, "update a set v = 'x' where id = 100", "delete from b where id = 1")
        running.wait_for(replicated.source_lsn())
        wait_until(lambda: set(states(replicated).values()) == {"streaming"}, what="both tables to stream")
    replicated.assert_equal("public.a", "public.b")
    for name in ("public.a", "public.b"):
        assert "secret" not in replicated.lake_rows(name).column_names


@pytest.mark.thorough("test_handover: a table that joins later under traffic; the other tests of this file")
def test_tables_that_are_added_and_taken_anew_under_traffic_equal_the_source(replicated):
    replicated.configure(lock_timeout_s=10.0)
    execute(replicated.dsn, *table("c", 2000), *table('"D ""x"'))
    replicated.snapshot()
    with replicated.replicating() as running:
        with traffic(replicated.dsn, "a", "b", "c", '"D ""x"'):
            replicated.wait_for_points(1, "public.a", "public.b")
            assert replicated.run("snapshot", "--add", 'public.c,public."D ""x"') == 0, replicated.log_tail()
            replicated.resnapshot("public.b")
            replicated.wait_for_points(2, "public.a", "public.b", "public.c")
        running.wait_for(replicated.source_lsn())
    assert {record.membership for record in replicated.states().values()} == {"configured", "added"}
    replicated.snapshot()  # neither retires what was added, nor takes it once more
    assert set(states(replicated).values()) == {"streaming"}
    replicated.assert_equal("public.a", "public.b", "public.c", 'public."D ""x"')


@pytest.mark.thorough("integration/test_events_without_lake: a lake is left and taken again")
def test_events_alone_get_lake_tables_lose_them_and_get_them_back(replicated):
    def received(*statements: str) -> None:
        execute(replicated.dsn, *statements)
        assert replicated.run("replicate", "--until", "caught-up") == 0, replicated.log_tail()

    replicated.configure(lake_tables="none")
    replicated.snapshot()
    received("insert into a values (10, 'before')", "delete from b where id = 1")
    for number in (20, 30):
        replicated.configure(lake_tables="all")
        assert replicated.run("replicate", "--until", "caught-up") == 78
        assert "they were taken with none: public.a, public.b" in replicated.log_tail()
        replicated.snapshot()
        received(f"insert into a values ({number}, 'after')", "update b set v = v || '!'")
        replicated.assert_equal("public.a", "public.b")
        replicated.configure(lake_tables="none")
        replicated.snapshot()
        assert open_lake(replicated.pipeline).tables == ()
        received(f"insert into a values ({number + 1}, 'between')", "delete from b where id = 2")


@pytest.mark.thorough("integration/test_removing_tables")
def test_a_removed_table_is_not_taken_again_until_somebody_asks(replicated):
    replicated.configure(per_table={"public.b": {"truncate": "ignore"}})
    replicated.snapshot()
    with StateDatabase(replicated.dsn, "test") as state_db:
        state_db.set_state(replicated.pipeline.name, TableName("public", "b"), TableState.REMOVED)
    set_membership(replicated, "public.b", "removed")
    replicated.snapshot()
    assert states(replicated) == {"a": "catching_up", "b": "removed"}
    with replicated.source() as source:
        source.cursor().execute(f"alter publication {replicated.pipeline.publication} drop table public.b")
    execute(replicated.dsn, "insert into b values (4, 'not in the stream')")
    assert replicated.run("snapshot", "--add", "public.b") == 0, replicated.log_tail()
    assert published(replicated) == {"a", "b"}
    execute(replicated.dsn, "insert into b values (5, 'in the stream')")
    replicated.catch_up()
    assert replicated.states()["public.b"].membership == "configured"
    replicated.assert_equal("public.a", "public.b")


def test_new_tables_of_a_pattern_go_by_the_policy(replicated):
    replicated.configure(tables=("public.*",), new_tables="error")
    replicated.snapshot()
    execute(replicated.dsn, *table("c"), "create table keyless (id int)", "drop table b")
    with replicated.source() as source:
        found = new_tables(source, replicated.pipeline, _records(replicated))
    assert [str(name) for name in found] == ["public.c"]
    assert replicated.run("snapshot") == 78
    assert "new tables match the patterns of the pipeline: public.c" in replicated.log_tail()
    assert states(replicated) == {"a": "catching_up", "b": "catching_up"}
    replicated.configure(new_tables="ignore")
    assert replicated.run("snapshot") == 78
    assert "left out (new_tables: ignore; pgrepl snapshot --add adds them): public.c" in (
        replicated.log_tail()
    )
    gone = replicated.states()["public.b"]
    assert (gone.state, gone.error, gone.reason) == ("errored", "TableError", "public.b: does not exist")
    assert replicated.run("snapshot", "--add") == 0, replicated.log_tail()
    assert states(replicated) == {"a": "catching_up", "b": "errored", "c": "catching_up"}
    execute(replicated.dsn, *table("d"))
    replicated.configure(new_tables="add")
    assert replicated.run("snapshot") == 78
    assert states(replicated)["d"] == "catching_up"


def _records(replicated: InProcess) -> dict[TableName, object]:
    with StateDatabase(replicated.dsn, "test") as state_db:
        return state_db.read_tables(replicated.pipeline.name)


def test_a_table_that_is_written_all_the_time_is_not_added_and_nothing_changes(replicated):
    execute(replicated.dsn, *table("c"))
    replicated.snapshot()
    before = replicated.states()
    access = Access(replicated.pipeline, replicated.dsn, replicated.dsn)
    with closing_connection(f"{replicated.dsn} application_name=billing") as writer:
        writer.cursor().execute("begin; update c set v = 'x'")
        blocked = rf"public\.c: could not .* pid {writer.info.backend_pid} \(postgres, billing, "
        with pytest.raises(SnapshotError, match=blocked):
            snapshot_app.add_tables(access, [TableName("public", "c")])
    assert replicated.states() == before
    assert published(replicated) == {"a", "b"}
    with pytest.raises(TableError, match=r"public\.typo: does not exist"):
        snapshot_app.add_tables(access, [TableName("public", "typo")])
    with pytest.raises(ConfigError, match=r"not among the tables of the pipeline: public\.c"):
        snapshot_app.resnapshot(access, [TableName("public", "c")])
    assert replicated.states() == before


@pytest.mark.thorough("test_when_the_snapshot_is_lost_finished_tables_are_kept")
def test_while_no_snapshot_can_be_made_a_table_stays_as_it_is(replicated):
    replicated.snapshot()
    replicated.catch_up()
    replicated.configure(slot_timeout_s=0.5)
    with closing_connection(replicated.dsn) as writer:
        writer.cursor().execute("begin; insert into a values (9, 'open')")
        assert replicated.run("snapshot", "--tables", "public.b") == 75
    assert "the server waits for transactions that were running" in replicated.log_tail()
    assert states(replicated) == {"a": "streaming", "b": "catching_up"}
    execute(replicated.dsn, "insert into b values (9, 'later')")
    replicated.catch_up()
    replicated.assert_equal("public.a", "public.b")


@pytest.fixture
def role(pg) -> Iterator[str]:
    name = f"r_{uuid.uuid4().hex[:8]}"
    with pg.cursor() as cursor:
        cursor.execute(f"create role {name} login replication; grant create on schema public to {name}")
        cursor.execute(f"grant create on database {pg.info.dbname} to {name}")
    yield name
    with pg.cursor() as cursor:
        cursor.execute(f"drop owned by {name} cascade; drop role {name}")


def test_the_trouble_of_one_table_is_its_own_and_mended_it_is_taken(spark, dsn, tmp_path, role):
    names = ("fine", "closed", "hidden", "dropped", "keyless", "typed", "weak")
    execute(dsn, *(line for name in names for line in table(name)))
    execute(dsn, *(f"grant select on {name} to {role}" for name in names))
    execute(dsn, f"create publication p for table {', '.join(names)}")
    replicated = InProcess(
        spark,
        dsn.replace("user=postgres", f"user={role}"),
        tmp_path,
        tuple(f"public.{name}" for name in names),
        publication="p",
        publication_mode="use",
    )
    replicated.snapshot()
    execute(
        dsn,
        f"revoke select on closed from {role}",
        "alter table hidden enable row level security",
        "alter table dropped rename to moved",
        "alter table keyless drop constraint keyless_pkey",
        "alter table typed alter v type int using 0",
        "alter publication p drop table weak",
    )
    replicated.configure(types={"public.typed.v": "decimal(10,2)"})
    assert replicated.run("snapshot", "--tables", ",".join(replicated.pipeline.tables)) == 78
    assert "6 of 7 tables are errored" in replicated.log_tail()
    found = replicated.states()
    assert {name: (record.state, record.error) for name, record in found.items()} == {
        "public.fine": ("catching_up", ""),
        "public.closed": ("errored", "PrivilegeError"),
        "public.hidden": ("errored", "PrivilegeError"),
        "public.dropped": ("errored", "TableError"),
        "public.keyless": ("errored", "TableError"),
        "public.typed": ("errored", "TableError"),
        "public.weak": ("errored", "PublicationError"),
    }
    assert "lacks SELECT on public.closed" in found["public.closed"].reason
    assert all(record.hint for name, record in found.items() if name != "public.fine")
    execute(
        dsn,
        f"grant select on closed to {role}",
        "alter table hidden disable row level security",
        "alter table moved rename to dropped",
        "alter table keyless add primary key (id)",
        "alter publication p add table weak",
    )
    replicated.configure(types={})
    start = len(replicated.log.read_text())
    replicated.snapshot()
    replicated.catch_up()
    assert "copied public.fine" not in log_since(replicated, start)
    replicated.assert_equal(*replicated.pipeline.tables)


@pytest.mark.thorough("test_the_trouble_of_one_table_is_its_own_and_mended_it_is_taken")
def test_a_copy_that_the_server_refuses_is_the_trouble_of_one_table(replicated, monkeypatch, pg, role):
    """A right may be lost after all checks: the keeper has its locks, and only the COPY is rejected."""
    replicated.snapshot()
    pg.cursor().execute(
        "create function refused() returns text language sql security definer"
        f" as 'select v from public.a'; alter function refused() owner to {role}"
    )
    plan = snapshot_copy.SnapshotCopy._plan

    def plan_as_refused(copy, keeper, relation, *copied):
        ranges = plan(copy, keeper, relation, *copied)
        if relation.table.name == "b":
            part = ranges[0]
            return [replace(part, sql="COPY (SELECT 1, public.refused()) TO STDOUT (FORMAT csv)")]
        return ranges

    monkeypatch.setattr(snapshot_copy.SnapshotCopy, "_plan", plan_as_refused)
    assert replicated.run("snapshot", "--tables", "public.a,public.b") == 78
    assert states(replicated) == {"a": "catching_up", "b": "errored"}
    assert replicated.states()["public.b"].error == "PrivilegeError"


@pytest.mark.thorough("integration/test_snapshot_keeper: limits leave fewer sessions")
def test_snapshot_opens_no_more_sessions_than_documented(spark, dsn, tmp_path, role):
    """7, where the role may have no more: then one range of one table is copied at a time."""
    names = ("a", "b", "c", "d", "e")
    execute(
        dsn, *(line for name in names for line in table(name, 5000)), "create publication p for all tables"
    )
    execute(dsn, *(f"grant select on {name} to {role}" for name in names))
    execute(dsn, f"alter role {role} connection limit {LEAST_SESSIONS}")
    replicated = InProcess(
        spark,
        dsn.replace("user=postgres", f"user={role}"),
        tmp_path,
        tuple(f"public.{name}" for name in names),
        publication="p",
        publication_mode="use",
        trust_table_owners=False,
        snapshot_range_bytes=65536,
    )
    most, stop = [0], threading.Event()

    def count() -> None:
        with closing_connection(dsn) as connection, connection.cursor() as cursor:
            while not stop.wait(0.002):
                cursor.execute(
                    "select count(*) from pg_stat_activity"
                    " where usename = %s and backend_type <> 'walsender'",
                    (role,),
                )
                most[0] = max(most[0], cursor.fetchone()[0])

    close_sessions(replicated.dsn)
    counting = threading.Thread(target=count)
    counting.start()
    try:
        replicated.snapshot()
    finally:
        stop.set()
        counting.join()
    assert 4 < most[0] <= LEAST_SESSIONS
    # A session that was refused would have been tried again.
    assert "too many connections" not in replicated.log.read_text()
    assert set(states(replicated).values()) == {"catching_up"}


@pytest.mark.thorough("unit/test_range_copies; test_when_the_snapshot_is_lost_finished_tables_are_kept")
def test_ranges_that_are_finished_are_kept_when_others_fail(replicated, monkeypatch):
    monkeypatch.setattr(range_copy, "_PAUSES_S", (0.1, 1.0, 15.0))
    execute(replicated.dsn, "insert into b select i, repeat('x', 500) from generate_series(4, 10000) i")
    replicated.configure(snapshot_range_bytes=131072)

    def is_said() -> bool:
        return replicated.log.exists() and "are copied and kept; the others" in replicated.log.read_text()

    def end_copies(stop: threading.Event) -> None:
        with closing_connection(replicated.dsn) as connection, connection.cursor() as cursor:
            while not is_said() and not stop.wait(0.002):
                cursor.execute(
                    "select pid from pg_stat_activity where application_name like 'pgrepl copy %'"
                    " and datname = current_database() and state = 'active' and query like 'COPY%b%'"
                    " and pg_terminate_backend(pid)"
                )

    finish = copy_report.TableCopy.finish
    counted = list[copy_report.TableCopy]()

    def counting(copy, number, files):
        finish(copy, number, files)
        counted.append(copy)

    monkeypatch.setattr(copy_report.TableCopy, "finish", counting)
    stop = threading.Event()
    thread = threading.Thread(target=end_copies, args=(stop,))
    thread.start()
    try:
        replicated.snapshot()
    finally:
        stop.set()
        thread.join()
    assert is_said()
    replicated.assert_equal("public.a", "public.b")
    copied = {progress.rows: progress for progress in (copy.progress() for copy in counted)}
    assert copied.keys() == {3, 10_000}
    assert (copied[10_000].bytes, copied[10_000].seconds_left) == (copied[10_000].total_bytes, 0.0)


def test_ddl_goes_before_the_copy_of_its_table_which_is_repeated(replicated, monkeypatch):
    execute(replicated.dsn, "insert into b select i, repeat('x', 500) from generate_series(4, 10000) i")
    replicated.configure(snapshot_range_bytes=131072)
    run, altered = snapshot_copy.RangeCopies.run, threading.Event()  # type: ignore[attr-defined]

    def run_amid_ddl(copies, ranges, kept):
        if len(ranges) > 1 and not altered.is_set():
            altered.set()
            execute(replicated.dsn, "alter table b add later int default 7")
        return run(copies, ranges, kept)

    monkeypatch.setattr(snapshot_copy.RangeCopies, "run", run_amid_ddl)  # type: ignore[attr-defined]
    replicated.snapshot()
    assert altered.is_set()
    assert "public.b: the copy was given up for ALTER TABLE of pid" in replicated.log.read_text()
    assert read_epoch(replicated.changelog).epoch == 1
    replicated.catch_up()
    replicated.assert_equal("public.a", "public.b")


@pytest.mark.thorough("integration/test_lent_locks")
def test_copy_goes_on_after_a_statement_to_which_it_lent_its_lock(
    spark, dsn, tmp_path, monkeypatch, pg, role
):
    execute(dsn, *table("b", 3000), f"create role {role}_owner", f"grant {role}_owner to {role}")
    execute(dsn, f"alter table b owner to {role}_owner", "create publication p for table b")
    replicated = InProcess(
        spark,
        dsn.replace("user=postgres", f"user={role}"),
        tmp_path,
        ("public.b",),
        publication="p",
        publication_mode="use",
        trust_table_owners=False,
        snapshot_range_bytes=65536,
    )
    run = snapshot_copy.RangeCopies.run  # type: ignore[attr-defined]

    def run_after_analyze(copies, ranges, kept):
        if len(ranges) > 1:
            execute(dsn, "analyze b")
        return run(copies, ranges, kept)

    monkeypatch.setattr(snapshot_copy.RangeCopies, "run", run_after_analyze)  # type: ignore[attr-defined]
    replicated.snapshot()
    assert (
        "public.b: ranges that are being copied begin again after a statement of"
        in replicated.log.read_text()
    )
    assert "given up" not in replicated.log.read_text()
    replicated.assert_equal("public.b")
    execute(dsn, f"drop owned by {role}_owner cascade", f"drop role {role}_owner")


@pytest.mark.thorough("test_ddl_goes_before_the_copy_of_its_table_which_is_repeated")
def test_table_whose_copy_never_comes_to_its_end_is_errored_by_the_name_of_the_statement(
    replicated, monkeypatch
):
    monkeypatch.setattr(snapshot_tables, "_PAUSES_S", (0.0,))
    run = snapshot_copy.RangeCopies.run  # type: ignore[attr-defined]

    def run_amid_ddl(copies, ranges, kept):
        if copies._job.relation.table.name == "b":
            execute(replicated.dsn, "alter table b alter v set storage external")
        return run(copies, ranges, kept)

    monkeypatch.setattr(snapshot_copy.RangeCopies, "run", run_amid_ddl)  # type: ignore[attr-defined]
    assert replicated.run("snapshot") == 75
    assert states(replicated) == {"a": "catching_up", "b": "errored"}
    record = replicated.states()["public.b"]
    assert record.error == "TableSnapshotError"
    assert "the copy was given up for ALTER TABLE of pid" in record.reason
    monkeypatch.undo()
    replicated.snapshot()
    assert states(replicated) == {"a": "catching_up", "b": "catching_up"}


def test_when_the_snapshot_is_lost_finished_tables_are_kept(replicated, monkeypatch):
    execute(replicated.dsn, "insert into b select i, repeat('x', 500) from generate_series(4, 10000) i")
    replicated.snapshot()
    replicated.configure(snapshot_range_bytes=131072)
    commit, run = snapshot_copy.commit_snapshot, snapshot_copy.RangeCopies.run  # type: ignore[attr-defined]
    committed, a_is_there, is_lost = list[str](), threading.Event(), threading.Event()

    def commit_and_say(uri: str, *more: object) -> int:
        version = commit(uri, *more)
        committed.append(uri)
        a_is_there.set()
        return version

    def run_without_keeper(copies, ranges, kept):
        if len(ranges) > 1 and not is_lost.is_set():
            assert a_is_there.wait(60)
            is_lost.set()
            execute(
                replicated.dsn,
                "select pg_terminate_backend(pid, 100000) from pg_stat_activity"
                " where application_name = 'pgrepl keeper' and datname = current_database()",
                "insert into a values (100, 'x')",
                "insert into b values (100000, 'x')",
            )
        return run(copies, ranges, kept)

    monkeypatch.setattr(snapshot_copy, "commit_snapshot", commit_and_say)
    monkeypatch.setattr(snapshot_copy.RangeCopies, "run", run_without_keeper)  # type: ignore[attr-defined]
    start = len(replicated.log.read_text())
    assert replicated.run("snapshot", "--tables", "public.a,public.b") == 0, replicated.log_tail()
    assert len(committed) == len(set(committed)) == 2
    assert "Copying these tables again under a new snapshot" in log_since(replicated, start)
    assert read_epoch(replicated.changelog).epoch == 1
    replicated.catch_up()
    replicated.assert_equal("public.a", "public.b")


@pytest.mark.thorough("test_when_the_snapshot_is_lost_finished_tables_are_kept")
def test_a_snapshot_lost_with_nine_tables_in_the_queue_is_made_anew(replicated, monkeypatch):
    """Also the tables that had not begun: no session waits for them forever."""
    names = [f"q{number}" for number in range(9)]
    for name in names:
        execute(replicated.dsn, *table(name))
    replicated.configure(tables=("public.a", "public.b", *(f"public.{name}" for name in names)))
    run, lost = snapshot_copy.RangeCopies.run, threading.Event()  # type: ignore[attr-defined]

    def run_without_keeper(copies, ranges, kept):
        if not lost.is_set():
            lost.set()
            execute(
                replicated.dsn,
                "select pg_terminate_backend(pid, 100000) from pg_stat_activity"
                " where application_name = 'pgrepl keeper' and datname = current_database()",
            )
        return run(copies, ranges, kept)

    monkeypatch.setattr(snapshot_copy.RangeCopies, "run", run_without_keeper)  # type: ignore[attr-defined]
    replicated.snapshot()
    assert "Copying these tables again under a new snapshot" in replicated.log.read_text()
    replicated.catch_up()
    replicated.assert_equal(*replicated.pipeline.tables)


def test_concurrent_snapshot_exits_75_and_names_running_command(replicated):
    replicated.snapshot()
    with StateDatabase(replicated.dsn, "first") as first:
        first.lock(replicated.pipeline.name, "snapshot")
        assert replicated.run("snapshot", "--tables", "public.a") == 75
    assert "another process is at it already (snapshot): pgrepl snapshot" in replicated.log_tail()
    assert states(replicated)["a"] == "catching_up"


@pytest.mark.thorough("test_either_hint_for_tables_that_swapped_names_makes_both_equal_again")
def test_a_table_taken_anew_has_the_columns_and_choices_of_now(replicated):
    replicated.snapshot()
    execute(replicated.dsn, "alter table b drop column v, add n numeric(5,2) default 1.5, add t date")
    replicated.resnapshot("public.b")
    replicated.catch_up()
    replicated.assert_equal("public.a", "public.b")
    record = replicated.states()["public.b"]
    assert record.config == replicated.pipeline.to_json()
    assert record.state == "streaming"
