"""The replication stream: what one reading of it takes."""

from __future__ import annotations

import contextlib
import time

import pytest

from airflow_provider_pgrepl.replication.source.stream import ReplicationStream
from tests.conftest import closing_connection
from tests.support.received import Received
from tests.support.replicated import execute, wait_until

pytestmark = pytest.mark.differs_by_major

TRANSACTIONS = 300
"""Of three messages each; before the first the table's relation."""


def test_one_reading_takes_all_that_has_arrived(dsn, tmp_path):
    """The server says after nearly each small transaction how far it is. Ended by each of these, readings
    would come one by one, each with a pause after it, and the stream would fall behind without end."""
    execute(dsn, "create table t(id int primary key)")
    received = Received(dsn, tmp_path, ("public.t",))
    received.begin()
    stream = ReplicationStream(dsn, received.pipeline.slot, received.pipeline.publication)
    with contextlib.closing(stream), closing_connection(dsn) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            for number in range(TRANSACTIONS):
                cursor.execute("insert into t values (%s)", (number,))
                time.sleep(0.002)
        readings: list[int] = []

        def have_come() -> bool:
            readings.append(len(stream.read(0.5, 1 << 20).messages))
            return sum(readings) > 3 * TRANSACTIONS

        wait_until(have_come, 60, "the last transaction")
    assert len([size for size in readings if size]) <= 5
