"""Commands that were given another source, lake or state than the pipeline's change nothing, and say so."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import (
    ConfigError,
    LakeError,
    PgReplError,
    RewoundError,
    SlotError,
    StateError,
)
from airflow_provider_pgrepl.replication.app import replicate
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift
from airflow_provider_pgrepl.replication.app.evidence import check
from airflow_provider_pgrepl.replication.app.operations.losses import skip_transaction
from airflow_provider_pgrepl.replication.app.operations.maintain import maintain
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from airflow_provider_pgrepl.replication.app.operations.tables import (
    pause_tables,
    resume_tables,
    retry_tables,
)
from airflow_provider_pgrepl.replication.app.operations.teardown import teardown
from airflow_provider_pgrepl.replication.app.snapshot import begin_new_epoch, resync, take_tables
from airflow_provider_pgrepl.replication.app.source_ownership import SourceOwnership
from airflow_provider_pgrepl.replication.app.status.status import read_status
from airflow_provider_pgrepl.replication.app.status.text import to_text
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_epoch
from airflow_provider_pgrepl.replication.changelog.writer import create_changelog
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.source.slot import read_slot
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from demo.postgres import Server
from tests.conftest import closing_connection, fresh_database, running_server
from tests.support.kept import TABLES, A, B, Kept, kept_tables
from tests.support.replicated import execute

pytestmark = pytest.mark.slow


@pytest.fixture
def kept(dsn: str, tmp_path: Path) -> Kept:
    return kept_tables(dsn, tmp_path, trust_table_owners=True)


@pytest.fixture
def elsewhere(server: Server):
    """Another database of the same server, with the same tables."""
    with fresh_database(server) as dsn:
        execute(dsn, *TABLES)
        yield dsn


@dataclass(frozen=True)
class Left:
    """All that a command might have changed."""

    slot: object
    publications: list[tuple[str, str]]
    versions: dict[str, int]
    states: dict[str, str]
    recorded: bool

    @classmethod
    def of(cls, kept: Kept) -> Left:
        with closing_connection(kept.dsn) as connection, connection.cursor() as cursor:
            cursor.execute("select pubname::text, tablename::text from pg_publication_tables order by 1, 2")
            publications = cursor.fetchall()
            slot = read_slot(connection, kept.pipeline.slot)
        lake = Path(kept.pipeline.lake_root)
        versions = {
            str(log.parent.relative_to(lake)): DeltaTable(log.parent).version()
            for log in lake.rglob("_delta_log")
        }
        with StateDatabase(kept.dsn, "test") as state_db:
            recorded = state_db.is_set_up() and state_db.read_pipeline(kept.pipeline.name) is not None
        return cls(slot, publications, versions, kept.states() if recorded else {}, recorded)


def commands(access: Access) -> dict[str, Callable[[], object]]:
    """Every command that changes something, with what could make it do so."""
    return {
        "snapshot": lambda: take_tables(access),
        "new epoch": lambda: begin_new_epoch(access),
        "resync": lambda: resync(access),
        "teardown": lambda: teardown(access),
        "teardown with lake": lambda: teardown(access, drop_lake=True),
        "remove": lambda: remove_tables(access, [A]),
        "remove with lake table": lambda: remove_tables(access, [A], drop_lake_tables=True),
        "pause": lambda: pause_tables(access, [A]),
        "resume": lambda: resume_tables(access, [A]),
        "retry": lambda: retry_tables(access, [A]),
        "maintain": lambda: maintain(access, wait=lambda _: False),
        "skip": lambda: skip_transaction(access, "0/1"),
        "drift": lambda: check_drift(access),
    }


def refused(kept: Kept, access: Access, says: str) -> None:
    """Each command ends with an error that says what is where, and nothing has changed."""
    before = Left.of(kept)
    for name, command in commands(access).items():
        with pytest.raises(PgReplError, match=says) as caught:
            command()
        assert Left.of(kept) == before, name
        if name not in ("new epoch", "resync"):
            assert "--new-epoch" not in caught.value.hint, name


def test_commands_at_another_server_change_nothing(kept: Kept, tmp_path: Path) -> None:
    """Its state database knows nothing of the pipeline, or one of the same name, as staging does, whose
    tables are all copied: there would be nothing to do."""
    (tmp_path / "staging").mkdir()
    with running_server(18) as other, fresh_database(other) as staging, fresh_database(other) as knows:
        execute(staging, *TABLES)
        forgot_state = Access(kept.pipeline, staging, staging)
        before = Left.of(kept)
        for act in (
            lambda: take_tables(forgot_state),
            lambda: begin_new_epoch(forgot_state),
            lambda: teardown(forgot_state),
            lambda: teardown(forgot_state, drop_lake=True),
            lambda: teardown(forgot_state, drop_lake=True, dry_run=True),
        ):
            with pytest.raises(PgReplError, match="and the connection leads to another server: database"):
                act()
        assert Left.of(kept) == before
        refused(kept, Access(kept.pipeline, staging, kept.dsn), "another server: database")
        known = kept_tables(knows, tmp_path / "staging", name=kept.pipeline.name)
        # Also where the state was copied from production's.
        for lake in (known.pipeline.lake_root, kept.pipeline.lake_root):
            execute(knows, f"update _pgrepl.pipelines set lake = '{lake}'")
            before_there = Left.of(known)
            refused(kept, Access(kept.pipeline, knows, knows), "another server: database")
            assert Left.of(known) == before_there


@pytest.mark.thorough(
    "test_commands_at_another_server_change_nothing; test_receiver: a broken history is said"
)
def test_commands_at_a_source_without_the_slot_change_nothing(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A base backup is such a source, with state and tokens. No hint proposes to replace the lake there."""
    kept.receive()
    monkeypatch.setenv("PGREPL_DSN", kept.dsn)
    monkeypatch.delenv("PGREPL_STATE_DSN", raising=False)
    execute(kept.dsn, f"select pg_drop_replication_slot('{kept.pipeline.slot}')")
    refused(kept, kept.access, "there is no replication slot .* or this server is a copy of the source")
    assert replicate.main(["--pipeline", str(kept.file)]) == 78
    assert "check the connection" in caplog.text
    shown = " ".join(to_text(read_status(kept.pipeline)).split())
    assert "there is no replication slot" in shown
    assert "--new-epoch" not in caplog.text + shown


@pytest.mark.thorough("test_commands_at_another_server_change_nothing")
def test_commands_at_another_database_of_the_server_change_nothing(kept: Kept, elsewhere: str) -> None:
    """A server drops a logical slot from any of its databases."""
    says = "and the connection leads to another database of that server: database"
    refused(kept, Access(kept.pipeline, elsewhere, kept.dsn), says)
    earlier = replace(read_epoch(kept.changelog), database="", database_oid=0, layout=1)
    DeltaTable(kept.changelog).alter.set_table_description(earlier.to_json())
    execute(kept.dsn, "update _pgrepl.pipelines set database = '', database_oid = 0, lake_id = ''")
    refused(kept, Access(kept.pipeline, elsewhere, kept.dsn), says)


@pytest.mark.thorough(
    "test_replication_with_another_lake_does_not_begin; test_teardown: a wrong lake is refused"
)
def test_commands_with_the_lake_of_a_pipeline_with_the_same_name_change_nothing(
    kept: Kept, elsewhere: str, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    theirs = Kept(elsewhere, tmp_path / "theirs", ("public.*",), name=kept.pipeline.name, slot="theirs_slot")
    theirs.take(A, B)
    wrong = replace(kept.pipeline, lake=theirs.pipeline.lake)
    before = Left.of(theirs)
    refused(kept, Access(wrong, kept.dsn, kept.dsn), "was written from database|is another lake")
    assert Left.of(theirs) == before


@pytest.mark.thorough(
    "test_replication_with_another_lake_does_not_begin; test_teardown: a wrong lake is refused"
)
def test_commands_with_another_lake_of_the_same_source_change_nothing(kept: Kept, tmp_path: Path) -> None:
    """Two lakes of one database: only their ids distinguish them."""
    own = kept.pipeline
    other = tmp_path / "other"
    shutil.copytree(own.lake_root, other)
    record = read_epoch(kept.changelog)
    wrong = replace(own, lake=str(other))
    refused(kept, Access(wrong, kept.dsn, kept.dsn), "a copy of it")
    shutil.rmtree(other / "_pgrepl" / "changelog")
    make_changelog(str(other), record)
    refused(kept, Access(wrong, kept.dsn, kept.dsn), "which is another lake")


def test_copy_of_a_lake_that_is_not_mounted_is_not_taken_for_the_moved_lake(
    kept: Kept, tmp_path: Path
) -> None:
    root = Path(kept.pipeline.lake_root)
    shutil.copytree(root, tmp_path / "copy")
    root.rename(tmp_path / "disk")
    root.mkdir()
    copy = Access(replace(kept.pipeline, lake=str(tmp_path / "copy")), kept.dsn, kept.dsn)
    with pytest.raises(ConfigError, match=r"may still be there: .* is empty") as caught:
        pause_tables(copy, [A])
    assert f"SET lake = '{copy.pipeline.lake_root}'" in caught.value.hint
    root.rmdir()
    pause_tables(copy, [A])


@pytest.mark.thorough("unit/test_nested_lakes")
def test_lake_inside_the_lake_of_another_pipeline_is_not_begun(kept: Kept) -> None:
    """The other's teardown would take it along."""
    inner = replace(
        kept.pipeline, name="inner", slot="", publication="", lake=f"{kept.pipeline.lake_root}/public"
    )
    before = Left.of(kept)
    with pytest.raises(LakeError, match="would be inside another one"):
        take_tables(Access(inner, kept.dsn, kept.dsn))
    assert Left.of(kept) == before
    make_changelog(f"{kept.pipeline.lake_root}/inner", read_epoch(kept.changelog))
    with pytest.raises(LakeError, match="another lake is inside"):
        teardown(kept.access, drop_lake=True)
    with kept.source() as source:
        assert read_slot(source, kept.pipeline.slot) is not None


def test_tables_whose_changelog_is_out_of_sight_are_not_taken_over(
    kept: Kept, elsewhere: str, tmp_path: Path
) -> None:
    """A pipeline of the same name, of another source, must not take them over."""
    kept.pipeline = replace(kept.pipeline, slot="free")
    folder = Path(kept.pipeline.lake_root) / "_pgrepl"
    away = folder.rename(tmp_path / "away")
    before = Left.of(kept)
    for command in (take_tables, begin_new_epoch):
        with pytest.raises(LakeError, match="there is no changelog in this lake that says which"):
            command(Access(kept.pipeline, elsewhere, elsewhere))
        assert Left.of(kept) == before
    away.rename(folder)


def test_slot_of_another_database_is_not_dropped_though_the_names_agree(kept: Kept, elsewhere: str) -> None:
    """The pipeline's own slot is gone, and another database has one of its name."""
    name = kept.pipeline.slot
    execute(kept.dsn, f"select pg_drop_replication_slot('{name}')")
    execute(elsewhere, f"select pg_create_logical_replication_slot('{name}', 'pgoutput')")
    with pytest.raises(SlotError, match="there is no replication slot") as caught:
        teardown(kept.access)
    give_up = re.findall(r"--give-up (\S+),", caught.value.hint)
    kept_slots = [line for line in teardown(kept.access, give_up=give_up).kept if name in line]
    assert "it belongs to database" in kept_slots[0]
    with kept.source() as source:
        assert read_slot(source, name) is not None


def test_teardown_with_a_state_that_knows_nothing_names_the_record_at_the_source(
    kept: Kept, elsewhere: str
) -> None:
    """The apps of the pipeline hold their locks in another state database."""
    before = Left.of(kept)
    forgot_state = Access(kept.pipeline, kept.dsn, elsewhere)
    away = replace(forgot_state, pipeline=replace(kept.pipeline, lake=f"{kept.pipeline.lake}2"))
    for access in (forgot_state, away):
        for drop_lake in (False, True):
            says = r"has no record of pipeline \S+, but database \S+ of the source has one"
            with pytest.raises(StateError, match=says) as caught:
                teardown(access, drop_lake=drop_lake)
    assert Left.of(kept) == before
    give_up = re.findall(r"--give-up (\S+),", caught.value.hint)
    teardown(forgot_state, give_up=give_up)
    assert "the records of pipeline" in teardown(kept.access).dropped[-1], "nothing keeps the record"


def test_new_epoch_at_a_server_that_replaced_the_old_one_takes_the_name_of_what_it_gives_up(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = replace(read_epoch(kept.changelog), system_identifier="123")
    DeltaTable(kept.changelog).alter.set_table_description(record.to_json())
    with pytest.raises(ConfigError, match="would abandon") as caught:
        begin_new_epoch(kept.access)
    name = f"123/{record.database}"
    assert f"--give-up {name}," in caught.value.hint
    with StateDatabase(kept.dsn, "test") as state_db, kept.source() as source:
        ownership = SourceOwnership(kept.dsn, source, kept.pipeline, state_db)
        ownership.claim(read_server(source), record, replace_record=True)
    assert (
        f"slot {record.slot} and publication {record.publication} of the previous epoch are left in"
        in caplog.text
    )
    monkeypatch.setattr(SourceOwnership, "claim", stop)
    with pytest.raises(StoppedError):
        begin_new_epoch(kept.access, [name])


def test_new_epoch_under_other_names_drops_the_slot_and_publication_of_the_last(kept: Kept) -> None:
    """Nothing would name them any more, and the slot would hold WAL for ever."""
    old = kept.pipeline
    renamed = replace(old, slot=f"{old.slot}_2", publication=f"{old.publication}_2")
    with StateDatabase(kept.dsn, "test") as state_db, kept.source() as source:
        last = read_epoch(kept.changelog)
        ownership = SourceOwnership(kept.dsn, source, renamed, state_db)
        with pytest.raises(StateError, match="is recorded with slot"):
            ownership.claim(read_server(source), last)
        assert read_slot(source, old.slot) is not None
        ownership.claim(read_server(source), last, replace_record=True)
        assert read_slot(source, old.slot) is None
        recorded = state_db.read_pipeline(old.name)
    assert recorded is not None
    assert (recorded.slot, recorded.publication) == (renamed.slot, renamed.publication)
    assert Left.of(kept).publications == []


def test_replication_records_what_an_earlier_version_has_not(kept: Kept, monkeypatch, caplog) -> None:
    """Evidence that is missing contradicts nothing; afterwards it is there."""
    monkeypatch.setenv("PGREPL_DSN", kept.dsn)
    monkeypatch.delenv("PGREPL_STATE_DSN", raising=False)
    monkeypatch.setattr(replicate, "check_role", stop)
    earlier = replace(read_epoch(kept.changelog), database="", database_oid=0, layout=1)
    DeltaTable(kept.changelog).alter.set_table_description(earlier.to_json())
    execute(kept.dsn, "update _pgrepl.pipelines set database = '', database_oid = 0, lake_id = ''")
    replicate.main(["--pipeline", str(kept.file)])
    with StateDatabase(kept.dsn, "test") as state_db, kept.source() as source:
        server, recorded = read_server(source), state_db.read_pipeline(kept.pipeline.name)
    assert recorded is not None
    assert (recorded.database, recorded.database_oid) == (server.database, server.database_oid)
    changelog = open_changelog(kept.changelog)
    assert recorded.lake_id == changelog.metadata().id
    found = EpochRecord.from_json(changelog.metadata().description)
    assert (found.database_oid, found.pipeline_id) == (server.database_oid, recorded.id)
    assert found == earlier
    version = changelog.version()
    replicate.main(["--pipeline", str(kept.file)])
    assert open_changelog(kept.changelog).version() == version


def test_moved_lake_is_continued_and_recorded(kept: Kept, monkeypatch) -> None:
    monkeypatch.setenv("PGREPL_DSN", kept.dsn)
    monkeypatch.delenv("PGREPL_STATE_DSN", raising=False)
    monkeypatch.setattr(replicate, "check_role", stop)
    there = Path(kept.pipeline.lake_root).with_name("moved")
    Path(kept.pipeline.lake_root).rename(there)
    kept.configure(lake=str(there))
    replicate.main(["--pipeline", str(kept.file)])
    with StateDatabase(kept.dsn, "test") as state_db:
        recorded = state_db.read_pipeline(kept.pipeline.name)
    assert recorded is not None
    assert recorded.lake == str(there)


@pytest.mark.thorough("test_moved_lake_is_continued_and_recorded")
def test_lake_by_another_path_is_the_same(kept: Kept) -> None:
    """A link leads to it: it is neither moved nor copied."""
    link = Path(kept.pipeline.lake_root).with_name("link")
    link.symlink_to(kept.pipeline.lake_root)
    linked = Access(replace(kept.pipeline, lake=str(link)), kept.dsn, kept.dsn)
    pause_tables(linked, [A])
    execute(kept.dsn, "update _pgrepl.pipelines set lake_id = ''")
    resume_tables(linked, [A])


def test_replication_with_another_lake_does_not_begin(
    kept: Kept, elsewhere: str, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("PGREPL_DSN", elsewhere)
    monkeypatch.setenv("PGREPL_STATE_DSN", kept.dsn)
    before = Left.of(kept)
    assert replicate.main(["--pipeline", str(kept.file)]) == 78
    assert "leads to another database of that server" in caplog.text
    assert "--new-epoch" not in caplog.text
    with kept.access.state_db("test") as state_db:
        recorded = state_db.read_run(kept.pipeline.name)
    assert recorded is not None
    assert "leads to another database of that server" in recorded.reason
    kept.configure(lake=f"{kept.pipeline.lake}2")
    monkeypatch.setenv("PGREPL_DSN", kept.dsn)
    assert replicate.main(["--pipeline", str(kept.file)]) == 78
    assert "which has no changelog" in caplog.text
    with kept.access.state_db("test") as state_db:
        assert state_db.read_run(kept.pipeline.name) == recorded, "the state is that of another lake"
    kept.configure(lake=kept.pipeline.lake.removesuffix("2"))
    assert Left.of(kept) == before


def test_receiver_does_not_ask_another_database_for_the_slot(kept: Kept, elsewhere: str) -> None:
    """The server's answer would be taken for a lost slot. A connection may lead elsewhere when made again."""
    with pytest.raises(RewoundError, match="another database of that server") as caught:
        Receiver(elsewhere, kept.pipeline).start()
    assert "--new-epoch" not in caught.value.hint


@pytest.mark.thorough("test_status: a slot that is gone and a lake that is not ours are said")
def test_status_says_what_is_where(kept: Kept, elsewhere: str, monkeypatch) -> None:
    """The distances that it shows would be those of the wrong source."""
    monkeypatch.setenv("PGREPL_DSN", elsewhere)
    monkeypatch.setenv("PGREPL_STATE_DSN", kept.dsn)
    shown = " ".join(to_text(read_status(kept.pipeline)).split())
    assert "and the connection leads to another database of that server" in shown
    assert "--new-epoch" not in shown


def test_pause_does_without_a_source_that_is_away(kept: Kept) -> None:
    away = Access(kept.pipeline, "host=127.0.0.1 port=1 dbname=x user=u", kept.dsn)
    pause_tables(away, [A])
    assert kept.states()[A] == "paused"


def test_evidence_names_pipeline_source_and_lake(kept: Kept) -> None:
    with kept.access.state_db("test") as state_db, kept.source() as source:
        said = check(kept.pipeline, state_db, kept.dsn).describe()
        server = read_server(source)
    for name in (kept.pipeline.name, server.system_identifier, server.database, kept.pipeline.lake_root):
        assert name in said


class StoppedError(PgReplError):
    """The end of a command in a test."""


def stop(*_: object, **__: object) -> None:
    raise StoppedError("by the test")


def make_changelog(lake: str, record: EpochRecord) -> None:
    create_changelog(changelog_uri(lake), record)


def test_first_snapshot_into_an_unwritable_lake_changes_nothing(dsn: str, tmp_path: Path) -> None:
    """The next try may name another lake."""
    execute(dsn, *TABLES)
    access = Kept(dsn, tmp_path, ("public.*",), trust_table_owners=True).access
    (tmp_path / "file").touch()
    unwritable = replace(access.pipeline, lake=str(tmp_path / "file" / "lake"))
    with pytest.raises(LakeError, match="cannot write under"):
        take_tables(replace(access, pipeline=unwritable))
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select to_regnamespace('_pgrepl'), (select count(*) from pg_publication)")
        assert cursor.fetchone() == (None, 0)
