"""The application's statements while its tables are replicated: none fails, and none waits for us."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg2
import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from tests.support.received import Received, wait_until_seen
from tests.support.replicated import execute, wait_until

SHAPES = (
    "create table t (id int primary key, v text, w int)",
    "create table full_identity (id int, v text)",
    "alter table full_identity replica identity full",
    "create table by_index (id int not null, v text)",
    "create unique index by_index_id on by_index (id)",
    "alter table by_index replica identity using index by_index_id",
    "create table part (id int primary key, v text) partition by range (id)",
    "create table part_1 partition of part for values from (0) to (100)",
    "create table unpublished (id int primary key, v text)",
)
TABLES = ("t", "full_identity", "by_index", "part")
STATEMENTS = {
    "insert": "insert into {} (id, v) values (1, 'a'), (2, 'b')",
    "update": "update {} set v = 'c' where id = 1",
    "update of a key": "update {} set id = 3 where id = 1",
    "insert of a query": "insert into {} (id, v) select 4, 'd' where not exists (select from {})",
    "delete": "delete from {} where id = 3",
    "select for update": "select * from {} for update",
    "lock": "do $$begin lock table {} in access exclusive mode; end$$",
    "add column": "alter table {} add x int",
    "add column with a default": "alter table {} add y int default 1",
    "alter type": "alter table {} alter x type bigint",
    "drop column": "alter table {} drop column x",
    "create index": "create index on {} (v)",
    "vacuum": "vacuum (truncate) {}",
    "analyze": "analyze {}",
    "truncate": "truncate {}",
    "vacuum full": "vacuum full {}",
    "comment": "comment on table {} is 'x'",
    "trigger": "alter table {} disable trigger all",
    "constraint": "alter table {} add check (id > 0)",
    "owner": "alter table {} owner to current_user",
}
OF_ONE_TABLE = {
    "create index concurrently": "create index concurrently t_v on t (v)",
    "reindex concurrently": "reindex index concurrently t_v",
    "drop index concurrently": "drop index concurrently t_v",
    "cluster": "cluster t using t_pkey",
    "create table like": "create table spare (like part including all)",
    "attach": "alter table part attach partition spare for values from (100) to (200)",
    "detach concurrently": "alter table part detach partition spare concurrently",
    "drop": "drop table part_1",
    "rename": "alter table t rename to renamed",
    "create table": "create table made as select 1 as id",
    "create publication": "create publication other for all tables",
}


REFUSED = {
    "alter table {}.public.t set unlogged": "it is part of a publication",
    "create database {0}_copy template {0}": "is being accessed by other users",
    "alter database {0} rename to {0}_renamed": "is being accessed by other users",
    "drop database {} with (force)": "is used by an active logical replication slot",
}
"""What the page names; to be run in another database, but for the first."""


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Iterator[Received]:
    execute(dsn, *SHAPES)
    tables = tuple(f"public.{name}" for name in TABLES)
    one = Received(dsn, tmp_path, tables, flush_interval_s=0.05, event_trigger=True)
    with one.source() as source:
        trigger.install(source, one.pipeline)
    one.begin()
    yield one
    with one.source() as source:
        trigger.uninstall(source, one.pipeline)


def failures(application: psycopg2.extensions.connection, statements: dict[str, str]) -> dict[str, str]:
    """Run statements, and return the errors of those that fail.

    A statement that waits for a lock fails at once: only replication is at work in this database.
    """
    failed = {}
    for kind, sql in statements.items():
        with application.cursor() as cursor:
            try:
                cursor.execute("set lock_timeout = '1ms'")
                cursor.execute(sql)
            except psycopg2.Error as error:
                failed[kind] = str(error)
    return failed


@pytest.mark.differs_by_major("what DDL locks and waits for")
def test_no_statement_of_the_application_fails_or_waits_while_its_tables_are_replicated(received, dsn):
    with closing(psycopg2.connect(dsn + " application_name=application")) as application:
        application.autocommit = True
        with received.receiving() as receiver:
            for table in (*TABLES, "unpublished"):
                of_table = {kind: sql.format(table, table) for kind, sql in STATEMENTS.items()}
                assert (table, failures(application, of_table)) == (table, {})
                wait_until_seen(receiver, received.source_lsn())
            assert failures(application, OF_ONE_TABLE) == {}
            wait_until(lambda: not _held_back(application), what="what is read of the catalog to end")


@pytest.mark.differs_by_major("what the server refuses")
def test_statements_that_are_refused_are_those_that_the_page_names(received, dsn, server):
    database = dsn.split("dbname=")[1].split()[0]
    refused = {}
    with received.receiving():
        for statement in REFUSED:
            with closing(psycopg2.connect(dsn if ".public." in statement else server.dsn())) as application:
                application.autocommit = True
                with application.cursor() as cursor, pytest.raises(psycopg2.Error) as caught:
                    cursor.execute(statement.format(database))
            refused[statement] = str(caught.value)
    assert {what: reason in refused[what] for what, reason in REFUSED.items()} == dict.fromkeys(REFUSED, True)
    execute(
        dsn, f"alter publication {received.pipeline.publication} drop table t", "alter table t set unlogged"
    )


def _held_back(application: psycopg2.extensions.connection) -> list[tuple[object, ...]]:
    """Return the slots and idle sessions that keep rows of tables from being vacuumed.

    A logical slot keeps only rows of the catalog.
    """
    with application.cursor() as cursor:
        cursor.execute(
            "select slot_name::text from pg_replication_slots"
            " where xmin is not null and database = current_database()"
            " union all select application_name from pg_stat_activity where backend_xmin is not null"
            " and application_name like 'pgrepl %' and state <> 'active' and datname = current_database()"
        )
        return cursor.fetchall()
