"""From a transaction that the server cannot send to a lake that is right again, by the apps and a skip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.losses import skip_transaction
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from demo.postgres import Server
from tests.conftest import fresh_database
from tests.support.encoded_database import NOT_UTF8, encoded_database, insert_bytes
from tests.support.in_process import InProcess
from tests.support.replicated import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T, U = "public.t", "public.u"
LARGE = (
    "insert into t select 2, string_agg(piece, '') from (select decode(repeat('00', 1 << 25), 'hex')"
    " from generate_series(1, 16) union all select '\\x00') pieces (piece)"
)
"""A bytea of 512 MiB and one byte, which takes more than 1 GB as text."""


MENDED = "update t set b = 'mended' where a = 2"


@pytest.fixture(
    params=[
        "encoding",
        pytest.param(
            "size", marks=pytest.mark.thorough("the same test, encoding; integration/test_unsendable.py")
        ),
    ]
)
def poison(server: Server, request: pytest.FixtureRequest) -> Iterator[tuple[str, Callable[[], None]]]:
    """A database with a table t, and what writes a row 2 into it that cannot be sent."""
    if request.param == "encoding":
        with encoded_database(server, "SQL_ASCII") as dsn:
            yield dsn, lambda: insert_bytes(dsn, NOT_UTF8["SQL_ASCII"], 2)
    else:
        with fresh_database(server) as dsn:
            execute(dsn, "create table t(a int primary key, b bytea)")
            execute(dsn, "alter table t alter b set storage external")
            yield dsn, lambda: execute(dsn, LARGE)


@pytest.mark.thorough("integration/test_skip")
def test_after_a_skip_the_others_go_on_and_what_was_touched_is_right_when_it_is_taken_anew(
    spark: SparkSession, poison: tuple[str, Callable[[], None]], tmp_path: Path
) -> None:
    dsn, write = poison
    execute(dsn, "create table u(a int primary key, b text)")
    replicated = InProcess(spark, dsn, tmp_path, (T, U))
    replicated.snapshot()
    execute(dsn, "insert into t values (1, 'before')", "insert into u values (1, 'before')")
    write()
    execute(dsn, MENDED)
    execute(dsn, "insert into t values (3, 'after')", "insert into u values (3, 'after')")

    assert replicated.run("replicate", "--until", "caught-up") == 78
    said = replicated.log_tail()
    assert "UnsendableError" in said
    lsn = LSN.parse(said.rpartition("--lsn ")[2].split()[0])

    skipped = skip_transaction(Access(replicated.pipeline, dsn, dsn), lsn, [U])
    assert [str(table) for table in skipped.touched] == [T]
    assert replicated.run("replicate", "--until", "caught-up") == 78, "t is errored"
    assert {str(name): record.state.value for name, record in replicated.states().items()} == {
        T: "errored",
        U: "streaming",
    }
    replicated.assert_equal(U)

    replicated.snapshot("--tables", T)
    execute(dsn, "insert into t values (4, 'last')", "insert into u values (4, 'last')")
    replicated.catch_up()
    replicated.assert_equal(T, U)
