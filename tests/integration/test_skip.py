"""Skipping a transaction that the server cannot send: that one only, recorded first, and never unsaid."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg2
import pytest

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.errors import (
    BusyError,
    ChangelogError,
    ConfigError,
    GapError,
    LakeError,
    LakeUnavailableError,
    SlotError,
)
from airflow_provider_pgrepl.replication.app.operations import losses
from airflow_provider_pgrepl.replication.app.operations.losses import skip_transaction
from airflow_provider_pgrepl.replication.app.operations.tables import pause_tables, retry_tables
from airflow_provider_pgrepl.replication.changelog.maintenance import drop_expired
from airflow_provider_pgrepl.replication.changelog.messages import SkippedMessagesWarning, read_messages
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import arrow_as_of
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.receiver import receiver
from airflow_provider_pgrepl.replication.storage import durable
from demo.postgres import Server
from tests.conftest import closing_connection
from tests.support.encoded_database import NOT_UTF8, encoded_database, insert_bytes
from tests.support.kept import Kept
from tests.support.replicated import execute

pytestmark = pytest.mark.slow

T, U = "public.t", "public.u"


@pytest.fixture(params=["SQL_ASCII"])
def kept(server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Kept]:
    """Tables t and u, streaming."""
    with encoded_database(server, request.param) as dsn:
        execute(dsn, "create table u(a int primary key, b text)")
        found = Kept(dsn, tmp_path, (T, U))
        found.take(T, U)
        yield found


def poison(kept: Kept, key: int = 2) -> None:
    """A transaction of table t that cannot be sent."""
    with closing_connection(kept.dsn) as connection:
        encoding = connection.info.parameter_status("server_encoding")
    insert_bytes(kept.dsn, NOT_UTF8[encoding], key)


def keys(kept: Kept) -> list[int]:
    return [int(row["new"][0]) for row in kept.changelog_rows("I")]


@pytest.mark.parametrize("kept", NOT_UTF8, indirect=True)
@pytest.mark.thorough("the same test in SQL_ASCII; WIN1252 in test_unsendable", "WIN1252")
def test_one_transaction_is_left_out_and_what_it_may_have_changed_stops_there(kept: Kept) -> None:
    execute(kept.dsn, "insert into t values (1, 'before')", "insert into u values (1, 'before')")
    poison(kept)
    execute(kept.dsn, "insert into t values (3, 'after')", "insert into u values (3, 'after')")
    lsn = kept.unsendable()
    before = kept.slot().confirmed_flush_lsn
    said = skip_transaction(kept.access, str(lsn), [U], dry_run=True)
    assert (said.touched, said.named) == ((TableName.parse(T),), (TableName.parse(U),))
    assert kept.slot().confirmed_flush_lsn == before
    assert kept.states() == {T: "streaming", U: "streaming"}
    assert kept.changelog_rows("G") == []

    assert skip_transaction(kept.access, str(lsn), (table for table in [U])) == said
    assert kept.states() == {T: "errored", U: "streaming"}
    assert (kept.record(T).error, kept.record(T).lsn) == ("GapError", lsn)
    assert "--tables 'public.t'" in kept.record(T).hint
    assert kept.slot().confirmed_flush_lsn == kept.durable_lsn == lsn + 1

    kept.receive()
    assert keys(kept) == [1, 1, 3, 3]
    assert kept.bring_forward(U).error is None
    kept.assert_equal(U)
    stopped = kept.bring_forward(T)
    assert (stopped.error_kind, stopped.error_lsn, stopped.position < lsn) == ("GapError", lsn, True)
    assert kept.lake_rows(T)["a"].to_pylist() == [1]


def test_reads_across_skipped_transaction_are_rejected_and_earlier_reads_work(kept: Kept) -> None:
    execute(kept.dsn, "insert into t values (1, 'before')", "insert into u values (1, 'before')")
    poison(kept)
    execute(kept.dsn, "insert into t values (3, 'after')", "insert into u values (3, 'after')")
    kept.write_point(LSN(kept.begin() - 1), T, U)
    lsn = kept.unsendable()
    skip_transaction(kept.access, lsn, [U])
    kept.receive()
    assert arrow_as_of(kept.pipeline, T, lsn=lsn - 1)["a"].to_pylist() == [1]
    assert sorted(arrow_as_of(kept.pipeline, U)["a"].to_pylist()) == [1, 3]
    for moment in (lsn, lsn + 1, None):
        with pytest.raises(LakeError, match=f"transaction at {lsn}.* was skipped"):
            arrow_as_of(kept.pipeline, T, lsn=moment)


@pytest.mark.thorough("test_one_transaction_is_left_out_and_what_it_may_have_changed_stops_there")
def test_every_other_transaction_is_kept_whatever_lay_across(kept: Kept) -> None:
    """Others begin before and commit after, begin before and commit before, and so on."""
    with ExitStack() as stack:
        around = []
        for number in range(10, 16):
            connection = psycopg2.connect(kept.dsn)
            stack.callback(connection.close)
            connection.cursor().execute(f"insert into t values ({number}, 'x')")
            around.append(connection)
        for connection in around[:3]:
            connection.commit()
        poison(kept)
        for connection in around[3:]:
            connection.commit()
    lsn = kept.unsendable()
    skip_transaction(kept.access, lsn)
    kept.receive()
    assert keys(kept) == [10, 11, 12, 13, 14, 15]
    assert kept.states() == {T: "errored", U: "errored"}


@pytest.mark.thorough("test_one_transaction_is_left_out_and_what_it_may_have_changed_stops_there")
def test_a_second_one_is_skipped_like_the_first(kept: Kept) -> None:
    poison(kept, 2)
    execute(kept.dsn, "insert into u values (1, 'between')")
    poison(kept, 3)
    execute(kept.dsn, "insert into u values (2, 'after')")
    first = kept.unsendable()
    skip_transaction(kept.access, first, [U])
    second = kept.unsendable()
    assert second > first
    skip_transaction(kept.access, second, [U])
    kept.receive()
    assert kept.bring_forward(U).error is None
    kept.assert_equal(U)
    assert kept.record(T).lsn == first


def test_retry_is_refused_and_paused_tables_are_not_forgotten(kept: Kept) -> None:
    pause_tables(kept.access, [U])
    poison(kept)
    lsn = kept.unsendable()
    skip_transaction(kept.access, lsn)
    assert kept.states() == {T: "errored", U: "errored"}
    with pytest.raises(GapError, match=rf"public\.t: the transaction at {lsn}"):
        retry_tables(kept.access, [T])


def test_only_what_the_server_cannot_send_is_skipped(kept: Kept) -> None:
    execute(kept.dsn, "insert into t values (1, 'fine')")
    with pytest.raises(SlotError, match="nothing was skipped"):
        skip_transaction(kept.access, kept.source_lsn())
    poison(kept)
    lsn = kept.unsendable()
    with pytest.raises(ConfigError, match=f"the transaction at {lsn}, not the one at {LSN(lsn - 8)}"):
        skip_transaction(kept.access, LSN(lsn - 8))
    with pytest.raises(ConfigError, match="--lsn"):
        skip_transaction(kept.access, "nonsense")
    with pytest.raises(ConfigError, match=r"public\.v"):
        skip_transaction(kept.access, lsn, ["public.v"])
    with kept.access.state_db("replicate") as state_db:
        state_db.lock(kept.pipeline.name, "replicate")
        with pytest.raises(BusyError):
            skip_transaction(kept.access, lsn)
    assert kept.changelog_rows("G") == []
    assert kept.states() == {T: "streaming", U: "streaming"}


@pytest.mark.parametrize("finishes", ["the receiver", "the same again"])
@pytest.mark.thorough("the same test, finished by the receiver", "SQL_ASCII-the same again")
def test_one_that_died_between_changelog_and_slot_is_finished(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, finishes: str
) -> None:
    class DiedError(Exception):
        pass

    def die(*_: object) -> None:
        raise DiedError

    poison(kept)
    execute(kept.dsn, "insert into u values (3, 'after')")
    lsn = kept.unsendable()
    with monkeypatch.context() as patched:
        patched.setattr(losses, "pass_gaps", die)
        with pytest.raises(DiedError):
            skip_transaction(kept.access, lsn, [U])
    assert kept.durable_lsn == lsn + 1
    assert kept.slot().confirmed_flush_lsn <= lsn
    if finishes == "the same again":
        with pytest.raises(ConfigError, match="was skipped already"):
            skip_transaction(kept.access, lsn, [T])
        skip_transaction(kept.access, lsn)
        assert kept.slot().confirmed_flush_lsn == lsn + 1
        assert kept.states() == {T: "errored", U: "streaming"}
    kept.receive()
    assert kept.bring_forward(U).error is None
    kept.assert_equal(U)
    assert kept.bring_forward(T).error_kind == "GapError"
    assert len(kept.changelog_rows("G")) == 2


def test_the_slot_is_not_moved_past_a_gap_that_the_disk_does_not_take(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    poison(kept)
    lsn = kept.unsendable()
    with monkeypatch.context() as patched:
        patched.setattr(losses, "pass_gaps", lambda *_: None)
        skip_transaction(kept.access, lsn, [U])
        patched.setattr(durable, "flush_newest", refuse)
        with kept.source() as source, pytest.raises(LakeUnavailableError):
            receiver.pass_gaps(source, kept.pipeline)
    assert kept.slot().confirmed_flush_lsn <= lsn
    with kept.source() as source:
        receiver.pass_gaps(source, kept.pipeline)
    assert kept.slot().confirmed_flush_lsn == lsn + 1


def test_a_slot_that_was_made_anew_is_not_moved_to_a_gap(kept: Kept) -> None:
    poison(kept)
    lsn = kept.unsendable()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(losses, "pass_gaps", lambda *_: None)
        skip_transaction(kept.access, lsn, [U])
    slot = kept.pipeline.slot
    execute(kept.dsn, f"select pg_drop_replication_slot('{slot}')")
    execute(kept.dsn, f"select pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    stands = kept.slot().confirmed_flush_lsn
    with kept.source() as source:
        receiver.pass_gaps(source, kept.pipeline)
    assert kept.slot().confirmed_flush_lsn == stands


@pytest.mark.thorough("test_reads_across_skipped_transaction_are_rejected_and_earlier_reads_work")
def test_messages_are_read_up_to_the_gap_which_is_then_said(kept: Kept) -> None:
    execute(kept.dsn, "select pg_logical_emit_message(true, 'p', 'before')")
    poison(kept)
    execute(kept.dsn, "select pg_logical_emit_message(true, 'p', 'after')")
    begin, lsn = kept.begin(), kept.unsendable()
    skip_transaction(kept.access, lsn)
    kept.receive()
    found = read_messages(kept.pipeline, above_lsn=begin - 1)
    assert found["content"].to_pylist() == [b"before"]
    with pytest.raises(ChangelogError, match=f"{lsn} was skipped") as caught:
        read_messages(kept.pipeline, above_lsn=found["lsn"][-1].as_py())
    assert f"above_lsn={int(lsn)}" in caught.value.hint
    assert read_messages(kept.pipeline, above_lsn=int(lsn))["content"].to_pylist() == [b"after"]
    with pytest.warns(SkippedMessagesWarning, match=str(lsn)):
        assert len(read_messages(kept.pipeline)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_messages(kept.pipeline, above_lsn=int(lsn))


def test_the_gap_goes_with_its_hour_and_those_below_are_refused_all_the_same(kept: Kept) -> None:
    poison(kept)
    lsn = kept.unsendable()
    skip_transaction(kept.access, lsn, [U])
    later = datetime.now(UTC) + timedelta(hours=3)
    assert drop_expired(kept.pipeline.lake_root, 1, {1: lsn - 1}, later).files == 0
    assert drop_expired(kept.pipeline.lake_root, 1, {1: lsn}, later).files > 0
    with pytest.raises(ChangelogError, match="holds changes above"):
        retry_tables(kept.access, [T])


def test_the_command_says_what_it_costs_and_does_so_with_yes(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(kept)
    lsn = str(kept.unsendable())
    monkeypatch.setenv("PGREPL_DSN", kept.dsn)
    command = ["skip", str(kept.file), "--lsn", lsn, "--unchanged-tables", U]
    assert main(command) == 78
    said = capsys.readouterr().err
    assert f"the transaction at {lsn} " in said
    assert (
        f"marked errored until they are resnapshotted (pgrepl snapshot FILE.json --tables NAMES): {T}\n"
        in said
    )
    assert f"unchanged according to --unchanged-tables: {U}\n" in said
    assert "nothing was changed" not in said, "what was due before it is received"
    assert "nothing was skipped; the changelog has all transactions before this one now" in said
    assert kept.states() == {T: "streaming", U: "streaming"}
    assert main([*command, "--yes"]) == 0
    assert f"the transaction at {lsn} " in capsys.readouterr().out
    assert kept.states() == {T: "errored", U: "streaming"}
