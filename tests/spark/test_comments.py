"""Comments come along from PostgreSQL, stay when the table evolves, and are of now after a resnapshot."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.catalog.relations import (
    MOST_CHARACTERS,
    Comments,
    read_comments,
)
from airflow_provider_pgrepl.replication.source.connection import connect
from tests.support.in_process import InProcess
from tests.support.replicated import execute

TABLE = "public.orders"
ODD = "über 'alles', \"quoted\"\n{} %s €"


@pytest.fixture
def replicated(spark, dsn: str, tmp_path: Path) -> InProcess:
    execute(
        dsn,
        'create table orders (id int primary key, state text, gone text, hidden text, "a\'b" int)',
        "alter table orders drop column gone",
        "insert into orders values (1, 'new', 'x', 7)",
        "comment on table orders is 'What was bought'",
        "comment on column orders.id is 'A number'",
        f"comment on column orders.\"a'b\" is '{ODD.replace(chr(39), chr(39) * 2)}'",
        "comment on column orders.hidden is 'readable by no role'",
        "create table plain (id int primary key)",
    )
    found = InProcess(spark, dsn, tmp_path, (TABLE, "public.plain"), exclude_columns=(f"{TABLE}.hidden",))
    found.snapshot()
    return found


def comments_of(replicated: InProcess, table: str = TABLE) -> tuple[str, dict[str, str]]:
    lake = open_delta(replicated.lake_path(table))
    columns = {
        field.name: field.metadata["comment"] for field in lake.schema().fields if "comment" in field.metadata
    }
    return lake.metadata().description or "", columns


def test_a_snapshot_brings_them_and_commits_nothing_where_there_are_none(replicated):
    assert comments_of(replicated) == ("What was bought", {"id": "A number", "a'b": ODD})
    assert "readable by no role" not in str(open_delta(replicated.lake_path(TABLE)).schema().to_json())
    assert comments_of(replicated, "public.plain") == ("", {})
    assert open_delta(replicated.lake_path("public.plain")).version() == 0
    replicated.assert_equal("public.plain")


def test_they_stay_when_the_table_evolves_and_its_files_are_written_anew(replicated, dsn):
    execute(
        dsn,
        "alter table orders add column note text",
        "insert into orders values (2, 'paid', 'y', 8, 'n')",
        "alter table orders add column more int not null default 5",
        "insert into orders values (3, 'paid', 'y', 8, 'n', 6)",
        "update orders set state = 'sent' where id = 1",
    )
    replicated.catch_up()
    assert sorted(pa.table(replicated.lake_rows(TABLE)).column("more").to_pylist()) == [5, 5, 6]
    assert comments_of(replicated) == ("What was bought", {"id": "A number", "a'b": ODD})


@pytest.mark.thorough("test_a_snapshot_brings_them_and_commits_nothing_where_there_are_none")
def test_a_resnapshot_takes_them_as_they_are_by_then(replicated, dsn):
    execute(
        dsn,
        "comment on table orders is null",
        "comment on column orders.id is null",
        f"comment on column orders.state is '{'x' * (MOST_CHARACTERS + 1)}'",
    )
    replicated.resnapshot(TABLE)
    assert comments_of(replicated) == ("", {"a'b": ODD, "state": "x" * (MOST_CHARACTERS - 1) + "…"})
    execute(dsn, "update orders set state = 'sent'")
    replicated.catch_up()
    assert pa.table(replicated.lake_rows(TABLE)).column("state").to_pylist() == ["sent"]


def test_a_table_is_no_worse_for_comments_that_nobody_may_read(dsn, caplog):
    name = "t_" + dsn.split("dbname=t_")[1].split(maxsplit=1)[0]
    execute(
        dsn,
        "create table orders (id int)",
        "comment on table orders is 'x'",
        f"create role {name}",
        "revoke select on pg_catalog.pg_description from public",
    )
    connection = connect(dsn, "test")
    connection.autocommit = False
    try:
        with connection.cursor() as cursor:
            cursor.execute("select 'public.orders'::regclass::oid")
            (oid,) = cursor.fetchone()
            assert read_comments(connection, TableName.parse(TABLE), oid).table == "x"
            cursor.execute(f"set role {name}")
            assert read_comments(connection, TableName.parse(TABLE), oid) == Comments()
            cursor.execute("select 1")
            assert "public.orders is copied without its comments" in caplog.text
    finally:
        connection.close()
        execute(dsn, f"drop role {name}")


def test_a_connection_that_is_lost_is_told(dsn):
    connection = connect(dsn, "test")
    execute(dsn, f"select pg_terminate_backend({connection.get_backend_pid()}, 100000)")
    with pytest.raises(PgReplError):
        read_comments(connection, TableName.parse(TABLE), 1)
