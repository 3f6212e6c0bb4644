"""The lock against code of a table's owner is lent to statements that wait for it; the copy goes on."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from airflow_provider_pgrepl.errors import PgReplError, SnapshotError, TableError, TableSnapshotError
from airflow_provider_pgrepl.replication.source.copy import snapshot_holder
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange, open_copy
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import (
    SnapshotHolder,
    TableSnapshotHolder,
    keep,
)
from airflow_provider_pgrepl.replication.source.publication import add_tables
from airflow_provider_pgrepl.replication.source.slot_creation import export_snapshot
from tests.integration.test_publication import relation
from tests.support.application import Application, waits
from tests.support.replicated import wait_until

pytestmark = pytest.mark.slow

WHOLE, CUT = 1 << 30, 8192
MANY_ROWS = "insert into t select g, repeat('v', 100) from generate_series(20001, 200000) g"
"""More than what is on the way to a client that does not read."""


@pytest.fixture
def owner(pg, run) -> Iterator[str]:
    """A role that is not trusted, and owns the table t."""
    role = f"owner_{uuid.uuid4().hex[:8]}"
    run(
        f"create role {role}",
        "create table t (id int primary key, v text) with (autovacuum_enabled = false)",
        "insert into t select g, repeat('v', 100) from generate_series(1, 20000) g",
        f"alter table t owner to {role}",
        "create publication p for table t",
    )
    yield role
    run(f"drop owned by {role} cascade", f"drop role {role}")


@contextmanager
def copying(dsn, pg) -> Iterator[tuple[TableSnapshotHolder, CopyRange]]:
    """A table that is cut in ranges, and locked against its owner; and a range that is all of it."""
    with keeping(dsn, pg) as keeper, keeper.hold(keeper.relations[0]) as held:
        (whole,) = held.plan(held.relation, WHOLE)
        assert len(held.plan(held.relation, CUT)) > 1
        yield held, whole


@contextmanager
def keeping(dsn, pg, table="t") -> Iterator[SnapshotHolder]:
    with (
        export_snapshot(dsn, f"s_{uuid.uuid4().hex[:12]}", timeout_s=30) as exported,
        keep(dsn, exported.snapshot, [relation(pg, table)], "p", 60.0) as keeper,
    ):
        exported.close()
        yield keeper


def read(dsn: str, held: TableSnapshotHolder, part: CopyRange) -> int:
    """The number of rows in a range."""
    with open_copy(dsn, held.snapshot, part) as stream:
        return len(stream.read().splitlines())


STATEMENTS = (
    "analyze t",
    "vacuum t",
    "create index on t (v)",
    "create statistics s on id, v from t",
    "alter table t alter v set statistics 10",
)


@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.thorough(
    "the same test, of VACUUM, which waits for the same lock",
    "analyze t",
    "create index on t (v)",
    "create statistics s on id, v from t",
    "alter table t alter v set statistics 10",
)
def test_statement_goes_first_and_the_copy_goes_on(pg, dsn, run, owner, statement):
    run(MANY_ROWS)
    with copying(dsn, pg) as (held, whole):
        assert not held.renew()
        with pytest.raises(PgReplError), open_copy(dsn, held.snapshot, whole) as stream:
            stream.read(10)
            Application(dsn, statement).assert_done()
            while stream.read(1 << 20):
                pass
        with pytest.raises(SnapshotError, match="snapshot is gone"):
            read(dsn, held, whole)
        assert held.renew()
        assert read(dsn, held, whole) == 200_000
        Application(dsn, "analyze t").assert_done()
        assert held.renew()
        held.check()


def test_statement_that_needs_the_whole_table_ends_a_copy_whose_lock_is_lent(pg, dsn, owner):
    with copying(dsn, pg) as (held, _):
        Application(dsn, "analyze t").assert_done()
        Application(dsn, "alter table t add later int").assert_done()
        with pytest.raises(TableSnapshotError, match="given up for ALTER TABLE"):
            held.renew()


def test_code_that_the_owner_adds_while_the_lock_is_lent_is_refused(pg, dsn, run, owner):
    run(
        "create function spy(int) returns int language plpgsql immutable as $$ begin return 1; end $$",
        f"alter function spy owner to {owner}",
    )
    with copying(dsn, pg) as (held, whole):
        Application(dsn, "create index t_spy on t (spy(id))").assert_done()
        with pytest.raises(TableError, match=r"index t_spy calls public\.spy"):
            held.renew()
        with pytest.raises(SnapshotError):
            read(dsn, held, whole)


def test_lock_that_is_needed_again_and_again_ends_the_copy(pg, dsn, owner, monkeypatch):
    monkeypatch.setattr(snapshot_holder, "MOST_LOANS", 1)
    with copying(dsn, pg) as (held, _):
        Application(dsn, "analyze t").assert_done()
        assert held.renew()
        Application(dsn, "analyze t").assert_done()
        with pytest.raises(TableSnapshotError, match="needed its lock 1 times"):
            held.renew()


def test_lock_that_another_session_keeps_is_waited_for_only_so_long(pg, dsn, run, owner, monkeypatch):
    with copying(dsn, pg) as (held, _):
        monkeypatch.setattr(held, "_lock_timeout_s", 0.1)
        run("begin", "lock table t in share update exclusive mode")
        with pytest.raises(TableSnapshotError, match="another session holds the lock that it was lent"):
            held.renew()
        run("rollback")


def test_copies_of_two_pipelines_leave_each_other_alone(pg, dsn, run, owner, caplog):
    """The second does without the lock, and copies the table whole. It goes on when the first lends."""
    run(MANY_ROWS)
    caplog.set_level(logging.INFO)
    with (
        copying(dsn, pg) as (held, whole),
        keeping(dsn, pg) as other,
        other.hold(other.relations[0]) as second,
    ):
        (part,) = second.plan(second.relation, CUT)
        assert not part.is_planned
        assert not held.renew()
        with open_copy(dsn, second.snapshot, part) as stream:
            stream.read(10)
            Application(dsn, "analyze t").assert_done()
            assert held.renew()
            assert len((b"1," + stream.read()).splitlines()) == 200_000
        second.check()
        assert read(dsn, held, whole) == 200_000


def test_table_joins_the_publication_of_another_pipeline_while_it_is_copied(pg, dsn, run, owner):
    run("create table other (id int primary key)", "create publication q for table other")
    with copying(dsn, pg) as (held, _):
        assert add_tables(dsn, "q", [relation(pg, "t")], 20)
        assert held.renew()
        held.check()


def test_copy_that_needs_no_such_lock_lends_none(pg, dsn, owner):
    with keeping(dsn, pg) as keeper, keeper.hold(keeper.relations[0]) as held:
        held.plan(held.relation, WHOLE)
        Application(dsn, "analyze t").assert_done()
        assert not held.renew()
        application = Application(dsn, "truncate t")
        wait_until(lambda: waits(pg, application.pid) or not application.is_alive())
        application.assert_done()
        with pytest.raises(TableSnapshotError):
            held.check()


@pytest.mark.thorough("test_ddl_amid_copy: a statement goes before the copy of its table")
def test_copy_of_a_role_that_acts_as_another_gives_way(pg, dsn, run):
    """Despite ALTER ROLE … SET role, the copies are sessions of the role that logged in."""
    role = f"reader_{uuid.uuid4().hex[:8]}"
    run(
        f"create role {role} login replication",
        f"create role {role}_owner",
        f"grant {role}_owner to {role}",
        f"alter role {role} set role = {role}_owner",
        "create table t (id int primary key, v text) with (autovacuum_enabled = false)",
        "insert into t select g, repeat('v', 100) from generate_series(1, 200000) g",
        f"alter table t owner to {role}_owner",
        "create publication p for table t",
    )
    try:
        reader = dsn.replace("user=postgres", f"user={role}")
        with copying(reader, pg) as (held, whole):
            with pytest.raises(PgReplError), open_copy(reader, held.snapshot, whole) as stream:
                stream.read(10)
                Application(dsn, "alter table t add later int").assert_done()
                while stream.read(1 << 20):
                    pass
            with pytest.raises(TableSnapshotError, match="given up for"):
                held.check()
    finally:
        run(f"drop owned by {role}_owner cascade", f"drop role {role}", f"drop role {role}_owner")
