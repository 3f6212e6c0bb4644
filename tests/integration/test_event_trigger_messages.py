"""Messages of the event trigger: what they say of a statement, and which are believed."""

from __future__ import annotations

import json
from dataclasses import replace

import psycopg2
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.changelog.relation_index import relations_uri
from airflow_provider_pgrepl.replication.pgoutput.messages import parse_message
from airflow_provider_pgrepl.replication.source.event_trigger.message import (
    DdlMessage,
    parse_ddl_message,
    read_sealed,
    seal_of,
)
from airflow_provider_pgrepl.replication.source.event_trigger.sql import body_of, install_statements
from demo.postgres import Server
from tests.conftest import closing_connection, fresh_database
from tests.support.handed import Handed
from tests.support.replicated import execute
from tests.support.watched import Watched, insert

TEXTS = {
    "alter table t alter id type bigint": False,
    "alter table t alter id set data type bigint using id * 2": True,
    "alter table t alter id type bigint; create index on t using btree (v)": False,
    "do $$ begin execute 'alter table t alter id type bigint using id + 1'; end $$": True,
    "select widen()": True,
    "select widen(); analyze t -- alter table": True,
    "alter table t alter id type bigint -- ; \n using id": True,
    "alter table t alter id type bigint /* ; */ using id": True,
    # Each of a migration's statements would search the whole text of the migration.
    "alter table t alter id type bigint -- " + "long " * 2000: True,
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


READ_BY_OTHERS = (
    "standard_conforming_strings=off",
    "backslash_quote=on",
    "transform_null_equals=on",
    "quote_all_identifiers=on",
    "plpgsql.extra_errors=all",
)


def test_tables_of_a_published_schema_are_told_of_when_they_leave_it_and_partitions_only_then(dsn, tmp_path):
    execute(
        dsn,
        "create table p (id int primary key, v text) partition by range (id)",
        "create table low partition of p for values from (0) to (10)",
        "create table t (id int primary key)",
        "create schema elsewhere",
        "create function leave() returns void language plpgsql as"
        " $$ begin execute 'alter table t set schema elsewhere'; end $$",
        "create publication everything for tables in schema public with (publish_via_partition_root = true)",
    )
    chosen = {"publication": "everything", "publication_mode": "use"}
    watched = Watched(dsn, tmp_path, ("public.p", "public.t"), event_trigger=True, **chosen)
    p, t = (one.oid for one in watched.begin_watched("public.p", "public.t"))
    told: list[list[int]] = []
    come = "alter table elsewhere.t set schema public"
    for ddl in ("alter table p add w int", "alter table t set schema elsewhere", come, "select leave()"):
        execute(dsn, ddl)
        watched.receive()
        rows = watched.changelog_rows("R")[sum(map(len, told)) :]
        told.append([row["relation_id"] for row in rows])
    assert told == [[p], [t], [t], [t]]


@pytest.mark.differs_by_major("which settings the parser of SQL and of PL/pgSQL has")
@pytest.mark.differs_by_major("what DROP locks")
def test_dropped_tables_and_indexes_are_told_of_for_the_tables_that_had_them(dsn, tmp_path):
    """A message of a partitioned table names all its partitions: too much for a DROP of any other table."""
    execute(
        dsn,
        "create table p (id int primary key, v text) partition by range (id)",
        "create table sub partition of p for values from (0) to (10) partition by range (id)",
        "create table low partition of sub for values from (0) to (5)",
        "create table by_index (id int not null, v text)",
        "create unique index identity on by_index (id)",
        "alter table by_index replica identity using index identity",
        "create index more on by_index (v)",
        "create table stage (id int primary key, v text)",
        "create index unrelated on stage (v)",
    )
    watched = Watched(dsn, tmp_path, ("public.p", "public.by_index"), event_trigger=True)
    p, by_index = (one.oid for one in watched.begin_watched("public.p", "public.by_index"))
    told = []
    for drop in ("index unrelated", "table stage", "table low", "index concurrently more", "index identity"):
        execute(dsn, f"drop {drop}")
        watched.receive()
        rows = watched.changelog_rows("R")[sum(map(len, told)) :]
        told.append([row["relation_id"] for row in rows])
    assert told == [[], [], [p], [by_index], [by_index]]


def test_settings_of_the_session_change_no_message(watched, dsn):
    settings = " ".join(f"-c {setting}" for setting in READ_BY_OTHERS)
    with closing_connection(f"{dsn} options='{settings}'") as session, session.cursor() as cursor:
        cursor.execute("alter table t alter id type bigint using id * 2")
        after = watched.now()
        cursor.execute("alter table t add w int")
        assert session.notices == []
    watched.receive()
    told = [(record.catalog, record.using) for record in watched.records()]
    assert told == [(after, True), (watched.now(), False)]


def test_change_of_type_that_the_function_failed_to_tell_of_stops_its_table(dsn, tmp_path):
    execute(dsn, "create table t(id int primary key, v int)")
    handed = Handed(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
    with handed.source() as source:
        body = body_of(handed.pipeline, source.server_version)
        failing = body.replace("_head := jsonb_build_object(", "_head := 1 / 0; --", 1)
        assert failing != body
        for statement in install_statements(handed.pipeline.name, failing, "postgres"):
            source.cursor().execute(statement)
    relation = handed.copy("public.t")
    execute(dsn, "insert into t values (1, 10)")
    assert handed.stream(relation).error is None
    execute(dsn, "alter table t alter v type bigint using v * 2", "insert into t values (2, 2)")
    assert "USING" in str(handed.stream(relation).error)
    assert pa.table(handed.lake_rows("public.t")).select(["id", "v"]).to_pylist() == [{"id": 1, "v": 10}]


def emit(content: str, transactional: str = "true") -> str:
    escaped = content.replace("'", "''")
    return f"select pg_logical_emit_message({transactional}, 'pgrepl.ddl', '{escaped}')"


def test_a_message_that_nobody_has_sealed_says_nothing(watched, dsn, caplog):
    """It does not even make the receiver query the catalog: any connected session could cause that all the
    time.
    """
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
    assert "that the event trigger did not send" in caplog.text


def genuine_message(watched: Watched) -> bytes:
    """Return the message that the trigger emits for an added column, read from a separate slot."""
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
    """A session that got a sealed message, and sends it again or with other columns, is not believed."""
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


@pytest.mark.parametrize(("encoding", "name"), [("LATIN1", "größe"), ("EUC_JP", "日本")])
@pytest.mark.thorough("the same test in LATIN1", "EUC_JP-\\u65e5\\u672c")
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
def test_unreadable_ddl_message_means_any_table_may_have_changed(said):
    assert parse_ddl_message(said, "publication") == DdlMessage(using=True)


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
def test_read_sealed_returns_none_for_malformed_head(content):
    assert read_sealed(content) is None
