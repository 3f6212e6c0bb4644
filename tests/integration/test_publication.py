import contextlib
import re
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from airflow_provider_pgrepl.errors import PrivilegeError, PublicationError, Retry, SnapshotError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.publication import (
    add_tables,
    create_publication,
    drop_publication,
    read_publication,
)
from tests.conftest import closing_connection
from tests.support.replicated import wait_until


def relation(pg, name, schema="public"):
    return find_relation(pg, TableName(schema, name))


@contextlib.contextmanager
def other_session(dsn, application):
    """A cursor of another client."""
    with closing_connection(f"{dsn} application_name={application}") as connection:
        yield connection.cursor()


@pytest.fixture
def tables(pg):
    with pg.cursor() as cursor:
        cursor.execute('create schema "My S"; create table "My S"."a.b" (a int primary key)')
        cursor.execute("create table t (a int primary key); create table child () inherits (t)")
        cursor.execute("create table part (a int primary key) partition by list (a)")
        cursor.execute("create table part_1 partition of part for values in (1)")
    return [relation(pg, "a.b", "My S"), relation(pg, "t"), relation(pg, "part")]


def test_a_publication_holds_the_tables_asked_for_and_every_kind_of_change(pg, tables):
    create_publication(pg, "P x", tables)
    found = read_publication(pg, "P x")
    assert {str(table) for table in found.tables} == {'"My S"."a.b"', "public.t", "public.part"}
    assert (found.insert, found.update, found.delete, found.truncate) == (True,) * 4
    assert found.via_root
    assert not found.all_tables
    assert found.oid
    assert found.name == "P x"


def test_tables_join_once(pg, dsn, tables):
    create_publication(pg, "p", tables[:1])
    assert add_tables(dsn, "p", tables, 10) == tables[1:]
    before = find_relation(pg, TableName("public", "t"), "p")
    assert add_tables(dsn, "p", tables, 10) == []
    assert len(read_publication(pg, "p").tables) == 3
    assert find_relation(pg, TableName("public", "t"), "p") == before
    with pytest.raises(PublicationError, match="no publication named q"):
        add_tables(dsn, "q", tables, 10)


def test_a_table_that_is_being_written_joins_when_that_is_over(pg, dsn, tables):
    create_publication(pg, "p", tables[:1])
    with other_session(dsn, "billing") as writer:
        writer.execute("begin; insert into part values (1)")
        with pytest.raises(SnapshotError) as caught:
            add_tables(dsn, "p", tables, 0.05)
        assert re.search(
            r"public\.part: could not be locked \(SHARE ROW EXCLUSIVE\) within 0\.05 s, because of"
            rf" pid {writer.connection.info.backend_pid} \(postgres, billing, in its transaction since \d",
            caught.value.message,
        )
        assert caught.value.retry is Retry.TIMED
        assert len(read_publication(pg, "p").tables) == 1
        writer.execute("commit")
    assert add_tables(dsn, "p", tables, 10) == tables[1:]


@pytest.mark.parametrize("is_there", [True, False])
def test_table_that_took_a_selected_ones_name_is_not_published(pg, dsn, tables, is_there):
    """A secret may be in it: its columns were never looked at."""
    if is_there:
        create_publication(pg, "p", [])
    pg.cursor().execute("create table kept (a int primary key)")
    selected = [tables[0], relation(pg, "kept"), relation(pg, "t")]
    pg.cursor().execute(
        "begin; alter table kept rename to passing; alter table t rename to kept;"
        "alter table passing rename to t; commit"
    )
    with pytest.raises(SnapshotError, match=r"public\.kept is no longer the table that was selected \(oid"):
        if is_there:
            add_tables(dsn, "p", selected, 10)
        else:
            create_publication(pg, "p", selected)
    found = read_publication(pg, "p")
    assert (found is not None, found and found.tables) == (is_there, frozenset() if is_there else None)


def test_no_table_joins_when_the_role_may_not_publish_one_of_them(pg, dsn, tables):
    create_publication(pg, "p", tables[:1])
    role = f"r_{uuid.uuid4().hex[:8]}"
    run = pg.cursor().execute
    run(f"create role {role} login; grant create on database {pg.info.dbname} to {role}")
    try:
        run(f"alter publication p owner to {role}; alter table t owner to {role}")
        with pytest.raises(PrivilegeError, match="permission denied for table part"):
            add_tables(dsn.replace("user=postgres", f"user={role}"), "p", tables, 10)
        assert len(read_publication(pg, "p").tables) == 1
    finally:
        run(f"drop owned by {role} cascade; drop role {role}")


def test_a_writer_of_two_tables_that_join_is_never_in_a_deadlock_with_them(pg, dsn, tables):
    """Had the first table been kept locked while the second was waited for, the writer would have failed."""
    create_publication(pg, "p", tables[:1])
    with other_session(dsn, "billing") as writer, ThreadPoolExecutor(1) as pool:
        writer.execute("begin; insert into part values (1)")
        joining = pool.submit(add_tables, dsn, "p", tables, 10)
        wait_until(lambda: TableName("public", "t") in read_publication(pg, "p").tables)
        writer.execute("set statement_timeout = '5s'; insert into t values (1); commit")
        assert joining.result() == tables[1:]


def test_a_child_by_inheritance_may_be_written_while_its_parent_joins(pg, dsn, tables):
    create_publication(pg, "p", tables[:1])
    with other_session(dsn, "billing") as writer:
        writer.execute("begin; insert into child values (1)")
        assert add_tables(dsn, "p", tables[1:2], 0.2) == tables[1:2]


def test_a_publication_is_read_while_its_tables_are_locked(pg, dsn, tables):
    create_publication(pg, "p", tables)
    with other_session(dsn, "migration") as migration:
        migration.execute("begin; lock table t, part in access exclusive mode")
        pg.cursor().execute("set lock_timeout = '100ms'")
        assert len(read_publication(pg, "p").tables) == 3


PUBLICATIONS = (
    "for all tables",
    "for all tables with (publish_via_partition_root = true)",
    "for table only t, root_1",
    "for table root, root_1, root_2",
    "for table root, root_1, root_2 with (publish_via_partition_root = true)",
    "for table root_2, t with (publish_via_partition_root = true)",
    "for tables in schema s",
    "for tables in schema s with (publish_via_partition_root = true)",
    "for tables in schema public, table s.leaf with (publish_via_partition_root = true)",
    "",
)


@pytest.mark.parametrize("what", PUBLICATIONS)
def test_read_publication_returns_tables_listed_by_pg_publication_tables(pg, tables, what):
    with pg.cursor() as cursor:
        cursor.execute(
            "create schema s; create unlogged table s.unlogged (a int); create view s.v as select 1;"
            "create table root (a int primary key) partition by range (a);"
            "create table root_1 partition of root for values from (0) to (10);"
            "create table root_2 partition of root for values from (10) to (30) partition by range (a);"
            "create table s.leaf partition of root_2 for values from (10) to (20);"
            "create table s.own (a int primary key); create materialized view s.m as select 1"
        )
        cursor.execute(f"create publication p {what}")
        cursor.execute("select schemaname, tablename from pg_publication_tables where pubname = 'p'")
        expected = {TableName(*found) for found in cursor.fetchall()}
    assert read_publication(pg, "p").tables == expected


def test_a_name_that_is_taken_is_an_error(pg, tables):
    create_publication(pg, "p", tables[:1])
    with pytest.raises(PublicationError, match="named p exists already"):
        create_publication(pg, "p", tables)
    assert len(read_publication(pg, "p").tables) == 1


def test_dropping_is_idempotent(pg, tables):
    create_publication(pg, "p", tables)
    drop_publication(pg, "p")
    drop_publication(pg, "p")
    assert read_publication(pg, "p") is None


def test_a_missing_right_is_said(pg, dsn, tables):
    with pg.cursor() as cursor:
        cursor.execute("drop role if exists weak; create role weak login")
    weak = connect(dsn.replace("user=postgres", "user=weak"), "test")
    with pytest.raises(PrivilegeError, match="creating publication p: permission denied"):
        create_publication(weak, "p", tables)
    weak.close()
    with pg.cursor() as cursor:
        cursor.execute("drop role weak")


def test_application_writes_while_a_table_waits_to_join(pg, dsn, tables):
    """Writers that come after the lock was asked for wait behind it, so that it is asked for shortly."""
    create_publication(pg, "p", tables[:1])
    with other_session(dsn, "report") as first, other_session(dsn, "web") as second:
        first.execute("begin; insert into t values (1)")
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(add_tables, dsn, "p", tables[1:2], 60)
            wait_until(lambda: _waits_for_a_lock(pg))
            second.execute("set lock_timeout = '5s'; insert into t values (2)")
            assert not joining.done()
            first.execute("commit")
            assert joining.result() == tables[1:2]


def test_publication_is_not_created_while_a_table_is_altered(pg, dsn, tables):
    with other_session(dsn, "migration") as migration:
        migration.execute("begin; alter table t add later int")
        with pytest.raises(SnapshotError, match="publication p was not created"):
            create_publication(pg, "p", tables, 0.05)
        migration.execute("rollback")
    create_publication(pg, "p", tables)


def _waits_for_a_lock(pg):
    with pg.cursor() as cursor:
        cursor.execute(
            "select 1 from pg_locks where not granted and relation = 't'::regclass"
            " and mode = 'ShareRowExclusiveLock'"
        )
        return bool(cursor.fetchall())
