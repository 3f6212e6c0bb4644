"""Relation messages of the stream agree with the catalog, for every kind of key and table."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.pgoutput.messages import RelationMessage, parse_relation
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relation
from airflow_provider_pgrepl.replication.source.stream import ReplicationStream
from tests.conftest import Connection
from tests.support.replicated import execute

TABLES = {
    "a primary key": ["create table t(a int primary key, b text)"],
    "a composite key": [
        "create table t(a int, b text, c numeric(5,2), primary key (c, a))",
        "insert into t values (1, 'x', 2)",
    ],
    "a chosen index": [
        "create table t(a int primary key, b text not null, c int not null)",
        "create unique index u on t(c, b)",
        "alter table t replica identity using index u",
        "insert into t values (1, 'x', 2)",
    ],
    "an index with included columns": [
        "create table t(a int not null, b text not null, c int)",
        "create unique index u on t(a) include (b)",
        "alter table t replica identity using index u",
        "insert into t values (1, 'x', 2)",
    ],
    "full identity with a key": [
        "create table t(a int primary key, b text)",
        "alter table t replica identity full",
    ],
    "full identity without a key": ["create table t(a int, b text)", "alter table t replica identity full"],
    "no key": ["create table t(a int, b text)"],
    "no identity": ["create table t(a int primary key, b text)", "alter table t replica identity nothing"],
    "a deferrable key": ["create table t(a int primary key deferrable, b text)"],
    "dropped and generated columns": [
        "create table t(x int, a int primary key, b text, g int generated always as (a + 1) stored)",
        "alter table t drop x",
    ],
    "odd names and types": [
        "create type mood as enum ('a')",
        "create domain d as varchar(7)",
        'create table t("Ü""x" mood primary key, b d, c bit varying(3), e interval second(2))',
        "insert into t values ('a')",
    ],
    "partitions": [
        "create table t(a int primary key, b text) partition by range (a)",
        "create table leaf partition of t for values from (0) to (10)",
    ],
}


def announced(dsn: str) -> list[RelationMessage]:
    """All Relations of the first transaction in the slot."""
    found: list[RelationMessage] = []
    with ReplicationStream(dsn, "s", "p") as stream:
        while True:
            for message in stream.read(5, 1 << 20).messages:
                payload = bytes(message)[25:]
                if payload[:1] == b"R":
                    found.append(parse_relation(payload))
                if payload[:1] == b"C" and found:
                    return found


@pytest.mark.parametrize("statements", TABLES.values(), ids=TABLES)
def test_stream_and_catalog_agree(dsn: str, pg: Connection, statements: list[str]) -> None:
    insert = next((text for text in statements if text.startswith("insert")), "insert into t(a) values (1)")
    create = [text for text in statements if text != insert]
    execute(dsn, *create, "create publication p for table t with (publish_via_partition_root = true)")
    execute(dsn, "select pg_create_logical_replication_slot('s', 'pgoutput')", insert)
    with pg.cursor() as cursor:
        cursor.execute("select 't'::regclass::oid::bigint")
        (oid,) = cursor.fetchone()
    (message,) = [message for message in announced(dsn) if message.oid == oid]
    record = RelationRecord(message, read_relation(pg, oid, "p"))
    assert record.agrees
    assert record.version == record.catalog.version
