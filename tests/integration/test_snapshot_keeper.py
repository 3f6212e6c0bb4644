import csv
import io
import threading
import time
import uuid
from contextlib import closing

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import (
    PgReplError,
    PublicationError,
    Retry,
    SnapshotError,
    SourceConnectionError,
    TableSnapshotError,
)
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.copy import lock_watch
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange, open_copy, plan_ranges
from airflow_provider_pgrepl.replication.source.copy.imported_snapshot import PublishedTables
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import SnapshotHolder, keep
from airflow_provider_pgrepl.replication.source.slot import read_slot
from airflow_provider_pgrepl.replication.source.slot_creation import export_snapshot
from tests.support.replicated import wait_until

PARTITIONED = (
    "create table part (id int, v text, primary key (id)) partition by range (id)",
    "create table part_1 partition of part for values from (0) to (100)",
    "create table part_2 (v text, id int not null)",
    "alter table part attach partition part_2 for values from (100) to (200)",
    "insert into part select g, 'p' || g from generate_series(0, 199) g",
    "create table spare (id int not null, v text, check (id >= 200 and id < 300))",
    "insert into spare values (200, 'x')",
)


@pytest.fixture
def exported(dsn, run):
    """The snapshot of a temporary slot over a table of 1,000 rows, a partitioned one, and a publication."""
    run(
        "create table t (id int primary key, v text)",
        "insert into t select g, 'v' || g from generate_series(1, 1000) g",
        *PARTITIONED,
        "create publication p for table t, part with (publish_via_partition_root)",
    )
    with export_snapshot(dsn, f"s_{uuid.uuid4().hex[:12]}", timeout_s=30) as snapshot:
        yield snapshot


def relations(pg, *names):
    return [find_relation(pg, TableName("public", name), "p") for name in names]


def keeper_of(dsn, pg, exported, *names, lock_timeout_s=5.0):
    return keep(dsn, exported.snapshot, relations(pg, *names), "p", lock_timeout_s)


def copied(dsn, snapshot, ranges):
    """All rows of these ranges, as the CSV module reads them."""
    found = []
    for part in ranges:
        with open_copy(dsn, snapshot, part) as stream:
            found += list(csv.reader(io.TextIOWrapper(stream, encoding="utf-8", newline="")))
    return found


@pytest.mark.differs_by_major(
    "since 15 the slot is made by a command with options in parentheses, and members have columns and"
    " filters",
    since=(15,),
)
def test_a_kept_snapshot_outlives_its_slot(pg, dsn, run, exported):
    with keeper_of(dsn, pg, exported, "t", "part") as keeper:
        exported.close()
        assert read_slot(pg, exported.name) is None
        run("insert into t values (5000, 'late')", "delete from t where id <= 10")
        with keeper.hold(keeper.relations[0]) as held:
            rows = copied(dsn, held.snapshot, held.plan(held.relation, 1 << 30))
            held.check()
        assert sorted(int(row[0]) for row in rows) == list(range(1, 1001))
        assert [str(relation.table) for relation in keeper.relations] == ["public.t", "public.part"]
        assert all(relation.membership_oid for relation in keeper.relations)


_LOCKED = """
select c.relname, a.application_name from pg_locks l join pg_class c on c.oid = l.relation
    join pg_stat_activity a on a.pid = l.pid
where c.relnamespace = 'public'::regnamespace and a.application_name ~ '^pgrepl (keeper|copy)' order by 1, 2
"""


def test_copy_holds_one_lock_for_each_partition_and_one_for_each_range_at_work(pg, dsn, run, exported):
    with keeper_of(dsn, pg, exported, "t", "part") as keeper:
        assert run(_LOCKED) == []
        with keeper.hold(keeper.relations[1]) as held:
            held_alone = [name for name, _ in run(_LOCKED)]
            first = held.plan(held.relation, 1 << 30)[0]
            with open_copy(dsn, held.snapshot, first) as stream:
                while_copied = [name for name, _ in run(_LOCKED)]
                stream.read()
        assert held_alone == ["part", "part_1", "part_2"]
        assert while_copied == ["part", "part_1", "part_1", "part_2"]


DDL = (
    "alter table t alter v type varchar(100) using v || 'x'",
    "alter table t add w int default 5",
    "alter table t drop column v",
    "truncate t",
    "vacuum full t",
    "alter table t rename to u",
    "alter table t rename column v to w",
    "alter table t replica identity full",
    "drop table t",
    "drop table t; create table t (id int primary key, v text)",
    "alter publication PUB drop table t; alter publication PUB add table t",
    "drop publication PUB; create publication PUB for table t with (publish_via_partition_root)",
)


def test_ddl_between_export_and_keeping_is_noticed(pg, dsn, run):
    for number, _ in enumerate(DDL):
        run(
            f"create schema d{number}",
            f"create table d{number}.t (id int primary key, v text)",
            f"insert into d{number}.t select g, 'v' || g from generate_series(1, 10) g",
            f"create publication d{number} for table d{number}.t with (publish_via_partition_root)",
        )
    with export_snapshot(dsn, f"s_{uuid.uuid4().hex[:12]}", timeout_s=30) as exported:
        for number, ddl in enumerate(DDL):
            schema = f"d{number}"
            name = TableName(schema, "t")
            before = find_relation(pg, name, schema)
            run(f"set search_path = {schema}", ddl.replace("PUB", schema), "reset search_path")
            for given in filter(None, (before, find_relation(pg, name, schema))):
                with pytest.raises(SnapshotError) as caught:
                    keep(dsn, exported.snapshot, [given], schema, 5.0)
                assert caught.value.retry is Retry.TIMED, ddl


DDL_OF_PARTITIONS = (
    "alter table part attach partition spare for values from (200) to (300)",
    "alter table part detach partition part_2",
    "truncate part_1",
    "alter table part alter v type varchar(100) using v || 'x'",
)


def test_ddl_on_partitions_is_noticed(pg, dsn, run):
    for number, _ in enumerate(DDL_OF_PARTITIONS):
        run(
            f"create schema d{number}",
            f"set search_path = d{number}",
            "create table t (id int primary key, v text)",
            *PARTITIONED,
            f"create publication d{number} for table t, part with (publish_via_partition_root)",
            "reset search_path",
        )
    with export_snapshot(dsn, f"s_{uuid.uuid4().hex[:12]}", timeout_s=30) as exported:
        for number, ddl in enumerate(DDL_OF_PARTITIONS):
            schema = f"d{number}"
            run(f"set search_path = {schema}", ddl, "reset search_path")
            given = [find_relation(pg, TableName(schema, name), schema) for name in ("t", "part")]
            with pytest.raises(SnapshotError, match=rf"{schema}\.part: altered"):
                keep(dsn, exported.snapshot, given, schema, 5.0)


def test_unchanged_tables_are_kept_whatever_others_do(pg, dsn, run, exported):
    run("alter table t add w int default 5")
    with keeper_of(dsn, pg, exported, "part") as keeper, keeper.hold(keeper.relations[0]) as held:
        rows = copied(dsn, held.snapshot, held.plan(held.relation, 1 << 30))
    assert sorted((int(row[0]), row[1]) for row in rows) == [(g, f"p{g}") for g in range(200)]


def test_running_ddl_keeps_its_table_from_being_copied(pg, dsn, run, exported):
    with keeper_of(dsn, pg, exported, "t", "part", lock_timeout_s=0.2) as keeper:
        run("begin", "alter table t add w int")
        with pytest.raises(TableSnapshotError, match=r"within 0\.2 s"):
            keeper.hold(keeper.relations[0])
        run("rollback")
        keeper.hold(keeper.relations[0]).close()


def test_table_is_locked_against_ddl_but_not_against_writers_while_copied(
    pg, dsn, run, exported, monkeypatch
):
    monkeypatch.setattr(lock_watch, "POLL_S", 3600)  # does not give way
    with (
        keeper_of(dsn, pg, exported, "t", "part") as keeper,
        keeper.hold(keeper.relations[0]),
        keeper.hold(keeper.relations[1]),
    ):
        run("set lock_timeout = '100ms'")
        for ddl in ("alter table t add w int", "truncate part_2", "drop table part"):
            with pytest.raises(psycopg2.errors.LockNotAvailable):
                run(ddl)
        run("insert into t values (1001, 'x')")


def test_a_snapshot_that_is_gone_is_said(pg, dsn, run, exported):
    exported.close()
    with pytest.raises(SnapshotError, match="no longer exists"):
        keeper_of(dsn, pg, exported, "t")


def test_a_table_outside_the_publication_is_refused(pg, dsn, run, exported):
    with pytest.raises(PublicationError, match=r"not in publication p: public\.spare"):
        keeper_of(dsn, pg, exported, "t", "spare")


def test_a_lost_keeper_is_noticed(pg, dsn, run, exported):
    with keeper_of(dsn, pg, exported, "t") as keeper, keeper.hold(keeper.relations[0]) as held:
        run(f"select pg_terminate_backend({keeper.connection.info.backend_pid}, 100000)")
        # Its watch may have noticed first.
        with pytest.raises(SnapshotError, match=r"gone|lost"):
            keeper.hold(keeper.relations[0])
        run(f"select pg_terminate_backend({held.connection.info.backend_pid}, 100000)")
        with pytest.raises(SnapshotError, match="lost"):
            held.check()
        held.close()
        with pytest.raises(SnapshotError, match="gone"):
            copied(dsn, held.snapshot, [CopyRange(1, TableName("public", "t"), "COPY t TO STDOUT", 1)])


def test_copies_open_at_most_half_of_the_connections_that_are_free(pg, dsn, run, exported):
    def sessions():
        with keeper_of(dsn, pg, exported, "t") as keeper:
            found = keeper.sessions(4)
        return found.tables, found.ranges

    tables, ranges = sessions()
    others = [psycopg2.connect(dsn) for _ in range(16)]
    assert sessions() == (tables, ranges - 2)  # of each table
    for other in others:
        other.close()


@pytest.mark.parametrize(
    ("free", "expected"), [(1, (1, 1)), (8, (1, 1)), (15, (1, 4)), (16, (2, 1)), (32, (4, 1)), (40, (4, 2))]
)
def test_limits_of_role_and_database_leave_fewer_sessions(pg, dsn, run, free, expected):
    role = f"r_{uuid.uuid4().hex[:8]}"
    run(f"create role {role} login")
    with closing(connect(dsn.replace("user=postgres", f"user={role}"), "keeper")) as connection:
        keeper = SnapshotHolder(dsn, connection, "", [], PublishedTables(None, {}, {}), 1)
        ((in_use,),) = run("select count(*) from pg_stat_activity where datname = current_database()")
        for limited, taken in ((f"role {role}", 1), (f"database {pg.info.dbname}", in_use)):
            run(f"alter {limited} connection limit {free + taken}")
            found = keeper.sessions(4)
            assert (found.tables, found.ranges) == expected, limited
            run(f"alter {limited} connection limit -1")
    run(f"drop role {role}")


@pytest.mark.thorough("test_copy: ranges together hold each row once with the snapshots position")
def test_ranges_cover_the_table_once(pg, dsn, run, exported):
    with keeper_of(dsn, pg, exported, "t") as keeper, keeper.hold(keeper.relations[0]) as held:
        run("insert into t select g, 'late' from generate_series(2000, 9000) g")
        for range_bytes in (1, 8192, 20000, 1 << 30):
            ranges = held.plan(held.relation, range_bytes)
            rows = copied(dsn, held.snapshot, ranges)
            found = sorted((int(row[0]), row[1]) for row in rows)
            assert found == [(g, f"v{g}") for g in range(1, 1001)], range_bytes
            assert (len(ranges) == 1) == (range_bytes == 1 << 30)
            assert "ctid <" not in ranges[-1].sql


def test_wide_rows_make_more_ranges(pg, run, exported):
    run(
        "create table wide (id int primary key, v text)",
        "alter table wide alter v set storage external",
        "insert into wide select g, repeat('x', 100000) from generate_series(1, 500) g",
    )
    wide = find_relation(pg, TableName("public", "wide"))
    assert len(plan_ranges(pg, wide, 10 << 20)) in range(3, 7)


def test_an_empty_table_has_a_range_and_no_rows(pg, dsn, run, exported):
    run("create table e (a int primary key)", "create table q (a int primary key) partition by list (a)")
    run(
        'create table "Odd ""N" ("a b" int primary key, "c""d" text)',
        """insert into "Odd ""N" values (1, '')""",
    )
    snapshot = run("begin isolation level repeatable read", "select pg_export_snapshot()")[0][0]
    for name in ("e", "q"):
        ranges = plan_ranges(pg, find_relation(pg, TableName("public", name)), 1 << 20)
        assert len(ranges) == 1
        assert copied(dsn, snapshot, ranges) == []
    odd = plan_ranges(pg, find_relation(pg, TableName("public", 'Odd "N')), 1 << 20)
    assert copied(dsn, snapshot, odd) == [["1", ""]]


@pytest.mark.differs_by_major(
    "row filters and column lists since 15, of generated columns since 18", since=(15, 18)
)
def test_a_row_filter_and_a_column_list_hold_for_the_copy(pg, dsn, run, exported):
    publication = "create publication f for table t (id) where (id % 2 = 0)"
    if pg.info.server_version < 150000:
        with pytest.raises(psycopg2.errors.SyntaxError):
            run(publication)
        return
    run(publication)
    filtered = find_relation(pg, TableName("public", "t"), "f")
    snapshot = run("begin isolation level repeatable read", "select pg_export_snapshot()")[0][0]
    rows = copied(dsn, snapshot, plan_ranges(pg, filtered, 8192))
    assert sorted(int(row[0]) for row in rows) == list(range(2, 1001, 2))
    assert {len(row) for row in rows} == {1}


def test_columnless_table_copy_has_one_empty_line_per_row(pg, run):
    run("create table nothing ()", "insert into nothing select from generate_series(1, 3)")
    (part,) = plan_ranges(pg, find_relation(pg, TableName("public", "nothing")), 1 << 20)
    assert part.sql == 'COPY (SELECT FROM ONLY "public"."nothing") TO STDOUT (FORMAT csv)'
    lines = io.StringIO()
    pg.cursor().copy_expert(part.sql, lines)
    assert lines.getvalue() == "\n\n\n"


HANGS_S = 120
"""Of what waits for the server ten minutes or for ever."""


def endless(dsn):
    """A snapshot, and a range that gives rows for ever."""
    holder = connect(dsn, "test")
    cursor = holder.cursor()
    cursor.execute("begin isolation level repeatable read")
    cursor.execute("select pg_export_snapshot()")
    sql = "COPY (SELECT generate_series(1, 1000000000), repeat('x', 1000)) TO STDOUT (FORMAT csv)"
    return holder, cursor.fetchone()[0], CopyRange(0, TableName("public", "endless"), sql, 1)


def copiers(pg):
    with pg.cursor() as cursor:
        cursor.execute(
            "select pid from pg_stat_activity where application_name like 'pgrepl copy %'"
            " and datname = current_database()"
        )
        return [pid for (pid,) in cursor.fetchall()]


def test_leaving_a_copy_early_ends_it_at_once(pg, dsn):
    holder, snapshot, part = endless(dsn)
    started = time.monotonic()
    with open_copy(dsn, snapshot, part) as stream:
        assert len(stream.read(100_000)) == 100_000
    with pytest.raises(ZeroDivisionError), open_copy(dsn, snapshot, part) as stream:
        stream.read(10)
        raise ZeroDivisionError
    with open_copy(dsn, snapshot, part):
        pass
    with open_copy(dsn, snapshot, part) as stream:
        stream.close()
    assert time.monotonic() - started < HANGS_S
    wait_until(lambda: not copiers(pg), what="the copies to end")
    holder.close()


def test_a_copy_that_waits_for_the_server_is_left_at_once(pg, dsn):
    holder, snapshot, _ = endless(dsn)
    sleeping = CopyRange(0, TableName("public", "slow"), "COPY (SELECT pg_sleep(600)) TO STDOUT", 1)
    started = time.monotonic()
    with open_copy(dsn, snapshot, sleeping) as stream:
        reader = threading.Thread(target=lambda: stream.read(1))
        reader.start()
    reader.join()
    assert time.monotonic() - started < HANGS_S
    holder.close()


def test_a_killed_copy_never_looks_like_a_short_table(pg, dsn, run):
    holder, snapshot, part = endless(dsn)
    with pytest.raises(SourceConnectionError), open_copy(dsn, snapshot, part) as stream:
        stream.read(1000)
        (pid,) = copiers(pg)
        run(f"select pg_terminate_backend({pid})")
        with pytest.raises(SourceConnectionError):
            while stream.read(1 << 20):
                pass
        with pytest.raises(SourceConnectionError):
            stream.read()
    holder.close()


def test_a_failure_is_raised_at_the_end_even_if_nobody_read_that_far(dsn):
    holder, snapshot, _ = endless(dsn)
    sql = "COPY (SELECT 1 / (3 - generate_series(1, 5))) TO STDOUT"
    part = CopyRange(0, TableName("public", "t"), sql, 1)
    with (
        pytest.raises(PgReplError, match="22012") as caught,
        open_copy(dsn, snapshot, part) as stream,
        pytest.raises(PgReplError),
    ):
        stream.read()
    assert "division" not in str(caught.value)
    gone = CopyRange(0, TableName("public", "t"), "COPY public.missing TO STDOUT", 1)
    with pytest.raises(SnapshotError, match="no longer fits"), open_copy(dsn, snapshot, gone) as stream:
        wait_until(lambda: stream.raw.failure is not None)  # type: ignore[attr-defined]
    holder.close()


def test_a_copy_uses_the_pinned_settings(pg, dsn, run):
    run(
        f"alter database {pg.info.dbname} set datestyle = 'German'",
        "create table d (a int primary key, d date, b bytea)",
        "insert into d values (1, '2024-12-31', 'x')",
    )
    snapshot = run("begin isolation level repeatable read", "select pg_export_snapshot()")[0][0]
    ranges = plan_ranges(pg, find_relation(pg, TableName("public", "d")), 1 << 20)
    assert copied(dsn, snapshot, ranges) == [["1", "2024-12-31", "\\x78"]]


def test_arrow_reads_a_copy_in_whole_blocks(pg, dsn, run):
    arrow_csv = pytest.importorskip("pyarrow.csv")
    run(
        "create table w (a int primary key, v text)",
        "insert into w select g, repeat('é', 300000) from generate_series(1, 10) g",
    )
    snapshot = run("begin isolation level repeatable read", "select pg_export_snapshot()")[0][0]
    (part,) = plan_ranges(pg, find_relation(pg, TableName("public", "w")), 1 << 40)
    with open_copy(dsn, snapshot, part) as stream:
        table = arrow_csv.read_csv(
            stream,
            read_options=arrow_csv.ReadOptions(column_names=["a", "v"], block_size=4 << 20),
            parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
        )
    assert table.column("a").to_pylist() == list(range(1, 11))
    assert {len(text) for text in table.column("v").to_pylist()} == {300000}
