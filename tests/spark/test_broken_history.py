"""A source and a changelog that no longer continue each other: exit code 78 until a new epoch begins."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from demo.postgres import Server
from tests.conftest import closing_connection
from tests.support.in_process import InProcess
from tests.support.replicated import execute

SETUP = ("create table t(id int primary key, v text)", "insert into t values (1, 'a')")


def assert_refused_until_a_new_epoch(
    replicated: InProcess,
    says: str,
    *,
    gives_up: bool = False,
    cure: str = "",
    option: str = "--new-epoch",
) -> None:
    """Check that runs are rejected and leave the lake as it is, and that a new epoch takes everything.

    A new epoch begins only when asked for. If the source is not proven to be the lake's (`gives_up`), the
    caller must name what is given up. `cure`: a statement that has to be run at the source first. `option`:
    the one that begins the epoch.
    """
    before = sorted(replicated.lake_rows("public.t")["id"].to_pylist())
    for _ in range(2):
        assert replicated.run("replicate", "--until", "caught-up") == 78
    assert says in replicated.log_tail()
    assert ("--new-epoch" in replicated.log_tail()) != gives_up
    assert sorted(replicated.lake_rows("public.t")["id"].to_pylist()) == before
    if cure:
        assert replicated.run("snapshot", option) == 78
        assert "exists and was not made by" in replicated.log_tail()
        execute(replicated.dsn, cure)
    if gives_up:
        record = read_epoch(replicated.changelog)
        assert replicated.run("snapshot", option) == 78
        name = f"{record.system_identifier}/{record.database}"
        assert f"--give-up {name}" in replicated.log_tail()
        replicated.snapshot(option, "--give-up", name)
    else:
        replicated.snapshot(option)
    replicated.assert_equal("public.t")
    execute(replicated.dsn, "insert into t values (1000, 'after')", "delete from t where id = 1")
    replicated.catch_up()
    replicated.assert_equal("public.t")


@pytest.mark.parametrize(
    ("breakage", "says", "cure"),
    [
        ("select pg_drop_replication_slot('{slot}')", "there is no replication slot", ""),
        pytest.param(
            "select pg_replication_slot_advance('{slot}', pg_current_wal_insert_lsn())",
            "another program advanced",
            "",
            marks=pytest.mark.thorough("integration/test_continuity"),
        ),
        # It is not the pipeline's any more, which drops none but its own.
        pytest.param(
            "drop publication {slot}; create publication {slot} for table t",
            "created again",
            "drop publication {slot}",
            marks=pytest.mark.thorough("integration/test_receiver: a broken history is said when it starts"),
        ),
    ],
)
def test_a_slot_or_publication_that_is_not_what_it_was(spark, dsn, tmp_path, breakage, says, cure):
    execute(dsn, *SETUP)
    replicated = InProcess(spark, dsn, tmp_path, ("public.t",))
    replicated.snapshot()
    replicated.catch_up()
    execute(dsn, "insert into t values (2, 'b')", *breakage.format(slot=replicated.pipeline.slot).split("; "))
    cure = cure.format(slot=replicated.pipeline.slot)
    # A copy of the source has no slot either, or another one.
    assert_refused_until_a_new_epoch(replicated, says, cure=cure, gives_up=not cure)


@pytest.fixture(scope="module")
def own_data(server: Server) -> Iterator[Path]:
    """Data of a server that has ended, with a database `t_own`; PostgreSQL's user may enter the folder."""
    folder = server.data.parent / "own-data"
    instance = Server(folder, major=18, settings={"fsync": "off"})
    instance.create()
    instance.start()
    with closing_connection(instance.dsn()) as admin:
        admin.cursor().execute("create database t_own")
    instance.stop()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def own_server(own_data: Path) -> Iterator[Server]:
    """A server of the test's own."""
    folder = own_data.with_name("own")
    copy(own_data, folder)
    instance = Server(folder, major=18, settings={"fsync": "off"})
    instance.start()
    yield instance
    instance.stop(immediate=True)
    shutil.rmtree(folder)


def copy(data: Path, place: Path) -> None:
    """With owners and rights."""
    subprocess.run(["cp", "-a", data, place], check=True)


@pytest.mark.parametrize(
    "catches_up",
    [
        pytest.param(False, id="behind", marks=pytest.mark.thorough("the same test, past what was received")),
        pytest.param(True, id="past what was received"),
    ],
)
@pytest.mark.thorough("integration/test_server_crash: a missing transaction means a rewound source")
def test_a_source_that_was_restored_to_an_earlier_state(spark, own_server, tmp_path, catches_up):
    dsn, backup = own_server.dsn("t_own"), own_server.data.parent / "backup"
    execute(dsn, *SETUP)
    replicated = InProcess(spark, dsn, tmp_path, ("public.t",))
    replicated.snapshot()
    replicated.catch_up()
    own_server.stop()
    copy(own_server.data, backup)
    own_server.start()
    execute(dsn, "insert into t select g, 'lost' from generate_series(10, 500) g")
    replicated.catch_up()
    own_server.stop()
    shutil.rmtree(own_server.data)
    backup.rename(own_server.data)
    own_server.start()
    if catches_up:
        for first in range(2, 900, 100):
            execute(dsn, f"insert into t select g, 'other' from generate_series({first}, {first} + 99) g")
    # Rows that the source no longer has leave the lake.
    option = "--resync" if catches_up else "--new-epoch"
    says = "restored to an earlier state"
    assert_refused_until_a_new_epoch(replicated, says, gives_up=True, option=option)
    assert ("rows of the source at" in replicated.log.read_text()) == catches_up


@pytest.mark.thorough("integration/test_wrong_place: commands at another server")
def test_another_server_under_the_same_address(spark, dsn, own_server, tmp_path):
    other = own_server.dsn("t_own")
    for place in (dsn, other):
        execute(place, *SETUP)
    replicated = InProcess(spark, dsn, tmp_path, ("public.t",), name="p_moved")
    replicated.snapshot()
    replicated.catch_up()
    replicated.dsn = other
    execute(other, f"select pg_create_logical_replication_slot('{replicated.pipeline.slot}', 'pgoutput')")
    assert replicated.run("replicate", "--until", "caught-up") == 78
    assert "another server" in replicated.log_tail()
    execute(other, f"select pg_drop_replication_slot('{replicated.pipeline.slot}')")
    assert_refused_until_a_new_epoch(replicated, "another server", gives_up=True, option="--resync")
