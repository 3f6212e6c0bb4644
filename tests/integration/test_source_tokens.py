"""A copy of the source's files has its identifier, timeline, slot and WAL, but not the last start's token."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import ConfigError, RewoundError, SlotError
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.teardown import _Teardown, teardown
from airflow_provider_pgrepl.replication.app.snapshot import begin_new_epoch
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_token
from airflow_provider_pgrepl.replication.receiving.receiver import Receiver
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.state.source_tokens import (
    forget_tokens,
    has_token,
    renew_token,
    write_token,
)
from airflow_provider_pgrepl.replication.state.store import Store
from demo.postgres import Server
from tests.conftest import closing_connection, fresh_database
from tests.support.kept import TABLES, A, B, Kept, kept_tables
from tests.support.replicated import execute


@pytest.fixture
def kept(dsn: str, tmp_path: Path) -> Kept:
    return kept_tables(dsn, tmp_path, trust_table_owners=True)


@pytest.fixture
def production(server: Server) -> Iterator[Server]:
    """A server of the test's own."""
    instance = Server(server.data.parent / "production", major=18, settings={"fsync": "off"})
    instance.create()
    instance.start()
    yield instance
    instance.stop(immediate=True)
    shutil.rmtree(instance.data)


@pytest.fixture
def volume(server: Server) -> Iterator[Path]:
    """The folder for a copy of its files."""
    folder = server.data.parent / "copy"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def tokens(dsn: str) -> list[int]:
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select token from _pgrepl.source_tokens")
        return [token for (token,) in cursor.fetchall()]


def test_copy_of_the_servers_files_is_not_followed_and_the_server_is(
    production: Server, volume: Path, tmp_path: Path
) -> None:
    kept = Kept(production.dsn(), tmp_path, ("public.*",), name="shop", trust_table_owners=True)
    execute(kept.dsn, *TABLES)
    kept.take(A, B)
    kept.receive()
    production.stop()
    subprocess.run(["cp", "-a", production.data, volume], check=True)
    production.start()
    kept.receive()
    copy = Server(volume, major=18, settings={"fsync": "off"})
    copy.start()
    try:
        execute(copy.dsn(), "insert into a values (1)")
        version = open_changelog(kept.changelog).version()
        with pytest.raises(RewoundError, match=r"is a copy of the source, or was restored.*last followed by"):
            Receiver(copy.dsn(), kept.pipeline).start()
        at_copy = Access(kept.pipeline, copy.dsn(), copy.dsn())
        with pytest.raises(RewoundError, match="is a copy of the source") as caught:
            teardown(at_copy, drop_lake=True)
        assert "--new-epoch" not in caught.value.hint
        with pytest.raises(ConfigError, match=r"would give up.*is a copy of the source"):
            begin_new_epoch(at_copy)
        assert open_changelog(kept.changelog).version() == version
    finally:
        copy.stop(immediate=True)
    execute(kept.dsn, "insert into a values (2)")
    kept.receive()
    assert [row["new"] for row in kept.changelog_rows("I")] == [["2"]]


def test_each_start_leaves_its_token_and_the_last_one_in_the_source(kept: Kept) -> None:
    """A start that ends before its fence leaves the changelog with the token of the start before."""
    kept.receive()
    first = read_token(open_changelog(kept.changelog))
    assert first in tokens(kept.dsn)
    lost = renew_token(kept.dsn, kept.pipeline.slot, lambda: None, first)
    assert set(tokens(kept.dsn)) == {first, lost}
    kept.receive()
    second = read_token(open_changelog(kept.changelog))
    assert set(tokens(kept.dsn)) == {first, second}


def test_lake_without_a_token_gets_one_at_the_next_start(kept: Kept) -> None:
    """So it is for lakes of earlier versions: what is not there contradicts nothing."""
    assert read_token(open_changelog(kept.changelog)) == 0
    kept.receive()
    assert read_token(open_changelog(kept.changelog)) in tokens(kept.dsn)


def test_source_whose_tokens_were_dropped_is_refused(kept: Kept) -> None:
    kept.receive()
    execute(kept.dsn, "drop table _pgrepl.source_tokens")
    with pytest.raises(RewoundError, match="it knows of no start"):
        Receiver(kept.dsn, kept.pipeline).start()


@pytest.mark.parametrize(
    "squat",
    ["revoke create on database {database} from public", "create schema _pgrepl authorization {other}"],
    ids=["no right", "schema of others"],
)
def test_source_that_keeps_no_token_is_followed_and_said(dsn: str, caplog, squat: str) -> None:
    """A role that may create schemas could have been first; it must not keep the pipeline from starting."""
    database, role, other = dsn_name(dsn), f"r_{dsn_name(dsn)}", f"o_{dsn_name(dsn)}"
    execute(dsn, f"create role {role} login", f"create role {other}")
    try:
        execute(dsn, squat.format(database=database, other=other))
        source = connect(f"{dsn.replace('user=postgres', '')} user={role}", "test")
        assert write_token(source, "s", 0) == 0
        source.close()
    finally:
        execute(dsn, "drop schema if exists _pgrepl", f"drop role {role}", f"drop role {other}")
    assert "the source keeps no token" in caplog.text


def test_tokens_of_another_slot_stay(kept: Kept) -> None:
    with kept.source() as source:
        theirs = write_token(source, "theirs", 0)
        ours = write_token(source, kept.pipeline.slot, 0)
        forget_tokens(source, kept.pipeline.slot)
        assert has_token(source, kept.pipeline.slot, ours) is None
        assert has_token(source, "theirs", theirs) is True
        forget_tokens(source, "theirs")
        assert has_token(source, "theirs", theirs) is None
    with Store(kept.dsn, "test") as store:
        assert store.read_pipeline(kept.pipeline.name) is not None


def test_teardown_takes_the_tokens_and_their_schema_along(kept: Kept, elsewhere_state: str) -> None:
    """Also where the state is in another database, and the schema has only tokens."""
    kept.receive()
    away = replace(kept.access, state_dsn=elsewhere_state)
    copy_state(kept, elsewhere_state)
    execute(
        kept.dsn,
        "drop table _pgrepl.tables, _pgrepl.selected_relations, _pgrepl.progress, _pgrepl.locks,"
        " _pgrepl.pipelines, _pgrepl.migrations",
    )
    teardown(away)
    with kept.source() as source, source.cursor() as cursor:
        cursor.execute("select 1 from pg_namespace where nspname = '_pgrepl'")
        assert cursor.fetchone() is None


@pytest.fixture
def elsewhere_state(server: Server) -> Iterator[str]:
    with fresh_database(server) as dsn:
        yield dsn


def copy_state(kept: Kept, dsn: str) -> None:
    """Record the pipeline in another database as it is recorded in the source's."""
    with Store(kept.dsn, "test") as store:
        known = store.read_pipeline(kept.pipeline.name)
    assert known is not None
    with Store(dsn, "test") as store:
        store.migrate()
        store.register(
            kept.pipeline,
            known.system_identifier,
            slot_owned=True,
            publication_owned=True,
            database=known.database,
            database_oid=known.database_oid,
            lake_id=known.lake_id,
        )


def dsn_name(dsn: str) -> str:
    return next(part.removeprefix("dbname=") for part in dsn.split() if part.startswith("dbname="))


def test_start_that_is_refused_leaves_the_token_as_it_was(kept: Kept) -> None:
    """Or a copy of the source, started by mistake, would shut the source out."""
    kept.receive()
    before = (tokens(kept.dsn), read_token(open_changelog(kept.changelog)))
    advance = f"select pg_replication_slot_advance('{kept.pipeline.slot}', pg_current_wal_insert_lsn())"
    execute(kept.dsn, "insert into a values (50)", advance)
    with pytest.raises(SlotError, match="somebody else moved it"):
        kept.receive()
    assert (tokens(kept.dsn), read_token(open_changelog(kept.changelog))) == before


def test_teardown_that_was_interrupted_is_run_again(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.receive()
    with monkeypatch.context() as patched:
        patched.setattr(_Teardown, "_publication", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            teardown(kept.access)
    teardown(kept.access)
    assert has_schema(kept.dsn) is False


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_no_token_is_sent_to_subscribers_of_all_tables(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    execute(kept.dsn, "drop schema _pgrepl cascade", "create publication everything for all tables")
    with kept.source() as source:
        assert write_token(source, kept.pipeline.slot, 0) == 0
    assert has_schema(kept.dsn) is False
    assert "FOR ALL TABLES" in caplog.text


def has_schema(dsn: str) -> bool:
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select exists (select from pg_namespace where nspname = '_pgrepl')")
        return bool(cursor.fetchone()[0])
