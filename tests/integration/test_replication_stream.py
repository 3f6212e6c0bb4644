"""The replication stream: what one reading of it takes."""

from __future__ import annotations

import contextlib

from airflow_provider_pgrepl.replication.source.stream import ReplicationStream
from tests.conftest import closing_connection
from tests.support.received import Received
from tests.support.replicated import execute, let_senders_wait, wait_until

TRANSACTIONS = 300
"""Of three messages each; before the first the table's relation."""


def test_one_reading_takes_all_that_has_arrived(dsn, tmp_path):
    """The server says after nearly each small transaction how far it is. Ended by each of these, readings
    would come one by one, each with a pause after it, and the stream would fall behind without end."""
    execute(dsn, "create table t(id int primary key)")
    received = Received(dsn, tmp_path, ("public.t",))
    received.begin()
    # Nothing is answered until all is sent, which can take longer than a minute.
    let_senders_wait(dsn)
    stream = ReplicationStream(dsn, received.pipeline.slot, received.pipeline.publication)
    with contextlib.closing(stream), closing_connection(dsn) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:

            def is_sent() -> bool:
                cursor.execute(
                    "select sent_lsn >= pg_current_wal_lsn() from pg_stat_replication"
                    " join pg_replication_slots on pid = active_pid where slot_name = %s",
                    (received.pipeline.slot,),
                )
                return cursor.fetchone() == (True,)

            for number in range(TRANSACTIONS):
                cursor.execute("insert into t values (%s)", (number,))
                wait_until(is_sent, what="the transaction to be sent")
        readings: list[int] = []

        def have_come() -> bool:
            readings.append(len(stream.read(0.5, 1 << 20).messages))
            return sum(readings) > 3 * TRANSACTIONS

        wait_until(have_come, what="the last transaction")
    assert len([size for size in readings if size]) <= 5
