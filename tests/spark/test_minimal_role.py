"""The apps run as the role of the connection page: no superuser, on tables that are another role's."""

from __future__ import annotations

import uuid

import pytest

from tests.support.in_process import InProcess
from tests.support.replicated import execute


@pytest.fixture
def roles(dsn):
    mark = uuid.uuid4().hex[:10]
    owner, replicator = f"owner_{mark}", f"replicator_{mark}"
    database = dsn.split("dbname=")[1].split()[0]
    execute(
        dsn,
        f"create role {owner} login",
        f"create role {replicator} login replication in role {owner}",
        f"alter database {database} owner to {owner}",
        f"grant create on database {database} to {replicator}",
        f"set role {owner}; create table t (id int primary key, v text);"
        " create table part (id int primary key, v text) partition by range (id);"
        " create table p0 partition of part for values from (0) to (1000);"
        " insert into t select g, repeat('x', 100) from generate_series(1, 5000) g;"
        " insert into part select g, 'p' from generate_series(1, 500) g",
    )
    yield owner, replicator
    execute(dsn, f"alter database {database} owner to postgres")
    execute(dsn, f"drop owned by {replicator}, {owner} cascade", f"drop role {replicator}, {owner}")


def test_snapshot_stream_and_an_attached_partition_need_no_more(spark, dsn, tmp_path, roles):
    owner, replicator = roles
    of_role = dsn.replace("user=postgres", f"user={replicator}")
    one = InProcess(
        spark,
        of_role,
        tmp_path,
        ("public.t", "public.part"),
        trust_table_owners=False,
        snapshot_range_bytes=100_000,
    )
    one.snapshot()
    execute(
        dsn,
        f"set role {owner}; insert into t values (6000, 'later'); delete from t where id <= 10;"
        " update part set v = 'q' where id = 5",
        f"set role {owner}; create table p1 (like part including all);"
        " alter table part attach partition p1 for values from (1000) to (2000)",
        f"set role {owner}; insert into part values (1500, 'attached')",
    )
    one.catch_up()
    assert {name: str(record.state.value) for name, record in one.states().items()} == {
        "public.t": "streaming",
        "public.part": "streaming",
    }, one.log_tail()
    one.assert_equal("public.t", "public.part")
    assert "is copied by one task" not in one.log_tail()
