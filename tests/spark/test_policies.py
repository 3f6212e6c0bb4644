"""Effects of changes on lake tables, through the apps: rows without key, marked deletes, TRUNCATE."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.tables import retry_tables
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.conftest import closing_connection
from tests.support.in_process import InProcess
from tests.support.replicated import execute

COPIES = "id, price, tags, doc, f::text"


def lake(replicated: InProcess, table: str, *names: str) -> list[tuple[object, ...]]:
    found = pa.table(replicated.lake_rows(table)).select(list(names))
    return sorted((tuple(row.values()) for row in found.to_pylist()), key=repr)


def copies(replicated: InProcess, dsn: str) -> tuple[Counter[str], Counter[str]]:
    """The lake's rows and the source's, as texts."""
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(f"select {COPIES} from copies")
        source = Counter(repr((*row[:4], row[4] and repr(float(row[4])))) for row in cursor.fetchall())
    rows = lake(replicated, "public.copies", "id", "price", "tags", "doc", "f")
    found = Counter(repr((*row[:4], None if row[4] is None else repr(row[4]))) for row in rows)
    return found, source


@pytest.mark.thorough("property/test_policies")
def test_rows_without_key_are_as_often_in_the_lake_as_in_the_source(spark, dsn, tmp_path):
    execute(
        dsn,
        "create table copies(id int, price numeric(10,2), tags int[], doc text, f float8)",
        "alter table copies replica identity full",
        "alter table copies alter doc set storage external",
        "insert into copies select g % 3, g % 2, array[g % 2, null], repeat('long', 2000), 'NaN'"
        " from generate_series(1, 60) g",
        "insert into copies select null from generate_series(1, 3)",
    )
    replicated = InProcess(spark, dsn, tmp_path, ("public.*",))
    replicated.snapshot()
    execute(
        dsn,
        "update copies set price = 7 where ctid in (select ctid from copies where id = 1 limit 5)",
        "update copies set f = '-0' where ctid in (select ctid from copies where id = 2 limit 5)",
        "update copies set f = '0' where ctid in (select ctid from copies where id = 0 limit 5)",
        "delete from copies where ctid in (select ctid from copies where id is null limit 2)",
    )
    replicated.catch_up()
    assert copies(replicated, dsn)[0] == copies(replicated, dsn)[1]
    execute(
        dsn,
        "delete from copies where ctid in (select ctid from copies where id = 2 and f = 0 limit 3)",
        "update copies set tags = null where ctid in (select ctid from copies where id = 0 limit 9)",
        "insert into copies select * from copies where id = 1",
        "delete from copies where f = 'NaN' and id = 1 and ctid < all (select max(ctid) from copies)",
    )
    replicated.catch_up()
    found, source = copies(replicated, dsn)
    assert found == source
    assert max(source.values()) > 1


@pytest.mark.thorough("property/test_policies, unit/test_merge")
def test_each_tables_policy_decides_what_deletes_and_truncates_do(spark, dsn, tmp_path):
    names = ("emptied", "kept", "marked", "guarded")
    execute(
        dsn,
        *(f"create table {name}(id int primary key, doc text)" for name in names),
        *(f"alter table {name} alter doc set storage external" for name in names),
        *(
            f"insert into {name} select g, repeat(g::text, 9000) from generate_series(1, 4) g"
            for name in names
        ),
    )
    policies = {
        "public.kept": {"truncate": "ignore"},
        "public.marked": {"deletes": "soft"},
        "public.guarded": {"truncate": "error"},
    }
    tables = tuple(f"public.{name}" for name in names)
    replicated = InProcess(spark, dsn, tmp_path, tables, per_table=policies)
    replicated.snapshot()
    for name in names:
        execute(dsn, f"delete from {name} where id = 1", f"update {name} set id = 20 where id = 2")
    execute(dsn, "begin; insert into guarded values (6); truncate emptied, kept, marked, guarded; commit")
    for name in names:
        execute(dsn, f"insert into {name} values (3, 'new')")
    assert replicated.run("replicate", "--until", "caught-up") == process.WILL_NOT_HELP
    long = {number: str(number) * 9000 for number in range(1, 5)}
    assert lake(replicated, "public.emptied", "id", "doc") == [(3, "new")]
    assert lake(replicated, "public.kept", "id", "doc") == [(20, long[2]), (3, "new"), (4, long[4])]
    assert lake(replicated, "public.marked", "id", "doc", "_pgrepl_deleted") == [
        (1, long[1], True),
        (2, long[2], True),
        (20, long[2], True),
        (3, "new", False),
        (4, long[4], True),
    ]
    assert lake(replicated, "public.guarded", "id", "doc") == [(20, long[2]), (3, long[3]), (4, long[4])]
    guarded = replicated.states()["public.guarded"]
    assert guarded.state is TableState.ERRORED
    assert "truncate is set to error" in guarded.reason
    assert guarded.lsn is not None
    policies["public.guarded"] = {"truncate": "ignore"}
    replicated.configure(per_table=policies)
    retry_tables(Access(replicated.pipeline, dsn, dsn), ["public.guarded"])
    replicated.catch_up()
    assert lake(replicated, "public.guarded", "id", "doc") == [
        (20, long[2]),
        (3, "new"),
        (4, long[4]),
        (6, None),
    ]
    replicated.resnapshot("public.guarded")
    assert "replaces the rows that only the lake has (truncate: ignore)" in replicated.log_tail()
    replicated.catch_up()
    replicated.assert_equal("public.guarded", "public.emptied")
