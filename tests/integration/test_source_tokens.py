"""A copy of the source's files has its identifier, timeline, slot and WAL, but not the last start's token."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import (
    BusyError,
    ConfigError,
    PgReplError,
    PrivilegeError,
    RewoundError,
    SlotError,
    StateError,
)
from airflow_provider_pgrepl.replication.app import ownership
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.losses import accept_source
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from airflow_provider_pgrepl.replication.app.operations.teardown import _Teardown, teardown
from airflow_provider_pgrepl.replication.app.snapshot import begin_new_epoch, take_tables
from airflow_provider_pgrepl.replication.app.snapshot_tables import TableSnapshotter
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_token
from airflow_provider_pgrepl.replication.lake.snapshot.table_queue import CopyResult
from airflow_provider_pgrepl.replication.receiver.changelog_feed import KeepaliveRule
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.source_tokens import (
    forget_tokens,
    has_token,
    renew_token,
    write_token,
)
from demo.postgres import Server
from tests.conftest import closing_connection, fresh_database
from tests.support.kept import TABLES, A, B, Kept, kept_tables
from tests.support.replicated import execute, wait_until

pytestmark = pytest.mark.slow


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


@pytest.mark.thorough("test_source_whose_tokens_were_dropped_is_refused_until_it_is_accepted_by_name")
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
        with pytest.raises(ConfigError, match=r"would abandon.*is a copy of the source"):
            begin_new_epoch(at_copy)
        assert open_changelog(kept.changelog).version() == version
        execute(kept.dsn, "insert into a select generate_series(2, 20000)")
        kept.receive()
        assert len(kept.changelog_rows("I")) == 19_999
        # As a copy has it that was made since this start.
        token = read_token(open_changelog(kept.changelog))
        slot = kept.pipeline.slot
        execute(copy.dsn(), f"insert into _pgrepl.source_tokens values ('{slot}', {token}, 'shop:1')")
        before = open_changelog(kept.changelog).version()
        for act in (
            lambda: teardown(at_copy, drop_lake=True),
            lambda: teardown(at_copy),
            lambda: begin_new_epoch(at_copy),
            lambda: take_tables(at_copy),
        ):
            with pytest.raises(PgReplError, match=r"WAL position of the source .* is before"):
                act()
        assert open_changelog(kept.changelog).version() == before
    finally:
        copy.stop(immediate=True)


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


def test_receiver_that_runs_renews_the_token_and_deletes_only_its_own(kept: Kept) -> None:
    """One that was paused may not know that another has taken over, and has written a token."""

    def wait_for_new(before: int) -> int:
        wait_until(lambda: read_token(open_changelog(kept.changelog)) != before, what="a new token")
        return read_token(open_changelog(kept.changelog))

    with kept.receiving(KeepaliveRule(renew_s=0.5)) as receiver:
        seen = [read_token(open_changelog(kept.changelog))]
        successor = f"insert into _pgrepl.source_tokens values ('{kept.pipeline.slot}', 7, 'successor:1')"
        execute(kept.dsn, successor)
        for _ in range(4):
            seen.append(wait_for_new(seen[-1]))
        durable = receiver.progress.durable_lsn
    assert {7, read_token(open_changelog(kept.changelog))} <= set(tokens(kept.dsn))
    assert not {seen[0], seen[1]} & set(tokens(kept.dsn))
    assert kept.durable_lsn >= durable
    kept.receive()


def test_tokens_that_go_while_a_receiver_runs_do_not_end_it(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    with kept.receiving(KeepaliveRule(renew_s=0.1)) as receiver:
        execute(kept.dsn, "drop table _pgrepl.source_tokens", "insert into a values (70)")
        before = open_changelog(kept.changelog).version()
        wait_until(lambda: open_changelog(kept.changelog).version() > before + 5)
        assert not receiver.failed.is_set()
    assert caplog.text.count("no longer has the token") == 1
    assert len(kept.changelog_rows("I")) == 1


@pytest.mark.thorough("unit/test_foreign_receiver")
def test_lake_into_which_an_unknown_application_receives_is_neither_dropped_nor_replaced(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the source that was made since its last token has all evidence."""
    monkeypatch.setattr(ownership, "_POLL_S", 0.1)
    with kept.receiving(KeepaliveRule(renew_s=0.5)):
        for act in (
            lambda: teardown(kept.access, drop_lake=True),
            lambda: teardown(kept.access),
            lambda: remove_tables(kept.access, [A], drop_lake_tables=True),
            lambda: begin_new_epoch(kept.access),
        ):
            with pytest.raises(RewoundError, match="receives changes into the lake"):
                act()
    assert kept.states() == {A: "streaming", B: "streaming"}
    with kept.access.state_db("replicate") as app, kept.access.state_db("remove") as state_db:
        app.lock(kept.pipeline.name, "replicate")
        with kept.receiving(KeepaliveRule(renew_s=0.5)):
            ownership.check_no_foreign_receiver(state_db, kept.pipeline)
    teardown(kept.access, drop_lake=True)


def test_lake_without_a_token_gets_one_at_the_next_start(kept: Kept) -> None:
    """Lakes of earlier versions have none: a missing token contradicts nothing."""
    assert read_token(open_changelog(kept.changelog)) == 0
    kept.receive()
    assert read_token(open_changelog(kept.changelog)) in tokens(kept.dsn)


def test_source_whose_tokens_were_dropped_is_refused_until_it_is_accepted_by_name(kept: Kept) -> None:
    """Its changes continue without a new copy."""
    kept.receive()
    with kept.source() as source:
        server = read_server(source)
    name = f"{server.system_identifier}/{server.database}"
    assert accept_source(kept.access, name) is False
    execute(kept.dsn, "drop table _pgrepl.source_tokens", "insert into a values (60)")
    with pytest.raises(RewoundError, match="it knows of no start"):
        Receiver(kept.dsn, kept.pipeline).start()
    with kept.access.state_db("test") as state_db:
        state_db.lock(kept.pipeline.name, "replicate")
        with pytest.raises(BusyError):
            accept_source(kept.access, name)
    assert accept_source(kept.access, name) is True
    assert read_token(open_changelog(kept.changelog)) in tokens(kept.dsn)
    kept.receive()
    assert [row["new"] for row in kept.changelog_rows("I")] == [["60"]]


@pytest.mark.parametrize(
    ("squat", "remedy"),
    [
        (
            "revoke create on database {database} from public",
            "GRANT CREATE ON DATABASE {database} TO {role}",
        ),
        ("create schema _pgrepl authorization {other}", "ALTER SCHEMA _pgrepl OWNER TO {role}"),
    ],
    ids=["no right", "schema of others"],
)
def test_source_that_keeps_no_token_is_followed_and_said(dsn: str, caplog, squat: str, remedy: str) -> None:
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
    assert "the source keeps no new token" in caplog.text
    assert remedy.format(database=database, role=role) in caplog.text


@pytest.mark.parametrize("owner", ["superuser", "other role"])
@pytest.mark.thorough("the same test, of another role", "superuser")
def test_tokens_of_another_role_name_it_and_the_statement_that_gives_them(
    kept: Kept, dsn: str, owner: str
) -> None:
    """A restore by an administrator leaves such tokens. A role that may not read them cannot recognize a
    copy.
    """
    role, other = f"r_{dsn_name(dsn)}", f"o_{dsn_name(dsn)}"
    kept.receive()
    token = read_token(open_changelog(kept.changelog))
    execute(dsn, f"create role {role} login", f"create role {other}")
    reader = connect(f"{dsn.replace('user=postgres', '')} user={role}", "test")
    try:
        execute(dsn, f"grant create on database {dsn_name(dsn)} to {role}")
        if owner != "superuser":
            execute(dsn, f"grant {other} to {role}", f"alter schema _pgrepl owner to {role}")
            execute(dsn, f"revoke {other} from {role}", f"alter table _pgrepl.source_tokens owner to {other}")
        with pytest.raises((PrivilegeError, StateError)) as caught:
            has_token(reader, kept.pipeline.slot, token)
        assert (other if owner != "superuser" else "postgres") in caught.value.message
        with pytest.raises((PrivilegeError, StateError)) as at_teardown:
            forget_tokens(reader, kept.pipeline.slot, token)
        assert f"OWNER TO {role}" in at_teardown.value.hint
        statements = re.findall(r"(?:ALTER|GRANT) .+?(?=[;,]|\. |$)", caught.value.hint)
        assert statements
        execute(dsn, *statements)
        assert has_token(reader, kept.pipeline.slot, token) is True
        assert write_token(reader, kept.pipeline.slot, token)
    finally:
        reader.close()
        execute(dsn, f"drop owned by {role}, {other} cascade", f"drop role {role}", f"drop role {other}")


def test_tokens_of_another_slot_stay(kept: Kept) -> None:
    with kept.source() as source:
        theirs = write_token(source, "theirs", 0)
        ours = write_token(source, kept.pipeline.slot, 0)
        forget_tokens(source, kept.pipeline.slot, theirs)
        assert has_token(source, kept.pipeline.slot, ours) is True
        forget_tokens(source, kept.pipeline.slot, ours)
        assert has_token(source, kept.pipeline.slot, ours) is None
        assert has_token(source, "theirs", theirs) is True
        forget_tokens(source, "theirs", 0)
        assert has_token(source, "theirs", theirs) is None
    with StateDatabase(kept.dsn, "test") as state_db:
        assert state_db.read_pipeline(kept.pipeline.name) is not None


def test_new_epoch_keeps_the_tokens_of_another_pipeline_that_has_the_former_slot(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.receive()
    with kept.source() as source, kept.access.state_db("test") as state_db:
        server, former = read_server(source), kept.pipeline.slot
        state_db.record_slot(kept.pipeline.name, is_owned=False)
        execute(
            kept.dsn,
            f"select pg_drop_replication_slot('{former}')",
            f"select pg_create_logical_replication_slot('{former}', 'pgoutput')",
        )
        theirs = write_token(source, former, 0)
        monkeypatch.setattr(TableSnapshotter, "_copy_rows", lambda *_, **__: CopyResult())
        name = f"{server.system_identifier}/{server.database}"
        moved = replace(kept.pipeline, slot=f"{former}_moved")
        begin_new_epoch(replace(kept.access, pipeline=moved), [name])
        assert has_token(source, former, theirs) is True
        ours = read_token(open_changelog(kept.changelog))
        assert has_token(source, moved.slot, ours) is True


def test_teardown_takes_the_tokens_and_their_schema_along(kept: Kept, elsewhere_state: str) -> None:
    """Also where the state is in another database, and the schema has only tokens."""
    kept.receive()
    away = replace(kept.access, state_dsn=elsewhere_state)
    copy_state(kept, elsewhere_state)
    execute(
        kept.dsn,
        "drop table _pgrepl.events, _pgrepl.samples, _pgrepl.table_samples, _pgrepl.tables,"
        " _pgrepl.selected_relations, _pgrepl.progress, _pgrepl.locks, _pgrepl.publishers,"
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
    with StateDatabase(kept.dsn, "test") as state_db:
        known = state_db.read_pipeline(kept.pipeline.name)
    assert known is not None
    with StateDatabase(dsn, "test") as state_db:
        state_db.migrate()
        state_db.register(
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
    """Otherwise a copy of the source, started by mistake, would lock the source out."""
    kept.receive()
    before = (tokens(kept.dsn), read_token(open_changelog(kept.changelog)))
    advance = f"select pg_replication_slot_advance('{kept.pipeline.slot}', pg_current_wal_insert_lsn())"
    execute(kept.dsn, "insert into a values (50)", advance)
    with pytest.raises(SlotError, match="another program advanced"):
        kept.receive()
    assert (tokens(kept.dsn), read_token(open_changelog(kept.changelog))) == before


@pytest.mark.thorough("test_teardown: one that ended at any step can be repeated")
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
