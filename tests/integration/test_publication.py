import pytest

from airflow_provider_pgrepl.errors import PrivilegeError, PublicationError
from airflow_provider_pgrepl.replication.relation import TableName
from airflow_provider_pgrepl.replication.source.catalog import find_relation
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.publication import (
    add_tables,
    create_publication,
    drop_publication,
    read_publication,
)


def relation(pg, name, schema="public"):
    return find_relation(pg, TableName(schema, name))


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
    assert found.via_root and not found.all_tables and found.oid and found.name == "P x"


def test_tables_join_once(pg, tables):
    create_publication(pg, "p", tables[:1])
    add_tables(pg, "p", tables)
    before = find_relation(pg, TableName("public", "t"), "p")
    add_tables(pg, "p", tables)
    assert len(read_publication(pg, "p").tables) == 3
    assert find_relation(pg, TableName("public", "t"), "p") == before
    with pytest.raises(PublicationError, match="no publication named q"):
        add_tables(pg, "q", tables)


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
