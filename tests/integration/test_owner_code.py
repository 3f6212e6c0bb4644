"""Code of a table's owner never runs with the rights of the role that replicates."""

from __future__ import annotations

import csv
import io
import logging
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import PrivilegeError, SnapshotError, TableError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.owner_code import read_owner_code
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation, read_relation
from airflow_provider_pgrepl.replication.source.connection import Connection, connect
from airflow_provider_pgrepl.replication.source.copy import lock_watch
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange, open_copy
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import TableSnapshotHolder, keep
from airflow_provider_pgrepl.replication.source.preflight.check import check_role, check_source, table_faults
from airflow_provider_pgrepl.replication.source.slot_creation import export_snapshot
from tests.conftest import closing_connection

TABLE = TableName("app", "t")
WHOLE, CUT = 1 << 30, 8192
RAN = "select array_agg(distinct place || ' as ' || who) from app.ran"

# An IMMUTABLE function may call one that writes.
SPYING = [
    "create table app.ran (place text, who text)",
    "grant all on app.ran to public",
    "create function app.write(text) returns int language plpgsql volatile as"
    # What it writes may be refused or undone; such a lock stays.
    " $$ begin perform pg_advisory_lock(4713);"
    " insert into app.ran values ($1, current_user); return 1; end $$",
    "create function app.spy(text) returns int language plpgsql immutable as"
    " $$ begin return app.write($1); end $$",
]

CODE = {
    "an index": ["create index on app.t ((v || app.spy('here')))"],
    "a predicate": ["create index on app.t (v) where app.spy('here') > 0"],
    "a statistics object": ["create statistics app.s on (id + app.spy('here')) from app.t"],
    "a constraint": ["alter table app.t add check (app.spy('here') > 0)"],
    "a generated column": ["alter table app.t add g int generated always as (app.spy('here')) stored"],
    "a policy": ["create policy p on app.t using (app.spy('here') > 0)"],
    "a domain": [
        "create domain app.d as int check (app.spy('here') > 0)",
        "create domain app.e as app.d",
        "create index on app.t ((coalesce(null::app.e, 1::app.e)))",
    ],
    "a domain in a composite": [
        "create domain app.d as int check (app.spy('here') > 0)",
        "create type app.pair as (a app.d[], b int)",
        "create index on app.t (((row(array[1]::app.d[], id)::app.pair).b))",
    ],
    "an operator": [
        "create operator app.@@@ (function = app.spy, rightarg = text)",
        "create index on app.t (id) where operator(app.@@@) 'here' > 0",
    ],
    "a function in SQL": [
        "create function app.wrapped() returns int language sql immutable as $$select app.spy('here')$$",
        "create index on app.t ((id + app.wrapped()))",
    ],
}
LOCKED_OUT = {"a constraint", "a generated column", "a policy"}
"""What waits for a table's copy to end, and is of a kind that might run; the others do run when a SELECT is
planned."""


@dataclass
class House:
    """A database with two roles that are not superusers: `owner` has schema `app`, `reader` replicates."""

    dsn: str
    owner: str
    reader: str

    def as_owner(self, *statements: str) -> None:
        with closing_connection(self.dsn) as connection, connection.cursor() as cursor:
            cursor.execute(f"set role {self.owner}")
            for statement in statements:
                cursor.execute(statement)

    def as_admin(self, *statements: str) -> Any:
        with closing_connection(self.dsn) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall() if cursor.description else None

    @property
    def reader_dsn(self) -> str:
        return self.dsn.replace("user=postgres", f"user={self.reader}")

    def connect(self) -> Connection:
        return connect(self.reader_dsn, "test")

    def member_of_owner(self) -> None:
        """Make the replicating role a member of the owner, as `publication_mode: create` needs."""
        self.as_admin(f"grant {self.owner} to {self.reader}")

    @property
    def ran(self) -> Any:
        return self.as_admin(RAN)[0][0]

    def forget(self) -> None:
        self.as_admin("truncate app.ran")


def house_in(dsn: str) -> Iterator[House]:
    mark = uuid.uuid4().hex[:10]
    house = House(dsn, f"owner_{mark}", f"reader_{mark}")
    house.as_admin(
        f"create role {house.owner}",
        f"create role {house.reader} login replication",
        f"create schema app authorization {house.owner}",
    )
    house.as_owner(
        f"grant usage on schema app to {house.reader}",
        *SPYING,
        # Autovacuum analyzes an index with its owner's rights, at any time.
        "create table app.t (id int primary key, v text) with (autovacuum_enabled = false)",
        "insert into app.t select g, repeat('v', 50) from generate_series(1, 2000) g",
        f"grant select on app.t to {house.reader}",
    )
    house.as_admin("create publication p for table app.t with (publish_via_partition_root)")
    yield house
    house.as_admin(f"drop owned by {house.owner}, {house.reader} cascade")
    house.as_admin(f"drop role {house.owner}, {house.reader}")


@pytest.fixture
def house(dsn: str) -> Iterator[House]:
    yield from house_in(dsn)


@pytest.fixture
def debian_house(debian_dsn: str) -> Iterator[House]:
    yield from house_in(debian_dsn)


def pipeline(**options: Any) -> Pipeline:
    given = {"publication": "p", "publication_mode": "use", **options}
    return Pipeline(name="p", lake="/nowhere", tables=("app.t",), **given)


def keeper_of(house: House, **options: Any) -> TableSnapshotHolder:
    with house.connect() as source:
        relation = find_relation(source, TABLE, "p")
    source.close()
    name = f"s_{uuid.uuid4().hex[:12]}"
    with (
        export_snapshot(house.reader_dsn, name, timeout_s=30) as exported,
        keep(house.reader_dsn, exported.snapshot, [relation], "p", 5.0, **options) as keeper,
    ):
        return keeper.hold(*keeper.relations)


def copied(house: House, keeper: TableSnapshotHolder, ranges: list[CopyRange]) -> list[int]:
    found: list[int] = []
    for part in ranges:
        with open_copy(house.reader_dsn, keeper.snapshot, part) as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
            found += [int(row[0]) for row in csv.reader(text)]
    return sorted(found)


@pytest.mark.parametrize("statements", CODE.values(), ids=CODE)
@pytest.mark.thorough(
    "the same test, of other code; test_code_is_found_whatever_the_server_is: a predicate",
    "a predicate",
    "a statistics object",
    "an operator",
    "a constraint",
)
def test_a_table_with_code_of_its_owner_is_refused_by_name(house, statements):
    check_source(house.reader_dsn, pipeline())
    house.as_owner(*statements)
    house.forget()
    with pytest.raises(TableError) as caught:
        check_source(house.reader_dsn, pipeline())
    message = caught.value.message
    assert message.startswith("app.t: its ")
    assert f"a function of role {house.owner}" in message
    assert f"rights of role {house.reader}" in message
    assert "trust_table_owners" in caught.value.hint
    with house.connect() as source:
        relation = find_relation(source, TABLE, "p")
        assert table_faults(source, pipeline(), [relation]).keys() == {TABLE}
    source.close()
    assert house.ran is None
    check_source(house.reader_dsn, pipeline(trust_table_owners=True))


@pytest.mark.parametrize("kind", sorted(CODE.keys() - LOCKED_OUT))
@pytest.mark.thorough("the same test, of an index", "a predicate", "a function in SQL", "an operator")
def test_it_is_not_run_by_a_copy_of_a_table_either(house, kind):
    with keeper_of(house) as keeper:
        house.as_owner(*CODE[kind])
        house.forget()
        relation = keeper.relation
        assert copied(house, keeper, keeper.plan(relation, WHOLE)) == [*range(1, 2001)]
        assert copied(house, keeper, keeper.plan(relation, CUT)) == [*range(1, 2001)]
    assert house.ran is None


@pytest.mark.differs_by_major("each major has rules and functions of its own that owners' code is told from")
def test_code_is_found_whatever_the_server_is(house):
    house.as_owner(*CODE["a predicate"])
    house.forget()
    with pytest.raises(TableError, match=r"its index t_v_idx calls app\.spy"):
        check_source(house.reader_dsn, pipeline())
    assert house.ran is None


def test_functions_of_superusers_and_our_own_are_not_refused(house):
    house.as_owner(*CODE["an index"])
    with house.connect() as source:
        oid = find_relation(source, TABLE, "p").oid
        assert list(read_owner_code(source, [oid])) == [oid]
        house.as_admin("alter function app.spy(text) owner to postgres")
        assert read_owner_code(source, [oid]) == {}
        house.as_admin(f"alter function app.spy(text) owner to {house.reader}")
        assert read_owner_code(source, [oid]) == {}
    source.close()


def test_an_extension_that_took_a_function_in_does_not_vouch_for_it(debian_house):
    house = debian_house
    house.as_admin(f"grant create on database {house.dsn.split('dbname=')[1].split()[0]} to {house.owner}")
    house.as_owner(*CODE["an index"])
    house.as_owner(
        "create extension pgcrypto schema app", "alter extension pgcrypto add function app.spy(text)"
    )
    with pytest.raises(TableError, match=r"calls app\.spy"):
        check_source(house.reader_dsn, pipeline())


def test_code_of_a_table_that_it_is_a_partition_of_counts(house):
    house.as_owner(
        "create table app.root (id int, v text) partition by range ((id + app.spy('here')))",
        "create table app.p1 partition of app.root for values from (0) to (10)",
    )
    with house.connect() as source:
        leaf = find_relation(source, TableName("app", "p1"))
        (code,) = read_owner_code(source, [leaf.oid])[leaf.oid]
    source.close()
    assert str(code) == f"its partition key calls app.spy, a function of role {house.owner}"


@pytest.mark.parametrize(
    "making", ["create index on app.t ((v || app.spy('here')))", *CODE["a statistics object"]]
)
@pytest.mark.thorough(
    "the same test, of an index", "create statistics app.s on (id + app.spy('here')) from app.t"
)
def test_while_a_table_is_cut_its_owner_cannot_add_code(house, making, monkeypatch):
    """The role may lock it, as a member of the owning role: it stays so until the copy ends, or lends it."""
    monkeypatch.setattr(lock_watch, "POLL_S", 3600)
    house.member_of_owner()
    with keeper_of(house) as keeper:
        relation = keeper.relation
        ranges = keeper.plan(relation, CUT)
        assert len(ranges) > 1
        assert all(part.is_planned for part in ranges)
        with pytest.raises(psycopg2.errors.LockNotAvailable):
            house.as_owner("set lock_timeout = '200ms'", making)
        house.as_owner("update app.t set v = 'other' where id = 1")
        assert copied(house, keeper, ranges) == [*range(1, 2001)]
    house.as_owner("set lock_timeout = '20s'", making)


def test_code_that_came_before_the_lock_is_refused(house):
    house.member_of_owner()
    with keeper_of(house) as keeper:
        house.as_owner(*CODE["a predicate"])
        house.forget()
        with pytest.raises(TableError, match=r"calls app\.spy"):
            keeper.plan(keeper.relation, CUT)
        assert copied(house, keeper, keeper.plan(keeper.relation, WHOLE)) == [*range(1, 2001)]
    assert house.ran is None


def test_a_role_that_may_not_lock_copies_a_table_whole(house, caplog):
    with caplog.at_level(logging.INFO), keeper_of(house) as keeper:
        ranges = keeper.plan(keeper.relation, CUT)
        assert [part.is_planned for part in ranges] == [False]
        keeper.check()
        assert copied(house, keeper, ranges) == [*range(1, 2001)]
    assert "app.t is copied by one task" in caplog.text
    with keeper_of(house, trusts_owners=True) as keeper:
        assert len(keeper.plan(keeper.relation, CUT)) > 1


def test_one_that_somebody_else_locks_is_copied_whole(house):
    house.member_of_owner()
    with psycopg2.connect(house.dsn) as other, keeper_of(house) as keeper:
        other.cursor().execute("lock table app.t in share update exclusive mode")
        assert [part.is_planned for part in keeper.plan(keeper.relation, CUT)] == [False]
        keeper.check()
    other.close()


def test_copy_with_row_filter_is_rejected_without_membership_in_owner_role(house):
    house.as_admin("alter publication p set table app.t where (id > 10)")
    with keeper_of(house) as keeper, pytest.raises(TableError, match="row filter"):
        keeper.plan(keeper.relation, WHOLE)
    house.member_of_owner()
    with keeper_of(house) as keeper:
        assert copied(house, keeper, keeper.plan(keeper.relation, WHOLE)) == [*range(11, 2001)]


def test_table_replaceable_by_owner_is_copied_whole_and_replacement_is_rejected(house):
    house.member_of_owner()
    house.as_admin(f"grant create on database {house.dsn.split('dbname=')[1].split()[0]} to {house.owner}")
    with keeper_of(house) as keeper:
        ranges = keeper.plan(keeper.relation, CUT)
        assert [part.is_planned for part in ranges] == [False]
        house.as_owner(
            "alter schema app rename to hidden",
            "create schema app",
            f"grant usage on schema app to {house.reader}",
            "create table app.t (id int, v text)",
            f"grant select on app.t to {house.reader}",
        )
        with pytest.raises(SnapshotError, match=r"app\.t: a schema was renamed, and another table"):
            copied(house, keeper, ranges)


@pytest.mark.parametrize("as_member", [False, True])
def test_looking_into_a_partition_runs_nothing(house, as_member):
    house.as_owner(
        "create table app.root (id int primary key, v text) partition by range (id)",
        "create table app.p (like app.root including all)",
        "alter table app.root attach partition app.p for values from (0) to (100)",
        "insert into app.root values (1, 'x')",
        f"grant select on app.root, app.p to {house.reader}",
    )
    if as_member:
        house.member_of_owner()

    def had_rows(**options: bool) -> bool:
        connection = house.connect()
        relation = find_relation(connection, TableName("app", "root"))
        (part,) = read_relation(connection, relation.oid, None, had_rows=True, **options).partitions
        assert house.as_admin("select pid from pg_locks where locktype = 'advisory' and objid = 4713") == []
        connection.close()
        return part.had_rows

    assert had_rows() is not as_member, "known only to who may lock it"
    assert had_rows(trusts_owners=True) is False
    house.as_owner("create index on app.p (v) where app.spy('here') > 0")
    house.forget()
    assert had_rows() is True
    assert house.ran is None
    with house.connect() as reader:
        reader.cursor().execute("select from app.p")
    reader.close()
    assert house.ran == [f"here as {house.reader}"], "this is what is kept from happening"


def test_a_partition_cannot_lead_to_another_table_by_its_name(house):
    """The driver's placeholders are letters like others in a table's name."""
    house.member_of_owner()
    house.as_owner(
        "create table app.root (id int primary key, v text) partition by range (id)",
        'create table app."p%(oid)s" (like app.root including all)',
        'alter table app.root attach partition app."p%(oid)s" for values from (0) to (100)',
        "insert into app.root values (1, 'x')",
    )
    oid = house.as_admin("select 'app.\"p%(oid)s\"'::regclass::oid::int")[0][0]
    house.as_owner(
        # What it wrote would be undone; such a lock stays.
        "create function app.stay() returns int language plpgsql immutable as"
        " $$ begin perform pg_advisory_lock(4711); return 1; end $$",
        f"create table app.p{oid} (id int, v text)",
        f"create index on app.p{oid} (v) where app.stay() > 0",
    )
    connection = house.connect()
    relation = find_relation(connection, TableName("app", "root"))
    (part,) = read_relation(connection, relation.oid, None, had_rows=True).partitions
    assert house.as_admin("select pid from pg_locks where locktype = 'advisory' and objid = 4711") == []
    connection.close()
    assert part.had_rows is False


@pytest.mark.thorough("test_table_replaceable_by_owner_is_copied_whole_and_replacement_is_rejected")
def test_table_is_copied_whole_if_owner_role_member_can_rename_schema(house):
    house.member_of_owner()
    member, database = f"member_{house.owner}", house.dsn.split("dbname=")[1].split()[0]
    house.as_admin(
        f"create role {member}",
        f"grant {house.owner} to {member}",
        f"grant create on database {database} to {member}",
    )
    try:
        with keeper_of(house) as keeper:
            assert [part.is_planned for part in keeper.plan(keeper.relation, CUT)] == [False]
    finally:
        house.as_admin(f"drop owned by {member}", f"drop role {member}")


def test_operators_that_come_first_in_the_path_are_not_called(house):
    """The path that an administrator has set holds until a connection has set its own."""
    house.as_owner(
        "create function app.same(text, text) returns bool language plpgsql as"
        " $$ begin perform pg_advisory_lock(4712); return $1 operator(pg_catalog.=) $2; end $$",
        "create operator app.= (function = app.same, leftarg = text, rightarg = text)",
    )
    house.as_admin(f"alter role {house.reader} set search_path = app, pg_catalog")
    connection = house.connect()
    assert house.as_admin("select pid from pg_locks where locktype = 'advisory' and objid = 4712") == []
    connection.close()


def test_a_superuser_is_refused_unless_owners_are_trusted(house):
    with pytest.raises(PrivilegeError, match="role postgres is a superuser") as caught:
        check_source(house.dsn, pipeline())
    assert "trust_table_owners" in caught.value.hint
    with pytest.raises(PrivilegeError, match="is a superuser"):
        check_role(house.dsn, pipeline())
    check_source(house.dsn, pipeline(trust_table_owners=True))
    check_role(house.dsn, pipeline(trust_table_owners=True))
    check_role(house.reader_dsn, pipeline())
    house.as_admin(f"grant pg_execute_server_program to {house.reader}")
    with pytest.raises(PrivilegeError, match="is a member of pg_execute_server_program"):
        check_role(house.reader_dsn, pipeline())
