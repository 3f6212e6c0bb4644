"""A publication that another program owns: copy and stream hold back the same rows and columns."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from tests.conftest import closing_connection
from tests.support.in_process import InProcess
from tests.support.replicated import execute
from tests.support.table_cases import Case, Replay, cases_for, options_of

CASES = [
    # Rows that a change moves into the filter are inserts to us, those moved out deletes.
    Case(
        "public.filtered",
        (
            "create table filtered (id int primary key, v int, t text)",
            "alter table filtered replica identity full",
            "insert into filtered select i, i, repeat(md5(i::text), 300) from generate_series(1, 20) i",
        ),
        (
            "update filtered set v = -v where id in (15, 16)",
            "update filtered set v = 50 where id in (1, 2)",
            "update filtered set v = v + 1 where id between 8 and 12",
            "delete from filtered where id in (3, 17)",
            "insert into filtered values (21, 5), (22, 50), (23, null)",
        ),
        source="(select * from filtered where v > 10) as shown",
    ),
    Case(
        "public.filtered_by_key",
        (
            "create table filtered_by_key (id int primary key, v int)",
            "insert into filtered_by_key select i, i from generate_series(1, 20) i",
        ),
        (
            "update filtered_by_key set id = id + 100 where id = 3",
            "update filtered_by_key set id = -id where id = 15",
            "update filtered_by_key set v = 0",
        ),
        source="(select * from filtered_by_key where id % 2 = 1 and id > 0) as shown",
    ),
    Case(
        "public.listed",
        (
            "create table listed (a int primary key, gone int, secret text, d date, e int, f text)",
            "alter table listed drop column gone",
            "insert into listed select i, 'sesame', '2024-01-01', i, 'f' from generate_series(1, 5) i",
        ),
        ("update listed set secret = 'sesame too', f = 'g' where a < 3", "delete from listed where a = 5"),
        source="(select a, d::text, f from listed) as shown",
        options={"text_columns": ("public.listed.d",), "exclude_columns": ("public.listed.e",)},
    ),
    Case(
        "public.leaves",
        (
            "create table leaves (id int, secret text, v int, primary key (id)) partition by range (id)",
            "create table leaves_1 (secret text, v int, id int not null primary key)",
            "alter table leaves attach partition leaves_1 for values from (0) to (10)",
            "create table leaves_2 partition of leaves for values from (10) to (20)",
            "insert into leaves select i, 'sesame', i from generate_series(1, 19) i",
        ),
        (
            "update leaves set v = -v where id in (4, 14)",
            "update leaves set id = 0 where id = 12",
            "update leaves set id = 12 where id = 8",
            "delete from leaves where id in (6, 16)",
        ),
        source="(select id, v from leaves where id % 2 = 0) as shown",
    ),
    Case(
        "public.unpublished",
        (
            "create table unpublished (id int primary key, g int generated always as (v * 2) stored, v int)",
            "insert into unpublished values (1, default, 1), (2, default, 2)",
        ),
        ("update unpublished set v = 5 where id = 1", "insert into unpublished values (3, default, 3)"),
        source="(select id, null::int as g, v from unpublished) as shown",
    ),
    Case(
        "public.listed_generated",
        (
            "create table listed_generated (id int primary key, g int generated always as (v * 2) stored,"
            " v int, h int generated always as (v * 3) stored)",
            "insert into listed_generated (id, v) values (1, 1), (2, 2)",
        ),
        ("update listed_generated set v = 5 where id = 1",),
        source="(select id, g from listed_generated) as shown",
        least=180000,
    ),
]

PUBLISHED = (
    "filtered where (v > 10)",
    "filtered_by_key where (id % 2 = 1 and id > 0)",
    "listed (a, d, e, f)",
    # The leaf's own filter and list count only where partitions are published under their own names.
    "leaves (id, v) where (id % 2 = 0), leaves_2 (id, secret) where (id = 999)",
    "unpublished",
)


def test_row_filters_column_lists_and_unpublished_columns_are_honoured_by_copy_and_stream(
    spark, dsn, tmp_path
):
    with closing_connection(dsn) as connection:
        version = connection.server_version
    cases = cases_for(version, CASES)
    for case in cases:
        execute(dsn, *case.setup)
    published = [*PUBLISHED, *(["listed_generated (id, g)"] if version >= 180000 else [])]
    execute(
        dsn,
        f"create publication theirs for table {', '.join(published)} with (publish_via_partition_root)",
        "alter publication theirs owner to current_user",
    )
    replicated = InProcess(
        spark,
        dsn,
        tmp_path,
        tuple(case.table for case in cases),
        publication="theirs",
        publication_mode="use",
        **options_of(cases),
    )
    replay = Replay(replicated, cases)
    replay.copy()
    said = "public.unpublished: generated column g is null in the lake"
    assert said in replicated.log_tail()
    replay.stream()
    for case in cases:
        replay.assert_equal(case.table)
    assert "secret" not in replicated.lake_rows("public.listed").column_names


@pytest.mark.thorough("integration/test_publication_moved")
def test_a_publication_that_left_deletes_out_for_a_while_is_not_caught_up_with(dsn, spark, tmp_path):
    execute(
        dsn,
        "create table t(id int primary key)",
        "create table u(id int primary key)",
        "insert into t select generate_series(1, 20)",
    )
    replicated = InProcess(spark, dsn, tmp_path, ("public.t", "public.u"))
    replicated.snapshot()
    replicated.catch_up()
    publication = replicated.pipeline.publication
    execute(
        dsn,
        f"alter publication {publication} set (publish = 'insert, update')",
        "delete from t",
        f"alter publication {publication} set (publish = 'insert, update, delete, truncate')",
    )
    assert replicated.run("replicate", "--until", "caught-up") == process.WILL_NOT_HELP
    states = replicated.states()
    assert {str(record.state) for record in states.values()} == {"errored"}
    replicated.resnapshot("public.t,public.u")
    execute(dsn, "insert into t values (1)")
    replicated.catch_up()
    replicated.assert_equal("public.t", "public.u")
    # Adding and removing another table is no reason to stop.
    execute(dsn, "create table v(id int primary key)")
    assert replicated.run("snapshot", "--add", "public.v") == 0
    execute(dsn, "insert into v values (1)", "insert into t values (2)")
    replicated.catch_up()
    remove_tables(Access(replicated.pipeline, dsn, dsn), ["public.v"])
    execute(dsn, "insert into t values (3)")
    replicated.catch_up()
    replicated.assert_equal("public.t", "public.u")
