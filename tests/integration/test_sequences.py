"""Values of sequences: read at a source, recorded after consistent points, and set at another database."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg2
import pytest
from deltalake import QueryBuilder

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.errors import FencedError, SourceConnectionError
from airflow_provider_pgrepl.replication.app.operations.teardown import teardown
from airflow_provider_pgrepl.replication.app.sequences import SequenceRecorder
from airflow_provider_pgrepl.replication.app.status.status import read_status
from airflow_provider_pgrepl.replication.app.status.text import to_text
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.lake.maintenance import Maintenance
from airflow_provider_pgrepl.replication.lake.sequences import (
    Recorded,
    RecordedValue,
    SequenceTable,
    read_recorded,
    sequences_uri,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver
from airflow_provider_pgrepl.replication.source.catalog import sequences as catalog_sequences
from airflow_provider_pgrepl.replication.source.catalog.sequences import (
    SequenceReading,
    SequenceValue,
    read_sequences,
    refused_sequences,
)
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from demo.postgres import Server
from tests.conftest import fresh_database
from tests.support.kept import Kept
from tests.support.received import EAGER, wait_until_seen
from tests.support.replicated import execute, wait_until
from tests.support.sessions import session

BIG = 2**53 + 1
SCHEMA = (
    "create table plain (id serial primary key)",
    "create table tagged (id int generated always as identity primary key)",
    "create sequence shared as bigint",
    "create table first_user (id bigint primary key default nextval('shared'))",
    "create table second_user (id bigint primary key default nextval('shared'))",
    "create sequence backward increment -5 minvalue -1000 maxvalue -1 start -1",
    "create sequence big",
    """create schema "Odd ""one\\'s" """,
    """create sequence "Odd ""one\\'s"."Käse; drop table x--" """,
    "create sequence unused",
    "create sequence set_back",
    'create sequence "line\nbreak"',
)
NOT_RECORDED = (
    "create table other (id serial primary key)",
    "create temporary sequence passing",
)
ADVANCED = (
    "insert into plain select from generate_series(1, 3)",
    "insert into tagged select from generate_series(1, 4)",
    "insert into first_user default values",
    "insert into second_user default values",
    "select nextval('backward'), nextval('backward')",
    f"select setval('big', {BIG})",
    """select setval('"Odd ""one\\''s"."Käse; drop table x--"', 7, true)""",
    "select setval('set_back', 500, false)",
    "select nextval('\"line\nbreak\"')",
)
TABLES = ("plain", "tagged", "first_user", "second_user")
EXPECTED = {
    "public.plain_id_seq": ("public.plain.id", "integer", 1, 3, True),
    "public.tagged_id_seq": ("public.tagged.id", "integer", 1, 4, True),
    "public.shared": ("public.first_user.id", "bigint", 1, 2, True),
    "public.backward": (None, "bigint", -5, -6, True),
    "public.big": (None, "bigint", 1, BIG, True),
    """"Odd ""one\\'s"."Käse; drop table x--\"""": (None, "bigint", 1, 7, True),
    "public.unused": (None, "bigint", 1, 1, False),
    "public.set_back": (None, "bigint", 1, 500, False),
    'public.U&"line\\000Abreak"': (None, "bigint", 1, 1, True),
}


def shown(reading: SequenceReading) -> dict[str, tuple[object, ...]]:
    return {
        str(name): (
            None if one.sequence.column is None else str(one.sequence.column),
            one.sequence.data_type,
            one.sequence.increment,
            one.last_value,
            one.is_called,
        )
        for name, one in reading.values.items()
    }


def oids_of(run, *tables: str) -> list[int]:
    return [run(f"select '{table}'::regclass::oid::bigint")[0][0] for table in tables]


@pytest.mark.differs_by_major("PostgreSQL 18 reads a sequence by its OID", since=(18,))
def test_sequences_that_may_number_rows_are_read_with_exact_values(dsn, run):
    run(*SCHEMA, *NOT_RECORDED, *ADVANCED)
    if run("show server_version_num")[0][0] >= "150000":
        run("create unlogged sequence forgotten")
    with closing(connect(dsn, "test")) as source:
        reading = read_sequences(source, oids_of(run, *TABLES), trusts_owners=False)
    assert shown(reading) == EXPECTED
    assert reading.unread == {}


def test_default_and_owner_of_a_partition_count_as_the_tables_own(dsn, run):
    run(
        "create table root (id bigint, at int) partition by range (at)",
        "create table leaf partition of root for values from (0) to (9)",
        "create sequence leaf_number owned by leaf.id",
        "alter table leaf alter id set default nextval('leaf_number')",
    )
    with closing(connect(dsn, "test")) as source:
        (value,) = read_sequences(source, oids_of(run, "root"), trusts_owners=False).values.values()
    assert str(value.sequence.column) == "public.leaf.id"


def test_sequence_that_may_not_be_read_is_left_out_and_the_printed_grant_lets_it_be_read(dsn, run):
    role = f"reader_{dsn.split('dbname=')[1].split()[0]}"
    run(*SCHEMA, *ADVANCED, f"create role {role} login", f"grant pg_read_all_data to {role}")
    run(f"revoke pg_read_all_data from {role}", f"grant usage on schema public to {role}")
    run(f"grant select on all sequences in schema public to {role}", f"revoke select on big from {role}")
    run(f'revoke select on "line\nbreak" from {role}')
    oids = oids_of(run, *TABLES)
    try:
        with closing(connect(psycopg2.extensions.make_dsn(dsn, user=role), "test")) as source:
            reading = read_sequences(source, oids, trusts_owners=False)
            refused = refused_sequences(source, oids)
            assert reading.unread == refused
            assert {name.name for name in refused} == {"big", "Käse; drop table x--", "line\nbreak"}
            assert len(reading.values) == len(EXPECTED) - 3
            assert all(why.isprintable() for why in refused.values()), "no line of the log can be forged"
            run(*(why.partition("may not read it: ")[2] for why in refused.values()))
            assert shown(read_sequences(source, oids, trusts_owners=False)) == EXPECTED
    finally:
        run(f"drop owned by {role}", f"drop role {role}")


@pytest.mark.differs_by_major("PostgreSQL 18 reads a sequence by its OID", since=(18,))
def test_sequence_that_another_session_locks_keeps_no_other_from_being_read(dsn, run):
    run(*SCHEMA, *ADVANCED)
    with session(dsn) as other, closing(connect(dsn, "test")) as source:
        other.autocommit = False
        other.cursor().execute("drop sequence big")
        reading = read_sequences(source, oids_of(run, *TABLES), trusts_owners=False)
        other.rollback()
    assert len(reading.values) == len(EXPECTED) - 1
    assert {str(name): "locked" in why for name, why in reading.unread.items()} == {"public.big": True}


@pytest.mark.differs_by_major("PostgreSQL 18 reads a sequence by its OID", since=(18,))
def test_many_locked_sequences_do_not_add_up_their_waits(dsn, run):
    run(*(f"create sequence s{number}" for number in range(60)))
    with session(dsn) as other, closing(connect(dsn, "test")) as source:
        other.autocommit = False
        other.cursor().execute(f"drop sequence {', '.join(f's{number}' for number in range(0, 60, 2))}")
        began = time.monotonic()
        reading = read_sequences(source, [], trusts_owners=False)
        assert time.monotonic() - began < 3, "30 waits of 0.2 s last longer"
        other.rollback()
        assert len(reading.values) == len(reading.unread) == 30
        assert read_sequences(source, [], trusts_owners=False, is_stopped=lambda: True).values == {}


@pytest.mark.differs_by_major("PostgreSQL 18 reads a sequence by its OID", since=(18,))
def test_unused_sequence_is_not_selected_where_its_schema_could_be_replaced(dsn, run, major):
    role = f"owner_{dsn.split('dbname=')[1].split()[0]}"
    database = dsn.split("dbname=")[1].split()[0]
    run(f"create role {role}", f"grant create on database {database} to {role}")
    run(f"create schema theirs authorization {role}", "create sequence theirs.unused", "create sequence free")
    try:
        with closing(connect(dsn, "test")) as source:
            found = [read_sequences(source, [], trusts_owners=trusts) for trusts in (False, True)]
    finally:
        run(f"drop owned by {role} cascade", f"drop role {role}")
    unused = TableName("theirs", "unused")
    assert (unused in found[0].values) is (major >= 18)
    assert (unused in found[0].unread) is (major < 18)
    assert unused in found[1].values
    assert TableName("public", "free") in found[0].values, "its own schema cannot be replaced"


@pytest.mark.differs_by_major("PostgreSQL 18 reads a sequence by its OID", since=(18,))
def test_view_that_takes_the_name_of_an_unused_sequence_is_not_selected(dsn, run, monkeypatch):
    """Its owner renames the sequence after it was listed, and puts the view in its place."""
    role = f"mallory_{dsn.split('dbname=')[1].split()[0]}"
    run(f"create role {role}", "create schema shared_place", f"grant all on schema shared_place to {role}")
    run(f"set role {role}", "create sequence shared_place.s", "reset role")
    listed = catalog_sequences._list

    def list_and_replace(*given):
        found = listed(*given)
        run(
            f"set role {role}",
            "create function shared_place.stay() returns bool language plpgsql as"
            " $$ begin perform pg_advisory_lock(4714); return true; end $$",
            "alter sequence shared_place.s rename to hidden",
            "create view shared_place.s as select 7::bigint last_value, shared_place.stay() is_called",
            "grant all on all tables in schema shared_place to public",
            "reset role",
        )
        return found

    monkeypatch.setattr(catalog_sequences, "_list", list_and_replace)
    try:
        with closing(connect(dsn, "test")) as source:
            (value,) = read_sequences(source, [], trusts_owners=False).values.values()
            assert run("select pid from pg_locks where locktype = 'advisory' and objid = 4714") == []
        assert (value.last_value, value.is_called) == (1, False)
    finally:
        run(f"drop owned by {role} cascade", f"drop role {role}")


class Recording:
    """A pipeline whose receiver runs, and whose points a test makes, with the recorder of its app."""

    def __init__(self, dsn: str, folder: Path, receiver: Receiver, kept: Kept) -> None:
        self.kept, self.receiver = kept, receiver
        self.state_db = StateDatabase(dsn, "test")
        self.lsn = LSN(0)
        self.recorder = self.new_recorder()

    def new_recorder(self, dsn: str | None = None) -> SequenceRecorder:
        """Return the recorder of another start of the app."""
        record = read_epoch(self.kept.changelog)
        return SequenceRecorder(
            dsn or self.kept.dsn, self.kept.pipeline, self.state_db, record, lambda: self.lsn
        )

    def point(self, *tables: str) -> LSN:
        """Apply everything that has committed, and write a point."""
        wait_until_seen(self.receiver, self.kept.source_lsn())
        lsn = LSN(self.receiver.progress.durable_lsn - 1)
        for table in tables:
            relation = self.kept.record(table).relation
            assert relation is not None
            self.kept.hand(relation)
        self.kept.write_point(lsn, *tables)
        self.lsn = lsn
        return lsn

    def record(self, *tables: str) -> LSN:
        """Write a point, and record the values after it."""
        lsn = self.point(*tables)
        self.recorder.look()
        return lsn

    @property
    def values(self) -> dict[str, RecordedValue]:
        return {str(one.name): one for one in read_recorded(self.kept.pipeline.lake_root).values}

    @property
    def version(self) -> int:
        return int(open_delta(sequences_uri(self.kept.pipeline.lake_root)).version())


@contextmanager
def recorded_pipeline(dsn: str, folder: Path, *tables: str) -> Iterator[Recording]:
    kept = Kept(dsn, folder, ("public.*",), sequences=True)
    kept.take(*tables)
    with kept.receiving(EAGER) as receiver:
        yield Recording(dsn, folder, receiver, kept)


T = "public.t"


@pytest.fixture
def shop(dsn, tmp_path, run):
    """A table whose key is a serial column, with three rows."""
    run("create table t (id serial primary key)", "insert into t select from generate_series(1, 3)")
    with recorded_pipeline(dsn, tmp_path, T) as found:
        yield found


NUMBER = "public.t_id_seq"


def value_of(one: RecordedValue) -> tuple[int, bool, LSN]:
    return one.value.last_value, one.value.is_called, one.lsn


@pytest.mark.slow
def test_printed_sql_sets_every_sequence_of_another_database_without_the_source(
    dsn, tmp_path, run, server: Server, monkeypatch, capsys
):
    run(*SCHEMA, *ADVANCED)
    with recorded_pipeline(dsn, tmp_path, *(f"public.{table}" for table in TABLES)) as shop:
        lsn = shop.record(*(f"public.{table}" for table in TABLES))
    assert {name: value_of(one) for name, one in shop.values.items()} == {
        name: (last, called, lsn) for name, (_, _, _, last, called) in EXPECTED.items()
    }
    for variable in ("PGREPL_DSN", "PGREPL_STATE_DSN"):
        monkeypatch.delenv(variable, raising=False)
    assert main(["sequences", str(shop.kept.file), "--sql"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.isascii()
    with fresh_database(server) as new:
        execute(new, *SCHEMA, "select setval('plain_id_seq', 50), setval('backward', -50)")
        psql = [str(server.bin / "psql"), new, "-v", "ON_ERROR_STOP=1"]
        subprocess.run(psql, input=said.out, text=True, check=True, capture_output=True)
        execute(
            new,
            "drop sequence unused",
            "create sequence spied",
            "create view unused as select 0::bigint as last_value, nextval('spied') < 0 as is_called",
        )
        found = subprocess.run(psql[:2], check=False, input=said.out, text=True, capture_output=True)
        assert "current transaction is aborted" in found.stderr
        execute(new, "drop view unused", "create sequence unused")
        with session(new) as connection, connection.cursor() as cursor:
            cursor.execute("select nextval('spied')")
            assert cursor.fetchone() == (1,), "the code of the view was not run"
            for name, (_, _, increment, last, is_called) in EXPECTED.items():
                parsed = TableName.parse(name)
                cursor.execute("select nextval(%s)", (parsed.sql,))
                last = {"plain_id_seq": 50, "backward": -50}.get(parsed.name, last)
                assert cursor.fetchone() == (last + increment * is_called,), name
    assert main(["sequences", str(shop.kept.file), "--json"]) == 0
    shown_json = json.loads(capsys.readouterr().out)
    assert (shown_json["lsn"], shown_json["consistent_point"], shown_json["problem"]) == (
        str(lsn),
        str(lsn),
        "",
    )
    assert [one["last_value"] for one in shown_json["sequences"] if one["sequence"] == "big"] == [BIG]
    assert main(["sequences", str(shop.kept.file)]) == 0
    text = capsys.readouterr().out
    assert f"9 sequences, valid for all transactions up to {lsn} of epoch 1, read " in text
    assert str(BIG) in text


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_value_after_a_recorded_one_is_in_the_lake_as_of_its_point(dsn, tmp_path, run, seed):
    """Under transactions that commit or roll back, in several sessions at once."""
    tables = {"public.up": ("upward", 1), "public.down": ("downward", -3)}
    run(
        "create sequence upward cache 5",
        "create sequence downward increment -3 start -1",
        "create table up (id bigint primary key default nextval('upward'))",
        "create table down (id bigint primary key default nextval('downward'))",
    )
    committed = "select (select count(*) from up) + (select count(*) from down)"
    ended = threading.Event()

    def work(number: int) -> None:
        chosen = random.Random(f"{seed}/{number}")
        with session(dsn) as connection, connection.cursor() as cursor:
            while not ended.wait(0.005):
                cursor.execute("begin")
                for _ in range(chosen.randint(1, 3)):
                    cursor.execute(f"insert into {chosen.choice(list(tables))} default values")
                    cursor.execute(f"select nextval('{chosen.choice(('upward', 'downward'))}')")
                cursor.execute(chosen.choice(("commit", "commit", "rollback")))

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(2)]
    with recorded_pipeline(dsn, tmp_path, *tables) as shop:
        for worker in workers:
            worker.start()
        points = []
        for wanted in (20, 30, 40):
            wait_until(lambda wanted=wanted: run(committed)[0][0] >= wanted, what=f"{wanted} committed rows")
            points.append(shop.record(*tables))
        ended.set()
        for worker in workers:
            worker.join()
        points.append(shop.record(*tables))
        lake = shop.kept.pipeline.lake_root
        assert shop.version > 1
        for version in range(1, shop.version + 1):
            rows = open_delta(sequences_uri(lake), version).to_pyarrow_table().to_pylist()
            (lsn,) = {row["lsn"] for row in rows}
            assert lsn in points
            for table, (sequence, increment) in tables.items():
                (row,) = (row for row in rows if row["sequence"] == sequence)
                assert row["increment"] == increment
                following = row["last_value"] + increment * row["is_called"]
                uri = f"{lake}/{TableName.parse(table).path}"
                used = f"_pgrepl_commit_lsn <= {lsn} and id * {increment} >= {following * increment}"
                query = f"select count(*) n from t where {used}"
                counted = QueryBuilder().register("t", open_delta(uri)).execute(query).read_all()
                assert counted["n"].to_pylist() == [0], (table, version)
        assert sum(shop.kept.lake_rows(table).num_rows for table in tables) >= 40


def test_values_are_committed_only_if_they_changed_or_their_lsn_is_renewed(shop, run):
    first = shop.record(T)
    version = shop.version
    shop.recorder.look()
    assert shop.version == version, "there is no newer point"
    run("create table unrelated (id int)", "insert into unrelated values (1)")
    later = shop.record(T)
    assert later > first
    assert (shop.version, value_of(shop.values[NUMBER])) == (version, (3, True, first))
    shop.recorder.look(is_last=True)
    assert (shop.version, value_of(shop.values[NUMBER])) == (version + 1, (3, True, later))
    run("insert into t default values")
    last = shop.record(T)
    assert (shop.version, value_of(shop.values[NUMBER])) == (version + 2, (4, True, last))


def test_created_sequences_get_rows_and_dropped_ones_lose_them(shop, run):
    shop.record(T)
    run("create sequence invoices start 100", "select nextval('invoices')")
    lsn = shop.record(T)
    assert value_of(shop.values["public.invoices"]) == (100, True, lsn)
    run("drop sequence invoices", "alter sequence t_id_seq rename to numbers")
    shop.record(T)
    assert set(shop.values) == {"public.numbers"}


def test_sequence_of_a_table_that_was_created_again_keeps_its_row(shop, run):
    """The recorded OID is that of the dropped table until its next snapshot."""
    lsn = shop.record(T)
    run("drop table t", "create table t (id serial primary key)", f"select setval('{NUMBER}', 9)")
    shop.recorder.look()
    assert value_of(shop.values[NUMBER]) == (9, True, lsn)


def test_next_start_records_what_a_killed_app_left_out(shop, run):
    shop.record(T)
    run("insert into t default values")
    lsn = shop.point(T)
    assert value_of(shop.values[NUMBER])[0] == 3
    shop.new_recorder().look()
    assert value_of(shop.values[NUMBER]) == (4, True, lsn)


def test_values_stay_with_their_lsn_while_the_source_cannot_be_read(
    shop, run, caplog, capsys, monkeypatch, dsn
):
    monkeypatch.setenv("PGREPL_DSN", dsn)
    before = shop.record(T)
    run("insert into t default values")
    lsn = shop.point(T)
    gone = shop.new_recorder(psycopg2.extensions.make_dsn(dsn, dbname="not_there"))
    with pytest.raises(SourceConnectionError):
        gone.look()
    gone.start()
    wait_until(lambda: "values of sequences were not read: " in caplog.text)
    gone.stop()
    assert value_of(shop.values[NUMBER]) == (3, True, before)
    assert main(["sequences", str(shop.kept.file), "--sql"]) == 0
    assert (
        f"{NUMBER}: recorded at {before}, before the last consistent point {lsn}" in capsys.readouterr().err
    )


def test_status_shows_the_age_and_reports_late_values(shop, run, dsn):
    lsn = shop.record(T)
    status = read_status(shop.kept.pipeline, shop.kept.access)
    assert f"sequences 1, valid up to {lsn}, read " in to_text(status)
    assert not [problem for problem in status.problems if "sequence" in problem]
    table = SequenceTable(shop.kept.pipeline.lake_root)
    (one,) = table.read().values
    old = RecordedValue(one.value, one.epoch, one.lsn, datetime.now(UTC) - timedelta(hours=1))
    table.write(Recorded([old]), 1, lsn)
    run("insert into t default values")
    shop.point(T)
    (late,) = read_status(shop.kept.pipeline, shop.kept.access).problems
    assert late.startswith(f"sequences: {NUMBER}: recorded at {lsn}, before the last consistent point")


def test_values_are_not_read_at_a_server_that_does_not_serve_the_slot(dsn, tmp_path, run):
    run("create table t (id serial primary key)")
    with recorded_pipeline(dsn, tmp_path, T) as shop:
        shop.point(T)
        elsewhere = shop.new_recorder(psycopg2.extensions.make_dsn(dsn, dbname="postgres"))
        with pytest.raises(SourceConnectionError, match="does not serve slot"):
            elsewhere.look()
    shop.recorder.look()
    assert shop.values == {}, "while the receiver reconnects, nothing is read, and nothing is wrong"
    run(f"select pg_drop_replication_slot('{shop.kept.pipeline.slot}')")
    with pytest.raises(SourceConnectionError, match="does not serve slot"):
        shop.recorder.look()


@pytest.mark.thorough("test_sequence_that_may_not_be_read_is_left_out_and_the_printed_grant_lets_it_be_read")
def test_sequence_that_was_never_read_is_named_without_the_source(dsn, tmp_path, run, capsys):
    role = f"reader_{dsn.split('dbname=')[1].split()[0]}"
    run("create table t (id serial primary key)", "create sequence secret")
    run(f"create role {role} login", "revoke all on sequence secret from public")
    run(f"grant select on t_id_seq to {role}", f"grant usage on schema public to {role}")
    try:
        with recorded_pipeline(dsn, tmp_path, T) as shop:
            shop.recorder = shop.new_recorder(psycopg2.extensions.make_dsn(dsn, user=role))
            shop.record(T)
            version = shop.version
            shop.recorder.look()
            assert shop.version == version, "it is not recorded again as long as nothing changes"
            for option in ((), ("--sql",), ("--json",)):
                assert main(["sequences", str(shop.kept.file), *option]) == 0
                said = capsys.readouterr().out
                assert "secret" in said
                assert "GRANT SELECT ON SEQUENCE" in said
            run(f"revoke select on t_id_seq from {role}", f"grant select on secret to {role}")
            shop.recorder.look()
            assert set(shop.values) == {NUMBER, "public.secret"}
    finally:
        run(f"drop owned by {role}", f"drop role {role}")


def test_writer_that_was_overtaken_commits_nothing(shop, run):
    shop.record(T)
    stale = shop.new_recorder()
    stale.look()
    run("insert into t default values")
    before = shop.lsn
    lsn = shop.record(T)
    shop.lsn = before
    run("insert into t default values")
    for _ in range(2):
        with pytest.raises(FencedError):
            stale.look()
    assert value_of(shop.values[NUMBER]) == (4, True, lsn)


def test_value_of_an_earlier_epoch_stays_until_the_source_has_reached_it(shop, run):
    lsn = shop.record(T)
    table = SequenceTable(shop.kept.pipeline.lake_root)
    (one,) = table.read().values
    ahead = SequenceValue(one.value.sequence, 100, True)
    table.write(Recorded([RecordedValue(ahead, 0, lsn, one.recorded_at)]), 1, lsn)
    shop.recorder = shop.new_recorder()
    shop.record(T)
    assert (shop.values[NUMBER].epoch, shop.values[NUMBER].value.last_value) == (0, 100)
    (problem,) = read_status(shop.kept.pipeline, shop.kept.access).problems
    assert "recorded in an earlier epoch" in problem
    run("select setval('t_id_seq', 100)")
    shop.record(T)
    assert (shop.values[NUMBER].epoch, shop.values[NUMBER].value.last_value) == (1, 100)


def test_maintenance_keeps_the_versions_of_the_last_hour_and_teardown_drops_all(shop, run):
    for _ in range(3):
        run("insert into t default values")
        shop.record(T)
    folder = Path(sequences_uri(shop.kept.pipeline.lake_root))
    maintenance = Maintenance(shop.kept.pipeline)
    now = datetime.now(UTC)
    assert maintenance.run(now + timedelta(minutes=50)).failed == {}
    assert len(list(folder.glob("*.parquet"))) == 3
    assert maintenance.run(now + timedelta(minutes=70)).failed == {}
    assert len(list(folder.glob("*.parquet"))) == 1
    shop.recorder.look()
    assert value_of(shop.values[NUMBER])[0] == 6
    shop.receiver.stop()
    teardown(shop.kept.access, drop_lake=True)
    assert not folder.parent.exists()


def test_command_says_why_there_are_no_values(dsn, tmp_path, run, capsys):
    run("create table t (id int primary key)")
    kept = Kept(dsn, tmp_path, ("public.*",), sequences=True)
    said = []
    for prepare in (lambda: None, lambda: kept.take(T), lambda: kept.configure(sequences=False)):
        prepare()
        assert main(["sequences", str(kept.file)]) != 0
        said.append(capsys.readouterr().err)
    assert "there is no changelog in the lake" in said[0]
    assert "no values of sequences are recorded in the lake" in said[1]
    assert 'set "sequences": true in the pipeline file' in said[2]
