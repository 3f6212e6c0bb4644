"""Every kind of source table, copied and then streamed, equals the source after each. All in one pipeline."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from airflow_provider_pgrepl.replication.postgres.names import TableName
from tests.conftest import closing_connection, drop_slots
from tests.support.in_process import InProcess
from tests.support.replicated import execute, quoted
from tests.support.table_cases import Case, Replay, cases_for, options_of

ODD = (
    "Capital", 'a"b', "a.b", "a b", "naïve λ 🐘", "select", '"""select"""', "back\\slash", "what?", "a-b",
    "100%", "t~x", "a,b", "a;b", "a{b}", "a(b)", "tab\there", "new\nline", "a=b", "`tick`", "s'q", "x" * 63,
    "é" * 31, "$1", "%s", "{0}", "[0]", "a/b", "_", " ", "element", "c0", "o0", "u1", "kind", "zero",
    "s", "t",
)  # fmt: skip
"""Names that some layer between PostgreSQL and Spark might not take."""

ODD_LIST = ", ".join(map(quoted, ODD))
ODD_DEFINED = ", ".join(f"{quoted(name)} int" for name in ODD)
NUMBERS = ", ".join(map(str, range(len(ODD))))

# %% is a percent sign only where psycopg2 is given parameters, which execute() never does.
NAMES = [
    Case(
        "public.odd_columns",
        (
            f"create table odd_columns (id int primary key, {ODD_DEFINED})",
            f"insert into odd_columns values (1, {NUMBERS})",
            "insert into odd_columns values (2), (3)",
        ),
        (
            f"insert into odd_columns values (4, {NUMBERS})",
            f"update odd_columns set ({ODD_LIST}) = row({NUMBERS}) where id = 2",
            "delete from odd_columns where id = 3",
        ),
    ),
    *(
        Case(
            str(table := TableName("My Schema" if number % 2 else "Ü.%s", name)),
            (
                f"create table {table.sql} ({quoted(name)} int, {quoted(ODD[number - 1])} text,"
                f" v int, primary key ({quoted(name)}, {quoted(ODD[number - 1])}))",
                f"insert into {table.sql} values (1, 'a', 1), (2, 'b', 2), (3, 'c', 3)",
            ),
            (
                f"update {table.sql} set v = -v where v = 1",
                f"update {table.sql} set {quoted(name)} = 20 where v = 2",
                f"delete from {table.sql} where v = 3",
                f"insert into {table.sql} values (4, 'd', 4)",
            ),
        )
        for number, name in enumerate(
            [
                '"""select"""',
                "a.b",
                "back\\slash",
                "what?",
                "ta ble",
                "new\nline",
                "é" * 31,
                "%s",
                "x" * 63,
                "T~",
            ]
        )
    ),
    *(
        Case(
            f"{schema}.twin",
            (f"create table {schema}.twin (id int primary key)", f"insert into {schema}.twin values ({row})"),
            (f"insert into {schema}.twin values ({row + 10})",),
        )
        for row, schema in enumerate(("public", "other"))
    ),
]

GENERATED = [
    Case(
        "public.stored",
        (
            "create table stored (g int generated always as (id * 2) stored, id int primary key,"
            " t text generated always as (v || '!') stored, v text)",
            "insert into stored (id, v) values (1, 'a'), (2, 'b'), (3, 'c')",
        ),
        (
            "update stored set v = 'z' where id = 1",
            "update stored set id = 20 where id = 2",
            "delete from stored where id = 3",
            "insert into stored (id, v) values (4, null)",
        ),
        least=180000,
    ),
    Case(
        "public.stored_unpublished",
        (
            "create table stored_unpublished (id int primary key, g int generated always as (v * 2) stored,"
            " v int)",
            "insert into stored_unpublished (id, v) values (1, 1), (2, 2)",
        ),
        (
            "update stored_unpublished set v = 5 where id = 1",
            "insert into stored_unpublished (id, v) values (3, 3)",
        ),
        source="(select id, null::int as g, v from stored_unpublished) as shown",
        below=180000,
    ),
    Case(
        "public.stored_key",
        (
            "create table stored_key (v int, k int generated always as (v * 2) stored primary key)",
            "insert into stored_key values (1), (2), (3)",
        ),
        (
            "update stored_key set v = 10 where v = 1",
            "delete from stored_key where v = 2",
            "insert into stored_key values (1)",
        ),
        least=180000,
    ),
    Case(
        "public.virtual",
        (
            "create table virtual (id int primary key, g int generated always as (v * 2) virtual, v int)",
            "insert into virtual (id, v) values (1, 1), (2, 2)",
        ),
        ("update virtual set v = 5 where id = 1", "insert into virtual (id, v) values (3, 3)"),
        source="(select id, null::int as g, v from virtual) as shown",
        least=180000,
    ),
]

PARTITIONED = [
    Case(
        "public.nested",
        (
            "create table nested (id int, region text, day int, v text, primary key (region, day, id))"
            " partition by list (region)",
            "create table nested_eu partition of nested for values in ('eu') partition by range (day)",
            "create table nested_eu_1 partition of nested_eu for values from (0) to (10)",
            "create table nested_eu_2 partition of nested_eu for values from (10) to (20)"
            " partition by hash (id)",
            "create table nested_eu_2_0 partition of nested_eu_2 for values with (modulus 2, remainder 0)",
            # A leaf with another order of columns, one dropped in between.
            "create table nested_eu_2_1 (v text, gone int, day int not null, region text not null,"
            " id int not null)",
            "alter table nested_eu_2_1 drop column gone",
            "alter table nested_eu_2_1 add primary key (region, day, id)",
            "alter table nested_eu_2 attach partition nested_eu_2_1 for values with (modulus 2, remainder 1)",
            "create table nested_us partition of nested for values in ('us')",
            "alter table nested_us replica identity full",
            "create table nested_old partition of nested for values in ('old')",
            "insert into nested select i, r, d, 'v' || i from generate_series(1, 20) i,"
            " unnest(array['eu', 'us', 'old']) r, unnest(array[5, 15]) d",
        ),
        (
            "update nested set v = v || '!' where id % 3 = 0 and region <> 'old'",
            "delete from nested where region = 'eu' and day = 15 and id < 8",
            "update nested set day = 15 where region = 'eu' and day = 5 and id < 6",
            "update nested set region = 'eu', id = id + 100 where region = 'us' and id < 4",
            "update nested set region = 'us', id = id + 200 where region = 'eu' and id between 10 and 12",
            "delete from nested where id = 15 and region <> 'old'",
            "create table nested_new partition of nested for values in ('new')",
            "insert into nested values (1, 'new', 1, 'in a partition that came later')",
            "update nested set region = 'new', day = 2 where id = 16 and region = 'us' and day = 5",
            "create table nested_empty (like nested including all)",
            "alter table nested attach partition nested_empty for values in ('empty')",
            "insert into nested values (1, 'empty', 1, 'in a partition attached empty')",
        ),
    ),
    Case(
        "public.emptied",
        (
            "create table emptied (id int primary key) partition by range (id)",
            "create table emptied_1 partition of emptied for values from (0) to (10)",
            "create table emptied_2 partition of emptied for values from (10) to (20)",
            "insert into emptied values (1), (2), (11)",
        ),
        ("truncate emptied", "insert into emptied values (3), (12)"),
    ),
    Case(
        "public.leafless",
        ("create table leafless (id int primary key) partition by range (id)",),
        (
            "create table leafless_1 partition of leafless for values from (0) to (10)",
            "insert into leafless values (1)",
        ),
        snapshot_rows=0,
    ),
]

INHERITED = [
    Case(
        "public.parent",
        (
            "create table parent (id int primary key, v text)",
            "insert into parent values (1, 'parent'), (2, 'parent')",
        ),
        ("update parent set v = v || '!'", "delete from only parent where id = 2"),
        source="only parent",
    ),
    Case(
        "public.child",
        (
            "create table child (more int, primary key (id)) inherits (parent)",
            "insert into child values (1, 'child', 1), (3, 'child', 3)",
        ),
        ("delete from parent where id = 3", "insert into child values (4, 'child', 4)"),
        source="only child",
    ),
    Case(
        "public.grandchild",
        (
            "create table other_parent (id int, w int)",
            "create table grandchild (own text, primary key (id)) inherits (child, other_parent)",
            "insert into grandchild values (5, 'g', 5, 5, 'g')",
        ),
        ("update parent set id = 50 where id = 5",),
    ),
]


def keyed(name: str, type_sql: str, *keys: str, shown: str = "k") -> Case:
    """A table whose key has this type: a row each is updated, moved, deleted and added."""
    first, second, third, fourth = (f"'{key}'" for key in keys)
    return Case(
        f"public.{name}",
        (
            f"create table {name} (k {type_sql} primary key, v int)",
            f"insert into {name} values ({first}, 1), ({second}, 2), ({third}, 3)",
        ),
        (
            f"update {name} set v = 10 where v = 1",
            f"delete from {name} where v = 3",
            f"update {name} set k = {third} where v = 2",
            f"insert into {name} values ({fourth}, 4)",
            f"delete from {name} where v = 4; insert into {name} values ({fourth}, 5)",
        ),
        source=f"(select {shown} as k, v from {name}) as shown",
    )


KEYS = [
    keyed("key_uuid", "uuid", *(str(uuid.UUID(int=number)) for number in (1, 2, 3, 4))),
    keyed("key_text", "text", "", " ", "A\na", 'é"'),
    keyed("key_char", "char(3)", "a", "b ", "ccc", ""),
    keyed("key_numeric", "numeric", "1.0", "-2.50", "NaN", "1e30", shown="k::text"),
    keyed("key_decimal", "numeric(20,4)", "1.0", "-2.5", "3", "9999999999999999"),
    keyed("key_float", "float8", "NaN", "-0", "Infinity", "1e-300"),
    keyed("key_real", "float4", "NaN", "0.1", "-Infinity", "-0", shown="k::float8"),
    keyed(
        "key_timestamptz",
        "timestamptz",
        "2024-01-01 00:00+00",
        "1883-01-01",
        "2024-01-01 00:00:00.000001+00",
        "9999-12-31 23:59+00",
    ),
    keyed(
        "key_timestamp", "timestamp", "2024-01-01", "1883-01-01", "1999-12-31 23:59:59.999999", "2024-01-02"
    ),
    keyed("key_date", "date", "2024-01-01", "0044-03-15", "9999-12-31", "1970-01-01"),
    keyed("key_bytea", "bytea", "\\x", "\\x00", "\\xff", "\\x5c78"),
    Case(
        "public.key_bool",
        (
            "create table key_bool (k bool primary key, v int)",
            "insert into key_bool values (true, 1), (false, 2)",
        ),
        (
            "delete from key_bool where k",
            "update key_bool set k = true",
            "insert into key_bool values (false, 3)",
        ),
    ),
    Case(
        "public.key_composite",
        (
            "create table key_composite (v int, c text, a bigint, b date, primary key (a, b, c))",
            "insert into key_composite select i, 'c' || i % 2, i / 2, date '2024-01-01' + i from"
            " generate_series(1, 20) i",
        ),
        (
            "update key_composite set a = a + 1000, c = 'moved' where v % 3 = 0",
            "delete from key_composite where v % 5 = 0",
            "update key_composite set v = -v where a = 2",
        ),
    ),
    Case(
        "public.key_include",
        (
            "create table key_include (a int, b int, c int, primary key (a) include (b))",
            "insert into key_include values (1, 1, 1), (2, 2, 2)",
        ),
        ("update key_include set b = 5 where a = 1", "update key_include set a = 3 where a = 2"),
    ),
    Case(
        "public.key_index",
        (
            "create table key_index (a int primary key, b text not null, c uuid not null, d int)",
            "create unique index key_index_i on key_index (c, b) include (d)",
            "alter table key_index replica identity using index key_index_i",
            "insert into key_index select i, 'b' || i, gen_random_uuid(), i from generate_series(1, 6) i",
        ),
        (
            "update key_index set a = a + 100 where a = 1",
            "update key_index set b = 'new' where a = 2",
            "update key_index set d = 0 where a = 3",
            "delete from key_index where a = 4",
        ),
    ),
    Case(
        "public.key_deferrable",
        (
            "create table key_deferrable (a int primary key deferrable initially deferred,"
            " b int not null unique)",
            "alter table key_deferrable replica identity using index key_deferrable_b_key",
            "insert into key_deferrable values (1, 1), (2, 2)",
        ),
        ("update key_deferrable set a = 3 - a", "update key_deferrable set b = 5 where b = 1"),
    ),
]

OTHERS = [
    Case("public.empty", ("create table empty (id int primary key, v text)",), snapshot_rows=0),
    Case(
        "public.columnless",
        ("create table columnless ()", "insert into columnless select from generate_series(1, 3)"),
        ("insert into columnless default values",),
        options={"insert_only": ("public.columnless",)},
        snapshot_rows=3,
    ),
    Case(
        "public.upserted",
        ("create table upserted (id int primary key, v int)", "insert into upserted values (1, 1), (2, 2)"),
        (
            "insert into upserted select i, 100 from generate_series(2, 5) i"
            " on conflict (id) do update set v = upserted.v + excluded.v",
            "insert into upserted values (1, 7), (6, 7) on conflict do nothing",
            "insert into upserted select id + 10, v from upserted",
        ),
    ),
    Case(
        "public.toasted",
        (
            "create table toasted (id int primary key, n int, t text, j jsonb, a text[], b bytea, x json)",
            "create function noise(n int) returns text language sql volatile as"
            " $$select string_agg(md5(random()::text), '') from generate_series(1, n)$$",
            "insert into toasted select i, i, noise(300), jsonb_build_object('k', noise(300)),"
            " array[noise(150), noise(150)], decode(noise(300), 'hex'), to_json(noise(300))"
            " from generate_series(1, 6) i",
        ),
        (
            "update toasted set n = -n where id in (1, 2)",
            "update toasted set id = 20 where id = 2",
            "update toasted set t = noise(300) where id = 3",
            "update toasted set n = 0 where id = 3",
            "update toasted set t = null, j = '{}' where id = 4; update toasted set n = 1 where id = 4",
        ),
        source="(select id, n, t, j::text, a, b, x::text from toasted) as shown",
    ),
]

CASES = [*NAMES, *GENERATED, *PARTITIONED, *INHERITED, *KEYS, *OTHERS]


@pytest.fixture(scope="module")
def database(server) -> Iterator[str]:
    name = f"t_{uuid.uuid4().hex[:12]}"
    with closing_connection(server.dsn()) as admin:
        admin.cursor().execute(f"create database {name}")
    yield server.dsn(name)
    with closing_connection(server.dsn()) as admin, admin.cursor() as cursor:
        drop_slots(cursor, name)
        cursor.execute(f"drop database {name} with (force)")


@pytest.fixture(scope="module")
def replay(spark, database, tmp_path_factory) -> Replay:
    with closing_connection(database) as connection:
        version = connection.server_version
    cases = cases_for(version, CASES)
    execute(database, 'create schema "My Schema"', 'create schema "Ü.%s"', "create schema other")
    for case in cases:
        execute(database, *case.setup)
    tables = tuple(case.table for case in cases)
    replicated = InProcess(spark, database, tmp_path_factory.mktemp("lake"), tables, **options_of(cases))
    replay = Replay(replicated, cases)
    replay.copy()
    replay.stream()
    return replay


@pytest.mark.parametrize("table", [case.table for case in CASES])
def test_copied_and_streamed_it_equals_the_source(replay, table):
    if table not in replay.cases:
        pytest.skip("this server does not know such tables")
    replay.assert_equal(table)


@pytest.mark.thorough("test_copied_and_streamed_it_equals_the_source, with these columns; test_readers")
def test_spark_reads_columns_of_any_name(replay, spark):
    """Delta without column mapping refuses to write some of these names, but reads them all."""
    frame = spark.read.format("delta").load(replay.replicated.lake_path("public.odd_columns"))
    assert frame.columns[1 : len(ODD) + 1] == list(ODD)
    rows = {row["id"]: row for row in frame.collect()}
    assert all([rows[key][name] for name in ODD] == list(range(len(ODD))) for key in (1, 2, 4))
    every = " and ".join(f"`{name.replace('`', '``')}` = {number}" for number, name in enumerate(ODD))
    assert frame.where(every).count() == 3
