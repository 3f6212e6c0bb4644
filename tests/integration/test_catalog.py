import threading

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import ConfigError, TableError
from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation, read_relation
from airflow_provider_pgrepl.replication.source.preflight.selection import resolve_tables
from airflow_provider_pgrepl.replication.source.server import end_of_last_record, read_server, wal_lsn


def pipeline(*tables, insert_only=(), **more):
    return Pipeline(name="shop", lake="/nowhere", tables=tables, insert_only=insert_only, **more)


def names(relations):
    return [str(relation.table) for relation in relations]


def table(pg, name, publication=None, schema="public"):
    return find_relation(pg, TableName(schema, name), publication)


def test_the_server_says_who_it_is(pg, run, server):
    found = read_server(pg)
    assert found.version_num == pg.info.server_version
    assert found.system_identifier == str(run("select system_identifier from pg_control_system()")[0][0])
    assert (found.timeline, found.wal_level, found.in_recovery) == (1, "logical", False)


def test_a_relation_has_columns_key_and_types(pg, run):
    run(
        "create type mood as enum ('sad', 'ok')",
        'create table t (gone int, a int, "B c" numeric(12,2) not null, m mood, primary key (a, "B c"))',
        "alter table t drop column gone",
    )
    run("set search_path = ''")  # as all our connections have it, so that types are qualified
    found = table(pg, "t")
    run("reset search_path")
    assert [(c.name, c.attnum, c.type_name, c.type_kind, c.is_key, c.not_null) for c in found.columns] == [
        ("a", 2, "integer", "b", True, True),
        ("B c", 3, "numeric(12,2)", "b", True, True),
        ("m", 4, "public.mood", "e", False, False),
    ]
    assert (found.replica_identity, found.relkind, found.publication_oid) == ("d", "r", 0)
    assert found.relfilenode == run("select pg_relation_filenode('t')")[0][0]
    assert Relation.from_json(found.to_json()) == found


def test_a_table_that_is_gone_is_none(pg, run):
    run("create table t (a int)")
    oid = table(pg, "t").oid
    run("drop table t")
    assert read_relation(pg, oid, None) is None
    assert table(pg, "t") is None


def test_every_alter_of_a_column_shows(pg, run):
    run("create table t (a int primary key, b int)")
    before = table(pg, "t")
    run("alter table t drop column b", "alter table t add column b int")
    after = table(pg, "t")
    assert before.version != after.version
    assert before.columns[1].attnum != after.columns[1].attnum
    run("truncate t")
    assert table(pg, "t").relfilenode != after.relfilenode


@pytest.mark.parametrize(
    ("identity", "key"),
    [
        ("default", ["a"]),
        ("full", ["a"]),
        ("nothing", []),
        ("using index t_b", ["b"]),
    ],
)
def test_the_key_is_that_of_the_replica_identity(pg, run, identity, key):
    run(
        "create table t (a int primary key, b int not null, c int)",
        "create unique index t_b on t (b) include (c)" if "index" in identity else "select 1",
        f"alter table t replica identity {identity}",
    )
    assert [column.name for column in table(pg, "t").key_columns] == key


def test_a_deferrable_primary_key_is_no_key(pg, run):
    run("create table t (a int primary key deferrable)")
    assert table(pg, "t").key_columns == ()
    with pytest.raises(TableError, match="no primary key that can serve"):
        resolve_tables(pg, pipeline("public.t"))


def test_membership_of_the_publication_is_pinned(pg, run):
    run("create table t (a int primary key)", "create table u (a int)", "create publication p for table t")
    found = table(pg, "t", "p")
    assert found.publication_oid
    assert found.membership_oid
    assert found.membership_xmin
    outside = table(pg, "u", "p")
    assert outside.publication_oid == found.publication_oid
    assert outside.membership_oid == 0
    assert table(pg, "t", "other").publication_oid == 0
    run("alter publication p drop table t", "alter publication p add table t")
    again = table(pg, "t", "p")
    assert again.publication_oid == found.publication_oid
    assert again.membership_oid != found.membership_oid
    run("create publication s for tables in schema public", "create publication e for all tables")
    for publication in ("s", "e"):
        assert table(pg, "t", publication).membership_oid


def test_a_column_list_and_generated_columns_are_honoured(pg, run):
    run(
        "create table t (a int primary key, b int, c int generated always as (b * 2) stored, d int)",
        "create publication p for table t (d, a)",
        "create publication q for table t",
        "create publication k for table t (b)",
    )
    assert [c.name for c in table(pg, "t", "p").columns] == ["a", "d"]
    assert [c.name for c in table(pg, "t", "q").columns] == ["a", "b", "d"]
    assert [c.name for c in table(pg, "t").columns] == ["a", "b", "d"]
    assert table(pg, "t", "k").key_columns == ()
    if pg.server_version >= 180000:
        run("create publication g for table t with (publish_generated_columns = stored)")
        assert [c.name for c in table(pg, "t", "g").columns] == ["a", "b", "c", "d"]
        run("create publication h for table t (a, c)")
        assert [c.name for c in table(pg, "t", "h").columns] == ["a", "c"]


def test_columns_are_those_that_pgoutput_sends(pg, run):
    run(
        "create table t (z int, a int primary key, b int generated always as (a) stored, c text)",
        "alter table t drop column z",
        "create publication p for table t",
        "select pg_create_logical_replication_slot('cols_' || current_database(), 'pgoutput')",
        "insert into t (a, c) values (1, 'x')",
    )
    messages = run(
        "select data from pg_logical_slot_get_binary_changes('cols_' || current_database(), null, null,"
        " 'proto_version', '1', 'publication_names', 'p')"
    )
    relation = next(bytes(m[0]) for m in messages if bytes(m[0])[:1] == b"R")
    found = table(pg, "t", "p")
    position = -1
    for column in found.columns:
        at = relation.index(bytes([column.is_key]) + column.name.encode() + b"\0", max(position, 0))
        assert at > position
        position = at
    assert len(found.columns) == 2


def test_names_and_patterns_are_resolved(pg, run):
    run(
        "create schema s",
        "create schema _pgrepl",
        "create table s.keyed (a int primary key)",
        "create table s.keyless (a int)",
        "create table s.history (a int)",
        "create view s.v as select 1",
        "create unlogged table s.u (a int primary key)",
        "create table public.one (a int primary key)",
        "create table _pgrepl.x (a int primary key)",
        "create table s.part (a int primary key) partition by list (a)",
        "create table s.part_1 partition of s.part for values in (1)",
    )
    assert names(resolve_tables(pg, pipeline("s.*", "public.one"))) == ["public.one", "s.keyed", "s.part"]
    assert names(resolve_tables(pg, pipeline("s.*", insert_only=("s.history",)))) == [
        "s.history",
        "s.keyed",
        "s.part",
    ]
    assert names(resolve_tables(pg, pipeline("s.part_1"))) == ["s.part_1"]


def test_all_that_cannot_be_replicated_is_said_at_once(pg, run):
    run(
        "create table keyed (a int primary key)",
        "create view v as select 1",
        "create materialized view m as select 1",
        "create unlogged table u (a int primary key)",
        "create table nokey (a int)",
        "create table nothing (a int primary key)",
        "alter table nothing replica identity nothing",
        'create table twins (a int primary key, "A" int)',
        "create table columnless ()",
        "create table empty_full ()",
        "alter table empty_full replica identity full",
        "create table part (a int primary key) partition by list (a)",
        "create table part_1 partition of part for values in (1)",
        "create sequence seq",
    )
    wanted = ["v", "m", "u", "nokey", "nothing", "twins", "columnless", "missing", "empty_full"]
    wanted += ["keyed", "part", "part_1", "seq"]
    with pytest.raises(TableError) as caught:
        resolve_tables(
            pg,
            pipeline(
                *(f"public.{name}" for name in wanted),
                "pg_catalog.pg_class",
                insert_only=("public.columnless",),
                commit_ts_column=False,
                commit_lsn_column=False,
            ),
        )
    problems = dict(line.split(": ", 1) for line in caught.value.message.splitlines())
    expected = {
        "v": "a view",
        "m": "a materialized view",
        "u": "an unlogged table",
        "nokey": "UPDATE and DELETE",
        "nothing": "REPLICA IDENTITY DEFAULT",
        "twins": 'columns "a" and "A" differ only in case',
        "columnless": "set commit_lsn_column to true",
        "missing": "does not exist",
        "empty_full": "no columns by which to tell rows apart",
        "part_1": "is a partition of public.part",
        "seq": "a sequence",
    }
    assert set(problems) == {f"public.{name}" for name in expected} | {"pg_catalog.pg_class"}
    for name, part in expected.items():
        assert part in problems[f"public.{name}"], name
    assert 'ALTER TABLE "public"."nokey" ADD PRIMARY KEY' in problems["public.nokey"]
    assert 'ALTER TABLE "public"."nokey" REPLICA IDENTITY FULL' in problems["public.nokey"]
    assert caught.value.scope.name == "TABLE"


def test_a_column_named_like_one_of_the_lake_tables_own_is_refused_unless_that_is_switched_off(pg, run):
    run("create table mine (a int primary key, _pgrepl_commit_lsn bigint)")
    with pytest.raises(TableError, match="set commit_lsn_column to false"):
        resolve_tables(pg, pipeline("public.mine"))
    assert resolve_tables(pg, pipeline("public.mine", commit_lsn_column=False))


def test_keyless_tables_are_taken_when_listed_as_insert_only(pg, run):
    run(
        "create table h (a int)",
        "create table n (a int primary key)",
        "alter table n replica identity nothing",
    )
    found = resolve_tables(pg, pipeline("public.h", "public.n", insert_only=("public.h", "public.n")))
    assert names(found) == ["public.h", "public.n"]
    with pytest.raises(ConfigError, match=r"insert_only: public\.other"):
        resolve_tables(pg, pipeline("public.h", insert_only=("public.h", "public.other")))


def test_tables_without_key_are_taken_when_their_changes_carry_whole_rows(pg, run):
    run(
        "create table copies (a int, b text)",
        "alter table copies replica identity full",
        "create table part (a int) partition by range (a)",
        "create table part_1 partition of part for values from (0) to (10)",
        "alter table part replica identity full",
        "alter table part_1 replica identity full",
        "create table other (a int)",
    )
    assert names(resolve_tables(pg, pipeline("public.copies", "public.part"))) == [
        "public.copies",
        "public.part",
    ]
    assert names(resolve_tables(pg, pipeline("public.*"))) == ["public.copies", "public.part"]
    run("alter table part_1 replica identity default")
    with pytest.raises(TableError, match="each partition has its own REPLICA IDENTITY"):
        resolve_tables(pg, pipeline("public.part"))


def test_equal_rows_cannot_be_told_apart_by_a_mark(pg, run):
    run("create table copies (a int)", "alter table copies replica identity full")
    with pytest.raises(TableError, match="deletes: soft cannot say which row"):
        resolve_tables(pg, pipeline("public.copies", deletes="soft"))
    assert resolve_tables(
        pg, pipeline("public.copies", deletes="soft", per_table={"public.copies": {"deletes": "hard"}})
    )


def test_a_partition_without_whole_rows_is_refused_in_a_table_that_has_them(pg, run):
    run(
        "create table part (a int primary key, b int) partition by range (a)",
        "create table part_1 partition of part for values from (0) to (10)",
        "alter table part replica identity full",
    )
    with pytest.raises(TableError, match="each partition has its own REPLICA IDENTITY"):
        resolve_tables(pg, pipeline("public.part"))
    run("alter table part_1 replica identity full")
    assert resolve_tables(pg, pipeline("public.part"))


def test_a_pattern_without_any_table_is_an_error(pg, run):
    run("create table h (a int)")
    with pytest.raises(TableError, match=r"public\.\*: no table"):
        resolve_tables(pg, pipeline("public.*"))
    with pytest.raises(TableError, match="system schema"):
        resolve_tables(pg, pipeline("_pgrepl.*"))


def test_a_partition_with_another_identity_is_refused(pg, run):
    run(
        "create table part (a int primary key, b int) partition by range (a)",
        "create table part_1 partition of part for values from (0) to (10)",
        "alter table part_1 replica identity nothing",
    )
    with pytest.raises(TableError, match=r"its partition public\.part_1"):
        resolve_tables(pg, pipeline("public.part"))


def test_the_wal_position_covers_what_was_committed_before(pg, run):
    run("create table t (a int)", "set synchronous_commit = off")
    run("insert into t values (1)")
    committed = LSN.parse(run("select pg_current_wal_insert_lsn()::text")[0][0])
    position = wal_lsn(pg)
    assert committed <= position
    assert position <= LSN.parse(run("select pg_current_wal_flush_lsn()::text")[0][0])


def test_a_wal_position_is_reached_although_an_open_transaction_keeps_its_records_unflushed(pg, dsn):
    with pg.cursor() as cursor:
        cursor.execute("create table big(v text)")
    other = psycopg2.connect(dsn)
    try:
        with other.cursor() as cursor:
            cursor.execute("insert into big select repeat('x', 100) from generate_series(1, 20)")
            position = wal_lsn(pg)
        with pg.cursor() as cursor:
            cursor.execute("select pg_current_wal_flush_lsn()::text")
            assert LSN.parse(cursor.fetchone()[0]) >= position
    finally:
        other.close()


@pytest.mark.parametrize("function", ["pg_logical_emit_message", "pg_current_xact_id"])
def test_a_wal_position_is_reached_by_a_role_that_may_not_call_what_makes_it_so(pg, dsn, run, function):
    """A hardened site may revoke these functions.

    Without `pg_current_xact_id` the server flushes in its own time, here at a checkpoint.
    """
    run("create role plain login", "create table big(v text)")
    signatures = run(f"select oid::regprocedure::text from pg_proc where proname = '{function}'")
    run(*(f"revoke execute on function {signature} from public" for (signature,) in signatures))
    other = psycopg2.connect(dsn)
    reader = psycopg2.connect(dsn, user="plain")
    reader.autocommit = True
    found = []
    waiting = threading.Thread(target=lambda: found.append(wal_lsn(reader)))
    try:
        with other.cursor() as cursor:
            cursor.execute("insert into big select repeat('x', 100) from generate_series(1, 20)")
            waiting.start()
            if function == "pg_current_xact_id":
                waiting.join(3)
                run("checkpoint")
            waiting.join(30)
        assert found
        assert LSN.parse(run("select pg_current_wal_flush_lsn()::text")[0][0]) >= found[0]
    finally:
        other.close()
        waiting.join(30)
        reader.close()
        run("drop role plain")


def test_waiting_for_a_wal_position_leaves_no_message_in_the_stream(pg, dsn, run):
    run(
        "create table big(v text)",
        "select pg_create_logical_replication_slot('s', 'pgoutput')",
        "create publication p",
    )
    other = psycopg2.connect(dsn)
    try:
        with other.cursor() as cursor:
            cursor.execute("insert into big select repeat('x', 100) from generate_series(1, 20)")
            wal_lsn(pg)
    finally:
        other.close()
    options = "'proto_version', '1', 'publication_names', 'p', 'messages', 'true'"
    (count,) = run(
        f"select count(*) from pg_logical_slot_peek_binary_changes('s', null, null, {options})"
        " where get_byte(data, 0) = ascii('M')"
    )[0]
    assert count == 0


@pytest.mark.parametrize(
    ("insert_lsn", "end"),
    [
        pytest.param(0x2000018, 0x2000018, id="a first page's header is longer"),
        pytest.param(0x2000028, 0x2000000, id="behind the header of a segment's first page"),
        pytest.param(0x2002018, 0x2002000, id="behind the header of any other page"),
        pytest.param(0x2002028, 0x2002028, id="sixteen bytes behind it a record may end"),
        pytest.param(0x2001000, 0x2001000, id="in the middle of a page"),
    ],
)
def test_the_end_of_the_last_record_is_not_behind_a_page_header(insert_lsn, end):
    assert end_of_last_record(insert_lsn, 16 << 20) == end


def test_oids_of_built_in_types_are_those_of_the_server(pg):
    ours = {name.lower(): oid for name, oid in vars(oids).items() if name.isupper() and isinstance(oid, int)}
    with pg.cursor() as cursor:
        cursor.execute(
            "select typname::text, oid::int from pg_type"
            " where typnamespace = 'pg_catalog'::regnamespace and typname = any(%s)",
            (list(ours),),
        )
        assert dict(cursor.fetchall()) == ours
