"""Walsenders are replaced where they may miss a change of the publication, and left alone elsewhere."""

import contextlib

import psycopg2
import psycopg2.extras
import pytest

from airflow_provider_pgrepl.replication.source import slot as walsender
from airflow_provider_pgrepl.replication.source.publication import add_tables, create_publication
from airflow_provider_pgrepl.replication.source.slot import drop_slot, read_slot
from airflow_provider_pgrepl.replication.source.slot_creation import create_slot
from tests.conftest import closing_connection
from tests.integration.test_publication import relation
from tests.support.replicated import wait_until


@pytest.fixture
def slot(pg, dsn):
    name = f"s_{pg.info.dbname}"
    create_slot(dsn, name, timeout_s=30).close()
    yield name
    wait_until(lambda: not read_slot(pg, name).active, what="the slot to be free")
    drop_slot(pg, name)


@contextlib.contextmanager
def reading(pg, dsn, slot, publication):
    """A session that reads the slot until the block ends."""
    reader = psycopg2.connect(dsn, connection_factory=psycopg2.extras.LogicalReplicationConnection)
    reader.cursor().start_replication(
        slot, options={"proto_version": "1", "publication_names": publication}, decode=False
    )
    wait_until(lambda: read_slot(pg, slot).active, what="the slot to be read")
    try:
        yield reader
    finally:
        reader.close()


def test_the_walsender_of_an_affected_release_is_ended(pg, dsn, slot, monkeypatch):
    pg.cursor().execute("create table t (a int primary key)")
    create_publication(pg, "p", [relation(pg, "t")])
    assert not walsender.renew_walsender(pg, slot)
    with reading(pg, dsn, slot, "p"):
        assert not walsender.renew_walsender(pg, slot)
        monkeypatch.setattr(walsender, "_INVALIDATES_SINCE", {pg.server_version // 10000: 999999})
        pid = read_slot(pg, slot).active_pid
        assert walsender.renew_walsender(pg, slot)
        wait_until(lambda: read_slot(pg, slot).active_pid != pid, what="the walsender to be gone")
    assert not walsender.renew_walsender(pg, "no_such_slot")


@pytest.mark.differs_by_major(
    "before 15 empty transactions are sent; a catalog change reaches open transactions in another way since"
    " 14.18, 15.13, 16.9 and 17.5"
)
def test_a_transaction_that_was_open_when_a_table_joined_sends_what_it_writes_to_it_then(pg, dsn, slot):
    pg.cursor().execute("create table t (a int primary key); create table u (a int primary key)")
    create_publication(pg, "p", [relation(pg, "t")])
    with closing_connection(dsn) as writer:
        writer.cursor().execute("insert into u values (0)")
        writer.cursor().execute("begin; insert into t values (1)")
        assert add_tables(dsn, "p", [relation(pg, "u")], 10)
        writer.cursor().execute("insert into u values (1); commit; insert into u values (2)")
    with pg.cursor() as cursor:
        cursor.execute(
            "select get_byte(data, 0) from pg_logical_slot_get_binary_changes(%s, null, null,"
            " 'proto_version', '1', 'publication_names', 'p')",
            (slot,),
        )
        kinds = "".join(chr(kind) for (kind,) in cursor.fetchall())
    # A row of each table in the one transaction, and a row in the other. Relations may be sent again; before
    # version 15 so are transactions that are empty.
    assert kinds.replace("R", "").replace("BC", "") == "BIICBIC"
