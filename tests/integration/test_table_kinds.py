"""Kinds of tables that are replicated; copy and stream show the same rows and columns of each."""

from __future__ import annotations

import csv
import io

import pytest

from airflow_provider_pgrepl.errors import ConfigError, PublicationError, TableError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.copy.copy_stream import plan_ranges
from airflow_provider_pgrepl.replication.source.preflight.check import check_source
from airflow_provider_pgrepl.replication.source.preflight.selection import RequestedTables, resolve_tables
from airflow_provider_pgrepl.replication.source.preflight.tables import table_warnings
from airflow_provider_pgrepl.replication.source.publication import create_publication
from tests.support.received import Received


def pipeline(*tables, **more):
    more = {"trust_table_owners": True, **more}  # the tests connect as a superuser
    return Pipeline(name="shop", lake="/nowhere", tables=tables, **more)


def problems_of(pg, wanted):
    with pytest.raises(TableError) as caught:
        resolve_tables(pg, wanted)
    return caught.value.message


def copied(connection, relation):
    """The rows that a snapshot would copy, as texts."""
    found = []
    for part in plan_ranges(connection, relation, 1 << 30):
        text = io.StringIO()
        connection.cursor().copy_expert(part.sql, text)
        found += [tuple(row) for row in csv.reader(io.StringIO(text.getvalue()))]
    return sorted(found)


PLAIN = ("s.plain", "s.root", "s.parent", "s.child")
VARIANTS = {
    "tables": ("for table s.plain, s.root, only s.parent, s.child with (publish_via_partition_root)", PLAIN),
    "all tables": ("for all tables with (publish_via_partition_root)", PLAIN),
    "a schema": ("for tables in schema s with (publish_via_partition_root)", PLAIN),
    "a schema wins over what is said of a table in it": (
        "for tables in schema s, table s.plain where (id > 1) with (publish_via_partition_root)",
        PLAIN,
    ),
    "filter and list": (
        "for table s.plain (id, v) where (id > 1), s.root (k, id) where (id > 1)"
        " with (publish_via_partition_root)",
        ("s.plain", "s.root"),
    ),
    "leaves through their table": ("for table s.plain, s.root", ("s.plain", "s.leaf", "s.low_1")),
    "leaves through all tables": ("for all tables", ("s.leaf", "s.low_1")),
    "leaves through a schema": ("for tables in schema s", ("s.leaf", "s.low_1")),
    "a leaf of its own": (
        "for table s.leaf (id, k) where (id > 1) with (publish_via_partition_root)",
        ("s.leaf",),
    ),
}


@pytest.mark.parametrize(("published", "tables"), VARIANTS.values(), ids=list(VARIANTS))
@pytest.mark.thorough(
    "the same test, of tables, all tables and leaves",
    "leaves through a schema",
    "a schema wins over what is said of a table in it",
    "a schema",
    "leaves through all tables",
)
def test_copy_and_stream_show_the_same_rows_and_columns(dsn, pg, run, tmp_path, published, tables):
    run(
        "create schema s",
        "create table s.plain (gone int, id int primary key, w int, v text)",
        "alter table s.plain drop column gone",
        "create table s.root (id int, k text, v text, primary key (id, k)) partition by list (k)",
        "create table s.leaf (v text, k text not null, id int not null, primary key (id, k))",
        "alter table s.root attach partition s.leaf for values in ('leaf')",
        "create table s.low partition of s.root for values in ('low') partition by range (id)",
        "create table s.low_1 partition of s.low for values from (0) to (100)",
        "create table s.parent (id int primary key)",
        "create table s.child (more text, primary key (id)) inherits (s.parent)",
        f"create publication theirs {published}",
    )
    received = Received(dsn, tmp_path, tables, publication="theirs", publication_mode="use")
    check_source(dsn, received.pipeline)
    received.begin()
    run(
        "insert into s.plain select i, i, 'v' || i from generate_series(1, 3) i",
        "insert into s.root select i, k, 'v' || i from generate_series(1, 3) i,"
        " unnest(array['leaf', 'low']) k",
        "insert into s.parent values (1), (2)",
        "insert into s.child values (3, 'm')",
    )
    received.receive()
    streamed = received.changelog_rows("I")
    for table in tables:
        relation = find_relation(pg, TableName.parse(table), "theirs")
        rows = sorted(tuple(row["new"]) for row in streamed if row["relation_id"] == relation.oid)
        assert rows == copied(pg, relation), table
        assert rows, table
        assert relation.membership_oid, table


def test_a_partitioned_table_published_by_its_partitions_is_refused(dsn, run):
    run(
        "create table root (id int primary key) partition by range (id)",
        "create table leaf partition of root for values from (0) to (9)",
        "create publication theirs for table root",
        "create publication through_root for table root with (publish_via_partition_root)",
    )
    with pytest.raises(PublicationError, match="publish_via_partition_root = true"):
        check_source(dsn, pipeline("public.root", publication="theirs", publication_mode="use"))
    with pytest.raises(PublicationError, match=r"does not hold public\.leaf"):
        check_source(dsn, pipeline("public.leaf", publication="through_root", publication_mode="use"))


def test_unsupported_relation_is_rejected_by_name_and_skipped_by_pattern(pg, run):
    run(
        "create schema s",
        "create table s.fine (id int primary key)",
        "create view s.view as select 1 as id",
        "create materialized view s.matview as select 1 as id",
        "create sequence s.sequence",
        "create type s.composite as (a int)",
        "create unlogged table s.unlogged (id int primary key)",
        "create temporary table temporary (id int primary key)",
        "create foreign data wrapper w",
        "create server elsewhere foreign data wrapper w",
        "create foreign table s.foreign_table (id int) server elsewhere",
    )
    temporary = f"{run('select pg_my_temp_schema()::regnamespace::text')[0][0]}.temporary"
    expected = {
        "s.view": "is a view",
        "s.matview": "is a materialized view",
        "s.sequence": "is a sequence",
        "s.composite": "is a composite type",
        "s.unlogged": "is an unlogged table, which PostgreSQL does not replicate",
        "s.foreign_table": "is a foreign table",
        "s.fine_pkey": "is an index",
        "s.missing": "does not exist",
        temporary: "in a system schema",
    }
    problems = problems_of(pg, pipeline("s.fine", *expected))
    for name, reason in expected.items():
        assert f"{name}: {reason}" in problems
    assert [str(found.table) for found in resolve_tables(pg, pipeline("s.*"))] == ["s.fine"]


def test_a_pattern_leaves_out_what_cannot_be_replicated_and_says_so(pg, dsn, run, caplog):
    """The same table refuses when it is named itself, be it by a setting."""
    caplog.set_level("INFO")
    run(
        "create table fine (id int primary key)",
        'create table cased (id int primary key, a int, "A" int)',
        "create table keyless (id int)",
        "create unlogged table unlogged (id int primary key)",
        "create foreign data wrapper w",
        "create server elsewhere foreign data wrapper w",
        "create table root (id int not null) partition by range (id)",
        "alter table root replica identity full",
        "create foreign table leaf partition of root for values from (0) to (9) server elsewhere",
        "create foreign table elsewhere (id int) server elsewhere",
    )
    assert [str(found.table) for found in check_source(dsn, pipeline("public.*"))] == ["public.fine"]
    for table, reason in (
        ("cased", 'columns "a" and "A" differ only in case'),
        ("keyless", "no usable key; name such a table in `tables` to see what it lacks"),
        ("elsewhere", "is a foreign table"),
        ("root", "its partition public.leaf cannot be published: is a foreign table"),
        ("unlogged", "is an unlogged table"),
    ):
        # Not its text, which is JSON where an app has run in this process.
        assert f"the pattern leaves out public.{table}: {reason}" in "\n".join(caplog.messages)
    for named in (
        pipeline("public.*", "public.cased"),
        pipeline("public.*", exclude_columns=("public.cased.id",)),
        pipeline("public.*", per_table={"public.cased": {"deletes": "soft"}}),
    ):
        assert 'public.cased: columns "a" and "A" differ only in case' in problems_of(pg, named)


def test_a_table_that_is_replicated_by_a_pattern_is_not_left_out_silently(pg, run):
    """Its hint is one that can be followed: no entry of the file names the table."""
    run("create table fine (id int primary key)", 'create table cased (id int primary key, "A" int, a int)')
    cased = TableName("public", "cased")
    with pytest.raises(TableError, match="differ only in case") as caught:
        resolve_tables(pg, pipeline("public.*"), RequestedTables(replicated=frozenset({cased})))
    assert "pgrepl remove FILE.json NAME" in caught.value.hint
    taken = resolve_tables(pg, pipeline("public.*"), RequestedTables(removed=frozenset({cased})))
    assert [str(found.table) for found in taken] == ["public.fine"]


def test_a_partition_that_is_not_replicated_by_postgresql_is_refused(pg, run):
    run(
        "create table root (id int not null) partition by range (id)",
        "create foreign data wrapper w",
        "create server elsewhere foreign data wrapper w",
        "create foreign table leaf partition of root for values from (0) to (9) server elsewhere",
        "alter table root replica identity full",
    )
    problems = problems_of(pg, pipeline("public.root", insert_only=("public.root",)))
    assert "its partition public.leaf cannot be published: is a foreign table" in problems


def test_every_choice_that_cannot_be_is_said_at_once(pg, run):
    run(
        "create table one (id int primary key, a text)",
        "create table two (id int primary key, b text)",
    )
    problems = problems_of(
        pg,
        pipeline(
            "public.one",
            "public.two",
            exclude_columns=("public.one.id", "public.two.c"),
            text_columns=("public.one.b", "public.two.d"),
            per_column={"public.two.id": {"infinity": "null"}},
        ),
    )
    for table, words in (
        ("one", ("exclude_columns names column id", "text_columns names column b")),
        (
            "two",
            ("exclude_columns names column c", "text_columns names column d", "per_column names column id"),
        ),
    ):
        for said in words:
            assert f"public.{table}: {said}" in problems


def test_choices_for_tables_that_are_not_replicated_are_refused(pg, run):
    run("create table one (id int primary key)", "create table two (id int primary key)")
    with pytest.raises(ConfigError) as caught:
        resolve_tables(
            pg,
            pipeline(
                "public.one",
                types={"public.two.id": "string"},
                text_columns=("public.two.x",),
                exclude_columns=("public.three.id",),
                per_table={"public.one": {"deletes": "soft"}, '"Public".one': {"deletes": "soft"}},
            ),
        )
    assert caught.value.message == (
        "types: public.two; text_columns: public.two; exclude_columns: public.three; per_table:"
        ' "Public".one is not among the tables of the pipeline'
    )


def test_stored_generated_columns_are_published_where_the_server_can(pg, run):
    run("create table t (id int primary key, g int generated always as (id * 2) stored)")
    wanted = pipeline("public.t")
    (planned,) = resolve_tables(pg, wanted)
    create_publication(pg, wanted.publication, [planned])
    (found,) = resolve_tables(pg, wanted)
    names = [[column.name for column in columns] for columns in (found.columns, found.unpublished)]
    assert names == ([["id", "g"], []] if pg.server_version >= 180000 else [["id"], ["g"]])
    assert planned.columns == found.columns
    assert planned.unpublished == found.unpublished


def test_a_key_with_a_generated_column_that_is_not_published_is_refused(pg, run):
    run(
        "create table t (v int, k int generated always as (v * 2) stored primary key)",
        "create publication theirs for table t",
    )
    problems = problems_of(pg, pipeline("public.t", publication="theirs", publication_mode="use"))
    assert "public.t: its key holds generated column k" in problems


def test_table_warnings_name_generated_columns_and_missing_replica_identity(pg, run):
    run(
        "create table t (id int primary key, a int generated always as (id) stored,"
        " b int generated always as (id) stored, c int generated always as (id) stored)",
        "create table keyless (id int)",
        "create table nothing (id int primary key)",
        "alter table nothing replica identity nothing",
        "create table in_full (id int)",
        "alter table in_full replica identity full",
        "create publication theirs for table t, keyless, nothing, in_full",
    )
    wanted = pipeline(
        "public.t",
        insert_only=("public.keyless", "public.nothing", "public.in_full"),
        exclude_columns=("public.t.b",),
        publication="theirs",
        publication_mode="use",
    )
    tables = ("t", "keyless", "nothing", "in_full")
    relations = [find_relation(pg, TableName("public", name), "theirs") for name in tables]
    said = list(table_warnings(pg, relations, wanted))
    assert len(said) == 3
    assert said[0].startswith("public.t: generated columns a, c are null in the lake")
    assert said[1].startswith("public.keyless: has no replica identity, so PostgreSQL refuses UPDATE")
    assert said[2].startswith("public.nothing: has no replica identity")


def test_table_warnings_name_large_columns_behind_a_row_filter(pg, run):
    run(
        "create table t (id int primary key, body text, n int, left_out text, short text)",
        "alter table t alter short set storage plain",
        "create table whole (id int primary key, body text)",
        "alter table whole replica identity full",
        "create table small (id text primary key, n int)",
        "create table open (id int primary key, body text)",
        "create publication theirs for table t where (id > 1), whole where (id > 1),"
        " small where (id > 'a'), open",
    )
    tables = ("t", "whole", "small", "open")
    wanted = pipeline(
        *(f"public.{name}" for name in tables),
        exclude_columns=("public.t.left_out",),
        publication="theirs",
        publication_mode="use",
    )
    relations = [find_relation(pg, TableName("public", name), "theirs") for name in tables]
    (said,) = table_warnings(pg, relations, wanted)
    assert said.startswith("public.t: when an UPDATE moves a row into the publication's row filter")
    assert "large values (TOAST) of body that" in said


def test_a_partition_that_sends_other_keys_than_its_table_is_refused(pg, run):
    run(
        "create table root (id int primary key, b int not null) partition by range (id)",
        "create table one partition of root for values from (0) to (10)",
        "create table two partition of root for values from (10) to (20)",
        "create table three partition of root for values from (20) to (30)",
        "alter table one replica identity full",
        "create unique index two_b on two (b, id)",
        "alter table two replica identity using index two_b",
        "alter table three replica identity nothing",
    )
    problems = problems_of(pg, pipeline("public.root")).splitlines()
    refused = [line.partition("its partition ")[2].split()[0] for line in problems]
    assert refused == ["public.three", "public.two"]


@pytest.mark.parametrize(("one", "other"), [("id", "ID"), ("größe", "GRÖSSE"), ("ς", "Σ")])
def test_columns_that_differ_only_in_case_are_refused_at_set_up(pg, run, one, other):
    run(f'create table t (k int primary key, "{one}" int, "{other}" int)')
    assert f'columns "{one}" and "{other}" differ only in case' in problems_of(pg, pipeline("public.t"))
