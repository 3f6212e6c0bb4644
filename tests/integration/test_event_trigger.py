"""The event trigger: DDL has its exact place in the stream, with the catalog of that place."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import psycopg2
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import PrivilegeError, SourceError
from airflow_provider_pgrepl.replication.changelog.messages import read_messages
from airflow_provider_pgrepl.replication.changelog.relation_index import (
    EffectiveFrom,
    RelationIndex,
    relations_uri,
)
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.lake.delta.handles import forget
from airflow_provider_pgrepl.replication.lsn import Epoch
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.receiving.receiver import Receiver
from airflow_provider_pgrepl.replication.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation, read_relation
from airflow_provider_pgrepl.replication.source.ddl_capture import event_trigger
from airflow_provider_pgrepl.replication.source.ddl_capture.event_trigger_sql import (
    function_name,
    removal_script,
    trigger_names,
)
from airflow_provider_pgrepl.replication.source.ddl_capture.message import DdlMessage, parse_ddl_message
from airflow_provider_pgrepl.replication.source.ddl_capture.seal import read_sealed, seal_of
from airflow_provider_pgrepl.replication.wire.logical_messages import parse_message
from demo.postgres import Server, binaries
from tests.conftest import closing_connection, fresh_database
from tests.support.handed import Handed
from tests.support.received import Received
from tests.support.replicated import execute, wait_until

pytestmark = pytest.mark.slow

SHAPE = [
    "create type mood as enum ('sad', 'glad')",
    "create type place as (street text, number int)",
    "create domain short as varchar(10)",
    "create table t(id int primary key, v text, m mood, p place[], s short, n numeric(5,2))",
    "create table other(id int primary key)",
]

CHANGES = {
    "a column dropped and added again": "alter table t drop v, add v text",
    "an equal type by an expression": "alter table t alter v type text using upper(v)",
    "a label renamed": "alter type mood rename value 'sad' to 'blue'",
    "a label added": "alter type mood add value 'mixed'",
    "a field renamed": "alter type place rename attribute street to road",
    "a field added": "alter type place add attribute town text",
    "a wider type": "alter table t alter n type numeric(7,2)",
    "a column renamed": "alter table t rename v to w",
    "a column added with a default": "alter table t add w int default 7",
    "another identity": "alter table t replica identity full",
    "another name": "alter table t rename to u",
    "another schema": "create schema elsewhere; alter table t set schema elsewhere",
    "its schema renamed": "alter schema {schema} rename to {schema}_renamed",
    "in a DO block": "do $$ begin execute 'alter table t drop v'; end $$",
    "in a replica's session": "set session_replication_role = replica; alter table t drop v",
}
COLUMN_LIST = {"a column list": "alter publication {publication} set table t (id, v)"}
"""On a stream of its own: this sets what the publication has."""


class Watched(Received):
    """Received, with an event trigger."""

    def begin_watched(self, *tables: str) -> list[Watched]:
        """Set up as the snapshot app does, with tables copied; the pipeline as one of each."""
        with self.source() as source:
            event_trigger.install(source, self.pipeline)
            position = self.begin() - 1
            watching = event_trigger.read_watching(source, self.pipeline)
            relations = [
                find_relation(source, TableName.parse(table), self.pipeline.publication) for table in tables
            ]
        assert watching is not None
        views = []
        for relation in relations:
            assert relation is not None
            self.oid = relation.oid
            self.index.add(Epoch(1), RelationRecord.of_catalog(relation), EffectiveFrom(position, watching))
            views.append(copy(self))
        return views

    @property
    def index(self) -> RelationIndex:
        return RelationIndex(relations_uri(self.pipeline.lake_root))

    def now(self) -> Relation | None:
        """What the catalog says of `t` at this moment."""
        with self.source() as source:
            return read_relation(source, self.oid, self.pipeline.publication)

    def versions(self, *ops: str) -> list[int]:
        """By which relations the table's rows are to be read."""
        rows = self.changelog_rows(*ops)
        places = [(row["commit_lsn"], row["ordinal"]) for row in self.changelog_rows()]
        assert places == sorted(set(places))
        return [row["relation_version"] for row in rows if row["relation_id"] == self.oid]

    def records(self) -> list[RelationRecord]:
        """The table's relations as they were announced."""
        rows = self.changelog_rows("R")
        return [RelationRecord.from_json(row["new"][0]) for row in rows if row["relation_id"] == self.oid]


@pytest.fixture
def watched(dsn: str, tmp_path: Path) -> Watched:
    execute(dsn, *SHAPE)
    pipeline = Watched(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
    pipeline.begin_watched("public.t")
    return pipeline


def insert(key: int, table: str = "t") -> str:
    return f"insert into {table} (id) values ({key})"


def name_of(relation: Relation | None) -> str:
    assert relation is not None
    return relation.table.sql


@pytest.mark.parametrize("changes", [CHANGES, COLUMN_LIST], ids=["of a table", "of the publication"])
def test_each_row_is_read_by_the_relation_of_its_own_time_however_late_it_is_received(dsn, tmp_path, changes):
    """Each change is that of a table and types of its own, in a schema of its own."""
    schemas = {change: f"c{number}" for number, change in enumerate(changes)}
    for schema in schemas.values():
        execute(dsn, f"create schema {schema}")
        execute(f"{dsn} options='-c search_path={schema}'", *SHAPE)
    tables = [f"{schema}.t" for schema in schemas.values()]
    pipeline = Watched(dsn, tmp_path, tuple(tables), flush_interval_s=0.05, event_trigger=True)
    relations = {}
    watched = dict(zip(changes, pipeline.begin_watched(*tables), strict=True))
    for change, schema in schemas.items():
        within, one = f"{dsn} options='-c search_path={schema}'", watched[change]
        first = one.now()
        execute(
            within,
            insert(1),
            changes[change].format(publication=pipeline.pipeline.publication, schema=schema),
        )
        second = one.now()
        name = name_of(second)
        execute(within, insert(2, name), f"alter table {name} add later int default 1, drop s")
        relations[change] = [first, second, one.now()]
        execute(within, insert(3, name), f"alter table {name} add later_still int")
    pipeline.receive()
    for change, one in watched.items():
        expected = [relation.version for relation in relations[change]]
        assert len(set(expected)) == 3, change
        assert one.versions("I") == expected, change
        announced = list(dict.fromkeys(record.catalog for record in one.records()))
        assert announced == [*relations[change], one.now()], change


def test_within_a_transaction_the_rows_before_and_after_are_told_apart(watched, dsn):
    before = watched.now()
    execute(dsn, f"begin; {insert(1)}; alter table t drop v, add v text; {insert(2)}; commit")
    after = watched.now()
    execute(dsn, f"begin; {insert(3)}; alter table t add w int; alter table t drop w; {insert(4)}; commit")
    watched.receive()
    assert watched.versions("I") == [
        before.version,
        after.version,
        after.version,
        watched.now().version,
    ]


def test_what_was_rolled_back_says_nothing(watched, dsn):
    before = watched.now()
    execute(dsn, "begin; alter table t drop v; rollback")
    execute(dsn, f"begin; savepoint s; alter table t drop v; rollback to s; {insert(1)}; commit")
    watched.receive()
    assert watched.versions() == [before.version] * 2
    assert watched.now() == before


def test_restarts_between_and_after_changes_read_nothing_by_a_later_catalog(watched, dsn, monkeypatch):
    expected = []
    with monkeypatch.context() as patched:
        # The slot is told nothing, so everything is sent again and again.
        patched.setattr(Receiver, "_send_status", lambda self: None)
        for key in range(3):
            expected.append(watched.now().version)
            execute(dsn, insert(key), "alter table t drop v, add v text")
            with watched.receiving() as receiver:
                wait_until(lambda: len(watched.versions("I")) == len(expected))
                assert receiver.error is None
    expected.append(watched.now().version)
    execute(dsn, insert(4), "alter table t drop v, add v text")
    for _ in range(2):
        watched.receive()
    assert watched.versions("I") == expected
    assert len(watched.changelog_rows("I")) == 4


def test_a_dropped_table_ends_where_it_was_dropped_and_one_of_its_name_is_another(watched, dsn):
    before = watched.now()
    execute(dsn, insert(1), "drop table t", "create table t(id int primary key)", insert(2))
    watched.receive()
    *first, last = watched.records()
    assert watched.versions("I") == [before.version]
    assert [record.catalog for record in first] == [before] * len(first)
    assert last.catalog is None


def test_leaving_the_publication_and_coming_back_both_have_their_place(watched, dsn):
    execute(dsn, insert(1))
    name = watched.pipeline.publication
    execute(dsn, f"alter publication {name} drop table t", insert(2), f"alter publication {name} add table t")
    execute(dsn, insert(3))
    watched.receive()
    memberships = [record.catalog.membership_oid for record in watched.records()]
    assert len(set(memberships)) == 3
    assert 0 in memberships


def test_ddl_on_a_partition_is_one_of_the_partitioned_table(dsn, tmp_path):
    execute(
        dsn,
        "create table t(id int primary key, v text) partition by range (id)",
        "create table low partition of t for values from (0) to (10)",
        "create table high partition of t for values from (10) to (20)",
    )
    watched = Watched(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
    watched.begin_watched("public.t")
    relations = [watched.now()]
    for key, change in enumerate(
        [
            "alter table t alter v type text using upper(v)",
            "alter table t add w int default 3",
            "drop table high",
            "create table more partition of t for values from (10) to (20)",
            "alter table t detach partition more",
        ]
    ):
        execute(dsn, insert(key), change)
        relations.append(watched.now())
    watched.receive()
    assert len(dict.fromkeys(relations)) == 5
    # Of partitions that are gone by now nobody can say whether they had rows.
    told = [
        replace(
            record.catalog,
            partitions=tuple(replace(part, had_rows=False) for part in record.catalog.partitions),
        )
        for record in watched.records()
    ]
    assert [relation for relation, _ in groupby(told)] == relations


def test_only_tables_of_the_publication_are_told_of(watched, dsn):
    execute(
        dsn,
        "create table made as select 1 as a",
        "alter table other add v text",
        "create temp table t2(a int)",
        "create index on t(v)",
        "comment on table t is 'x'",
        "drop table other",
    )
    watched.receive()
    assert watched.changelog_rows("R", "M") == []


def test_a_publication_of_all_tables_tells_of_new_ones(dsn, tmp_path):
    execute(dsn, "create table t(id int primary key)", "create publication everything for all tables")
    watched = Watched(
        dsn,
        tmp_path,
        ("public.*",),
        flush_interval_s=0.05,
        event_trigger=True,
        publication="everything",
        publication_mode="use",
    )
    watched.begin_watched("public.t")
    execute(
        dsn, "create table made as select 1 as a", "select 2 as b into selected", "create temp table x(a int)"
    )
    watched.receive()
    names = [
        RelationRecord.from_json(row["new"][0]).catalog.table.name for row in watched.changelog_rows("R")
    ]
    assert sorted(set(names)) == ["made", "selected"]


@contextlib.contextmanager
def weak_role(watched: Watched) -> Iterator[str]:
    """A role that may do nothing; it goes with the test."""
    name = f"weak_{watched.pipeline.name}"
    with watched.source() as source, source.cursor() as cursor:
        cursor.execute(f"create role {name}")
        cursor.execute(f"grant all on schema public to {name}")
        try:
            yield name
        finally:
            cursor.execute(
                f"reassign owned by {name} to current_user; drop owned by {name}; drop role {name}"
            )


def test_ddl_of_a_role_without_rights_is_told_of_as_well(watched, dsn):
    before = watched.now()
    with weak_role(watched) as role:
        execute(dsn, f"alter table t owner to {role}")
        execute(dsn, insert(1), f"set role {role}; alter table t drop v, add v text")
        execute(dsn, insert(2))
        watched.receive()
    first, second = watched.versions("I")
    assert first == before.version
    assert second == watched.now().version


def test_a_role_without_rights_is_told_what_it_takes_to_install(watched, dsn):
    with watched.source() as source:
        event_trigger.uninstall(source, watched.pipeline.name)
    with weak_role(watched) as role, watched.source() as source, source.cursor() as cursor:
        cursor.execute(f"set role {role}")
        with pytest.raises(PrivilegeError, match=f"role {role} may not create the event trigger") as raised:
            event_trigger.install(source, watched.pipeline)
        assert "superuser" in raised.value.hint
        assert not event_trigger.is_installed(source, watched.pipeline.name)


def function(watched: Watched) -> str:
    return f"_pgrepl.{function_name(watched.pipeline.name)}()"


def test_ddl_goes_on_when_the_function_fails_and_the_catalog_is_read_instead(watched, dsn):
    execute(dsn, insert(1))
    with weak_role(watched) as role:
        execute(dsn, f"alter function {function(watched)} owner to {role}")
        execute(dsn, "revoke select on pg_catalog.pg_inherits from public")
        execute(dsn, "alter table t drop v, add v text", insert(2))
        watched.receive()
        assert watched.versions("I")[1] == watched.now().version
        assert [row["new"][0] for row in watched.changelog_rows("M")] == ["pgrepl.ddl"]
        execute(dsn, "revoke execute on all functions in schema pg_catalog from public")
        execute(dsn, "alter table t drop v, add v text", insert(3))
        watched.receive()
        assert watched.versions("I")[2] == watched.now().version
    assert read_messages(watched.pipeline).num_rows == 0


@pytest.mark.parametrize(
    "unseen",
    [
        "alter event trigger {0} disable; {1}; alter event trigger {0} enable always",
        "drop event trigger {0}; {1}",
    ],
)
def test_ddl_that_no_trigger_saw_is_noticed_by_the_catalog(watched, dsn, unseen):
    before = watched.now()
    execute(dsn, insert(1))
    watched.receive()
    name = trigger_names(watched.pipeline.name)[0]
    execute(dsn, unseen.format(name, "alter table t drop v, add v text"), insert(2))
    watched.receive()
    assert watched.now() != before
    assert watched.versions("I") == [before.version, watched.now().version]


def test_vacuum_full_is_no_ddl_and_read_from_the_catalog(watched, dsn):
    execute(dsn, insert(1), "vacuum full t", insert(2))
    watched.receive()
    assert watched.versions("I")[-1] == watched.now().version


TEXTS = {
    "alter table t alter id type bigint": False,
    "alter table t alter id set data type bigint using id * 2": True,
    "alter table t alter id type bigint; create index on t using btree (v)": False,
    "do $$ begin execute 'alter table t alter id type bigint using id + 1'; end $$": True,
    "select widen()": True,
    "select widen(); analyze t -- alter table": True,
    "alter table t alter id type bigint -- ; \n using id": True,
    "alter table t alter id type bigint /* ; */ using id": True,
    "alter table t add w int": False,
}


def test_an_expression_in_a_change_of_type_is_told(watched, dsn):
    execute(
        dsn,
        "create function widen() returns void language plpgsql as"
        " $$ begin alter table t alter id type bigint using id * 2; end $$",
    )
    for text in TEXTS:
        execute(dsn, text, "alter table t alter id type int")
    watched.receive()
    # Whatever else the text holds, it is asked of what changed the type to bigint.
    told = [record.using for record in watched.records() if record.catalog.columns[0].type_name == "bigint"]
    assert told == [*list(TEXTS.values())[:-1]]


def emit(content: str, transactional: str = "true") -> str:
    escaped = content.replace("'", "''")
    return f"select pg_logical_emit_message({transactional}, 'pgrepl.ddl', '{escaped}')"


def test_a_message_that_nobody_has_sealed_says_nothing(watched, dsn, caplog):
    """Not even to ask the catalog: anybody who is connected could have the receiver do so all the time."""
    before = watched.now()
    execute(dsn, insert(1))
    name = watched.pipeline.name
    for content in ("", "{", "[]", "7", '{"pipeline": 5}', '{"pipeline": "else", "oid": 1}', "[" * 100_000):
        execute(dsn, emit(content))
    for more in (
        '"oid": "x"',
        f'"oid": {watched.oid}',
        '"oid": 1180591620717411303424',
        '"xid": "7", "seal": "00"',
        '"xid": 7, "seal": 5',
    ):
        execute(
            dsn, emit(f'{{"pipeline": "{name}", {more}}}'), emit(f'{{"pipeline": "{name}", {more}}}\n{{}}')
        )
    entries = DeltaTable(relations_uri(watched.pipeline.lake_root)).version()
    execute(dsn, insert(2))
    watched.receive()
    assert set(watched.versions()) == {before.version}
    assert DeltaTable(relations_uri(watched.pipeline.lake_root)).version() == entries
    assert "that the event trigger has not made" in caplog.text


def genuine_message(watched: Watched) -> bytes:
    """What the trigger emits for an added column, as read from a slot of one's own."""
    with closing_connection(watched.dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select pg_create_logical_replication_slot('peek', 'pgoutput', true)")
        cursor.execute("alter table t add told int")
        cursor.execute(
            "select data from pg_logical_slot_get_binary_changes('peek', null, null, 'proto_version', '1',"
            " 'publication_names', %s, 'messages', 'true')",
            (watched.pipeline.publication,),
        )
        found = [bytes(data) for (data,) in cursor.fetchall() if bytes(data)[:1] == b"M"]
    return parse_message(found[0]).content


def test_a_sealed_message_says_nothing_in_another_transaction(watched, dsn):
    """Who has come by one, and sends it again or with other columns, is not believed."""
    content = genuine_message(watched)
    told = watched.now()
    execute(dsn, insert(1), "alter table t drop told")
    after = watched.now()
    with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select pg_logical_emit_message(true, 'pgrepl.ddl', %s::bytea)", (content,))
        cursor.execute(
            "select pg_logical_emit_message(true, 'pgrepl.ddl', %s::bytea)",
            (content.replace(b"told", b"lied"),),
        )
        cursor.execute(insert(2))
    connection.close()
    watched.receive()
    assert watched.versions("I") == [told.version, after.version]
    assert {record.catalog.version for record in watched.records()} <= {told.version, after.version}


def test_without_the_option_no_message_is_looked_at(watched, dsn):
    execute(dsn, insert(1), "alter table t drop v, add v text", insert(2))
    watched.configure(event_trigger=False)
    watched.receive()
    assert watched.versions("I")[1] == watched.now().version
    assert len(watched.records()) == 2, "those that the stream announced, and nothing that a message told"
    assert {row["new"][0] for row in watched.changelog_rows("M")} == {"pgrepl.ddl"}


def test_without_the_key_the_catalog_is_asked(watched, dsn):
    execute(dsn, insert(1), f"drop table _pgrepl.ddl_key_{watched.pipeline.name}")
    execute(dsn, "alter type mood rename value 'sad' to 'blue'", insert(2))
    watched.receive()
    assert watched.versions("I")[1] == watched.now().version


def test_a_key_that_somebody_else_has_laid_there_is_none(watched, dsn):
    table = f"_pgrepl.ddl_key_{watched.pipeline.name}"
    with weak_role(watched) as role, watched.source() as source:
        assert event_trigger.read_key(source, watched.pipeline.name) is not None
        execute(dsn, f"alter table {table} owner to {role}")
        assert event_trigger.read_key(source, watched.pipeline.name) is None
        with pytest.raises(SourceError):
            event_trigger.install(source, watched.pipeline)


def test_the_key_outlives_another_version_of_the_function(watched, dsn):
    with watched.source() as source:
        key = event_trigger.read_key(source, watched.pipeline.name)
        execute(dsn, f"alter function {function(watched)} rename to old")
        event_trigger.install(source, watched.pipeline)
        assert event_trigger.read_key(source, watched.pipeline.name) == key


def test_a_superuser_runs_the_script_once_and_the_replicating_role_uses_what_it_made(watched, dsn, tmp_path):
    name = watched.pipeline.name
    with watched.source() as source:
        event_trigger.uninstall(source, name)
    execute(dsn, "drop schema if exists _pgrepl")
    file = tmp_path / "script.sql"
    with weak_role(watched) as role, watched.source() as source:
        source.cursor().execute(f"set role {role}")
        file.write_text(event_trigger.install_sql(source, watched.pipeline))
        for _ in range(2):
            psql(watched, file)
        event_trigger.install(source, watched.pipeline)
        assert len(event_trigger.read_key(source, name)) == 32
        with pytest.raises(PrivilegeError, match="cannot be removed") as caught:
            event_trigger.uninstall(source, name)
        assert "event-trigger-sql FILE.json --remove" in caught.value.hint
        source.cursor().execute("reset role")
        with source.cursor() as cursor:
            cursor.execute(
                "select has_schema_privilege(%s, '_pgrepl', 'create'),"
                " has_table_privilege('public', oid, 'select') from pg_class where relname = %s",
                (role, f"ddl_key_{name}"),
            )
            assert cursor.fetchone() == (True, False)
    file.write_text(removal_script(name))
    psql(watched, file)
    with watched.source() as source:
        assert not event_trigger.is_present(source, name)


def test_the_script_is_not_run_into_a_schema_that_somebody_else_has_made(watched, dsn, tmp_path):
    with watched.source() as source:
        event_trigger.uninstall(source, watched.pipeline.name)
    execute(dsn, "drop schema if exists _pgrepl")
    file = tmp_path / "script.sql"
    with weak_role(watched) as role, watched.source() as source:
        execute(dsn, f"create schema _pgrepl authorization {role}")
        file.write_text(event_trigger.install_sql(source, watched.pipeline))
        with pytest.raises(subprocess.CalledProcessError):
            psql(watched, file)
        assert not event_trigger.is_present(source, watched.pipeline.name)


def psql(watched: Watched, file: Path) -> None:
    program = shutil.which("psql") or str(binaries() / "psql")
    command = [program, "-q", "-v", "ON_ERROR_STOP=1", "-f", str(file), watched.dsn]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.parametrize(("encoding", "name"), [("LATIN1", "größe"), ("EUC_JP", "日本")])
def test_messages_of_a_database_in_another_encoding_are_read(server: Server, tmp_path, encoding, name):
    template = f"template0 encoding '{encoding}' lc_collate 'C' lc_ctype 'C'"
    with fresh_database(server, template) as dsn:
        execute(dsn, f"create table t(id int primary key, {name} text, c int)")
        watched = Watched(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
        watched.begin_watched("public.t")
        execute(dsn, insert(1))
        watched.receive()
        execute(dsn, "alter table t drop c, add c int", insert(2))
        watched.receive()
        assert watched.versions("I")[-1] == watched.now().version
        assert [column.name for column in watched.records()[-1].catalog.columns] == ["id", name, "c"]


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"7",
        b'{"oid": Infinity}',
        b'{"oid": 1180591620717411303424}',
        b'{"oid": -1}',
        b'{"oid": 5, "trigger": "\\ud800"}',
        b'{"oid": 5, "rows": [], "server": 180000}',
        b'{"oid": 5, "rows": ' + b"[" * 200_000,
        b'{"oid": 5, "trigger": "' + b"x" * 2000 + b'"}',
        '{"oid": 5, "name": "größe"}'.encode("latin-1"),
    ],
)
def test_what_cannot_be_read_says_that_anything_may_have_changed(said):
    assert parse_ddl_message(said, "publication") == DdlMessage()


@pytest.mark.parametrize("key", [b"k" * 32, b"%s%d"])
def test_a_seal_is_of_key_transaction_and_content(key):
    said = b'{"oid": 5}'
    head = json.dumps({"pipeline": "p", "xid": str((3 << 32) + 7), "seal": seal_of(key, (3 << 32) + 7, said)})
    message = read_sealed(head.encode() + b"\n" + said)
    assert message is not None
    assert message.pipeline == "p"
    assert message.said == said
    assert message.is_genuine(key, 7)
    assert not message.is_genuine(key, 8)
    assert not message.is_genuine(b"other", 7)
    assert not replace(message, said=said + b" ").is_genuine(key, 7)
    assert not replace(message, xid=7).is_genuine(key, 7)
    assert not replace(message, seal="größe").is_genuine(key, 7)
    half = read_sealed(head.replace(message.seal, "\\ud800").encode() + b"\n" + said)
    assert half is not None
    assert not half.is_genuine(key, 7)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"\xff", b'{"pipeline": "p", "xid": "x"}', b'{"pipeline": 7}']
)
def test_what_is_no_head_is_no_message_of_ours(content):
    assert read_sealed(content) is None


def test_installing_again_changes_nothing_and_uninstalling_leaves_nothing(watched, dsn):
    with watched.source() as source:
        watching = event_trigger.read_watching(source, watched.pipeline)
        event_trigger.install(source, watched.pipeline)
        assert event_trigger.read_watching(source, watched.pipeline) == watching
        for _ in range(2):
            event_trigger.uninstall(source, watched.pipeline.name)
        assert event_trigger.read_watching(source, watched.pipeline) is None
        with source.cursor() as cursor:
            cursor.execute("select 1 from pg_namespace where nspname = '_pgrepl'")
            assert cursor.fetchall() == []


def test_a_dump_is_restored_with_the_trigger_and_without_harm(watched, server: Server, dsn):
    name = dsn.split("dbname=")[1].split()[0]
    dumped = subprocess.run(
        [binaries() / "pg_dump", "-d", dsn, "--no-publications"], check=True, capture_output=True, text=True
    ).stdout
    with closing_connection(server.dsn()) as admin, admin.cursor() as cursor:
        cursor.execute(f"create database {name}_restored")
    try:
        subprocess.run(
            [server.bin / "psql", "-v", "ON_ERROR_STOP=1", "-qd", server.dsn(f"{name}_restored")],
            check=True,
            capture_output=True,
            input=dumped,
            text=True,
        )
        with closing_connection(server.dsn(f"{name}_restored")) as restored:
            assert event_trigger.is_installed(restored, watched.pipeline.name)
        execute(server.dsn(f"{name}_restored"), "alter table t drop v", "drop table t")
    finally:
        with closing_connection(server.dsn()) as admin, admin.cursor() as cursor:
            cursor.execute(f"drop database {name}_restored")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("alter table t drop v, add v text", "dropped and added again"),
        ("alter table t alter id type bigint using id * 10", "USING"),
        ("alter type mood rename value 'sad' to 'blue'", "label"),
    ],
)
def test_a_table_stops_right_there_with_the_rows_before_in_the_lake(dsn, tmp_path, change, reason):
    execute(dsn, "create type mood as enum ('sad')", "create table t(id int primary key, v text, m mood)")
    handed = Handed(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
    with handed.source() as source:
        event_trigger.install(source, handed.pipeline)
    relation = handed.copy("public.t")
    execute(dsn, "insert into t values (0, 'z', null)")
    handed.stream(relation)
    execute(dsn, "insert into t values (1, 'a', 'sad')", "insert into t values (2, 'b', null)", change)
    execute(dsn, "insert into t (id, v) values (3, 'c')")
    result = handed.stream(relation)
    assert reason in result.error
    # The change itself is where the table stops, before the next row.
    *_, second, third = handed.changelog_rows("I")
    assert second["commit_lsn"] < result.error_lsn < third["commit_lsn"]
    assert sorted(handed.lake_rows("public.t")["id"].to_pylist()) == [0, 1, 2]


def test_a_safe_change_that_no_row_follows_is_already_followed(dsn, tmp_path):
    execute(dsn, "create table t(id int primary key)")
    handed = Handed(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
    with handed.source() as source:
        event_trigger.install(source, handed.pipeline)
    relation = handed.copy("public.t")
    execute(dsn, insert(1), "alter table t add w int default 7")
    result = handed.stream(relation)
    assert result.error is None
    assert pa.table(handed.lake_rows("public.t")).select(["id", "w"]).to_pylist() == [{"id": 1, "w": 7}]


def test_safe_changes_that_no_row_follows_are_followed_once(dsn, tmp_path):
    execute(dsn, "create table t(id int primary key, v text)")
    handed = Handed(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
    with handed.source() as source:
        event_trigger.install(source, handed.pipeline)
    relation = handed.copy("public.t")
    for change in ("add w int default 7", "drop v", "add x int", "add y int"):
        execute(dsn, f"alter table t {change}")
        assert handed.stream(relation).error is None
    execute(dsn, "insert into t values (1, 2, 3, 4)")
    assert handed.stream(relation).error is None
    assert pa.table(handed.lake_rows("public.t")).select(["id", "w", "x", "y"]).to_pylist() == [
        {"id": 1, "w": 2, "x": 3, "y": 4}
    ]


def test_a_transaction_that_ends_with_a_safe_change_is_followed(dsn, tmp_path):
    execute(dsn, "create table t(id int primary key, v text)")
    handed = Handed(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
    with handed.source() as source:
        event_trigger.install(source, handed.pipeline)
    relation = handed.copy("public.t")
    execute(dsn, "begin; insert into t values (1, 'a'); alter table t add w int default 7; commit")
    assert handed.stream(relation).error is None
    execute(dsn, "alter table t add x int", "insert into t values (2, 'b', 3, 4)")
    forget(handed.lake_path("public.t"))
    assert handed.stream(relation).error is None
    rows = pa.table(handed.lake_rows("public.t")).select(["id", "w", "x"]).to_pylist()
    assert sorted(rows, key=lambda row: row["id"]) == [
        {"id": 1, "w": 7, "x": None},
        {"id": 2, "w": 3, "x": 4},
    ]


COSTLY = {
    "an unpublished table is created": "create table new (id int primary key, v text)",
    "a published table is altered": "alter table t add later int",
    "a published type is altered": "alter type mood add value 'mixed'",
}


_ROWS_READ = """
select sum(pg_stat_get_xact_tuples_returned(one) + pg_stat_get_xact_tuples_fetched(one))::int
from unnest(array['pg_attribute', 'pg_class', 'pg_depend', 'pg_index', 'pg_inherits', 'pg_type']::regclass[])
    one
"""


def catalog_rows_read(dsn: str, ddl: str) -> int:
    """How many rows of the catalog a DDL reads in a session that has its plans."""
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        found = []
        for _ in range(2):
            cursor.execute("begin")
            cursor.execute(_ROWS_READ)
            found = [cursor.fetchone()[0]]
            cursor.execute(ddl)
            cursor.execute(_ROWS_READ)
            found.append(cursor.fetchone()[0])
            cursor.execute("rollback")
    return int(found[1] - found[0])


def test_ddl_costs_no_more_where_there_are_more_tables(watched, dsn):
    few = {what: catalog_rows_read(dsn, ddl) for what, ddl in COSTLY.items()}
    execute(
        dsn,
        *(f"alter event trigger {name} disable" for name in trigger_names(watched.pipeline.name)),
        "create table parted (id int primary key, v text) partition by range (id)",
        "do $$ begin for i in 1..400 loop execute format('create table many_%s partition of parted"
        " for values from (%s) to (%s)', i, i, i + 1); end loop; end $$",
        *(f"alter event trigger {name} enable always" for name in trigger_names(watched.pipeline.name)),
        "analyze",
    )
    many = {what: catalog_rows_read(dsn, ddl) for what, ddl in COSTLY.items()}
    for what, read in many.items():
        assert read < few[what] + 200, (what, few[what], read)
