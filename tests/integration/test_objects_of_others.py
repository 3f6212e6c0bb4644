"""Slots, publications and event triggers that have a pipeline's names, and are not the pipeline's."""

from __future__ import annotations

import shutil
from dataclasses import replace

import psycopg2.errors
import pytest

from airflow_provider_pgrepl.errors import ConfigError, PublicationError, SlotError, SnapshotError
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from airflow_provider_pgrepl.replication.app.operations.teardown import teardown
from airflow_provider_pgrepl.replication.app.snapshot import take_tables
from airflow_provider_pgrepl.replication.app.source_ownership import SourceOwnership
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.source import publication
from airflow_provider_pgrepl.replication.source.event_trigger import trigger as event_trigger
from airflow_provider_pgrepl.replication.source.event_trigger.sql import removal_script
from airflow_provider_pgrepl.replication.source.preflight.selection import resolve_tables
from airflow_provider_pgrepl.replication.source.server import read_server, source_of
from airflow_provider_pgrepl.replication.source.slot import drop_slot, read_slot
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from tests.conftest import closing_connection
from tests.support.kept import TABLES, B, Kept, kept_tables
from tests.support.replicated import execute


@pytest.fixture
def kept(dsn, tmp_path):
    return kept_tables(dsn, tmp_path)


def claim(kept: Kept) -> None:
    """Claim slot and publication, as a snapshot does before it drops or creates anything at the source."""
    with StateDatabase(kept.dsn, "test") as state_db, kept.source() as source:
        ownership = SourceOwnership(kept.dsn, source, kept.pipeline, state_db)
        ownership.claim(read_server(source), read_epoch(kept.changelog))


def source_name(kept: Kept) -> str:
    with kept.source() as source:
        return source_of(read_server(source)).name


def recreate_publication(kept: Kept) -> None:
    """Recreate the publication with another table, owned by another role."""
    name, role = kept.pipeline.publication, f"dba_{kept.pipeline.name}"
    execute(
        kept.dsn,
        f"drop publication {name}",
        f"create role {role}",
        f"create publication {name} for table b",
        f"alter publication {name} owner to {role}",
    )


def recreate_slot(kept: Kept, arguments: str) -> None:
    """Recreate the slot in another database of the server."""
    name = kept.pipeline.slot
    with kept.source() as source:
        source.cursor().execute("select pg_drop_replication_slot(%s)", (name,))
    with closing_connection(f"{kept.dsn} dbname=postgres") as other:
        other.cursor().execute(f"select pg_create_{arguments}", (name,))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("physical_replication_slot(%s, true)", "it is a physical slot"),
        ("logical_replication_slot(%s, 'pgoutput')", "it belongs to database postgres"),
    ],
)
def test_slot_that_another_program_made_under_the_name_is_kept(kept, arguments, reason):
    recreate_slot(kept, arguments)
    with pytest.raises(SlotError, match=f"was not made by pipeline .*: {reason}"):
        claim(kept)
    done = teardown(kept.access, give_up=[source_name(kept)])
    assert f"slot {kept.pipeline.slot}: not known to be this pipeline's: {reason}" in done.kept
    with kept.source() as source:
        assert read_slot(source, kept.pipeline.slot) is not None
        source.cursor().execute("select pg_drop_replication_slot(%s)", (kept.pipeline.slot,))


def test_slot_that_another_program_made_while_ours_could_not_be_is_kept(dsn, tmp_path):
    """The server creates no slot while a transaction is open that wrote before."""
    execute(dsn, *TABLES)
    tried = Kept(dsn, tmp_path, ("public.*",), trust_table_owners=True, slot_timeout_s=1)
    with closing_connection(dsn) as open_one, open_one.cursor() as cursor:
        open_one.autocommit = False
        cursor.execute("insert into a values (1)")
        with pytest.raises(SnapshotError, match="transaction"):
            take_tables(tried.access)
        open_one.rollback()
    execute(dsn, f"select pg_create_logical_replication_slot('{tried.pipeline.slot}', 'pgoutput')")
    with pytest.raises(SlotError, match="was not made by pipeline"):
        take_tables(tried.access)
    assert f"slot {tried.pipeline.slot}: not known to be this pipeline's" in teardown(tried.access).kept
    with tried.source() as source:
        assert read_slot(source, tried.pipeline.slot) is not None


def test_slot_of_an_epoch_whose_beginning_failed_is_noted_as_gone(kept, monkeypatch):
    with StateDatabase(kept.dsn, "test") as state_db, kept.source() as source:
        ownership = SourceOwnership(kept.dsn, source, kept.pipeline, state_db)
        ownership.claim(read_server(source), read_epoch(kept.changelog))
        with pytest.raises(KeyboardInterrupt), ownership.record_slot_loss():
            raise KeyboardInterrupt
        assert state_db.read_pipeline(kept.pipeline.name).slot_owned, "it is there"
        with pytest.raises(KeyboardInterrupt), ownership.record_slot_loss():
            drop_slot(source, kept.pipeline.slot)
            raise KeyboardInterrupt
        assert not state_db.read_pipeline(kept.pipeline.name).slot_owned


def test_slot_that_another_program_made_anew_after_the_epoch_began_is_kept(kept):
    """The new slot has confirmed more than the changelog has."""
    slot = kept.pipeline.slot
    execute(
        kept.dsn,
        f"select pg_drop_replication_slot('{slot}')",
        "insert into a values (1)",
        f"select pg_create_logical_replication_slot('{slot}', 'pgoutput')",
    )
    done = teardown(kept.access, give_up=[source_name(kept)])
    (said,) = [what for what in done.kept if what.startswith("slot ")]
    assert "has confirmed" in said
    with kept.source() as source:
        assert read_slot(source, slot) is not None


def test_publication_that_another_role_made_under_the_name_is_kept(kept):
    recreate_publication(kept)
    with pytest.raises(PublicationError, match=r"was not made by .*: role dba_\S+ owns it"):
        claim(kept)
    remove_tables(kept.access, [B])
    done = teardown(kept.access)
    (said,) = [what for what in done.kept if what.startswith("publication ")]
    assert "role dba_" in said
    with kept.source() as source:
        found = publication.read_publication(source, kept.pipeline.publication)
    assert found is not None
    assert set(map(str, found.tables)) == {B}


def test_publication_is_the_pipelines_by_its_comment_where_no_changelog_says_its_oid(kept):
    """A first snapshot that fails before an epoch begins leaves a publication whose oid is not recorded."""
    with kept.source() as source:
        relations = resolve_tables(source, kept.pipeline)
        publication.drop_publication(source, kept.pipeline.publication)
        publication.create_publication(
            source, kept.pipeline.publication, relations, made_for=kept.pipeline.name
        )
    shutil.rmtree(kept.changelog)
    assert f"publication {kept.pipeline.publication}" in teardown(kept.access).dropped


def audited(dsn: str, trigger: str) -> None:
    execute(
        dsn,
        "create function audit_ddl() returns event_trigger language plpgsql as $$ begin null; end $$",
        f"create event trigger {trigger} on ddl_command_end execute function audit_ddl()",
    )


def triggers(dsn: str) -> list[str]:
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select evtname::text from pg_event_trigger order by 1")
        return [name for (name,) in cursor.fetchall()]


def test_event_triggers_of_another_pipeline_with_the_same_name_are_kept(kept, dsn):
    """Its state is in another database, and its slot, publication and lake have other names."""
    first = replace(kept.pipeline, event_trigger=True)
    second = replace(
        first, publication=f"{first.publication}_2", slot=f"{first.slot}_2", lake=f"{first.lake}2"
    )
    names = [f"pgrepl_{first.name}", f"pgrepld_{first.name}"]
    with kept.source() as source:
        event_trigger.install(source, first)
        key = event_trigger.read_key(source, first.name)
        event_trigger.keep_installed(source, replace(second, event_trigger=False))
        event_trigger.uninstall(source, second)
        with pytest.raises(ConfigError, match=f"for publication {first.publication}, and was not made"):
            event_trigger.keep_installed(source, second)
        assert triggers(dsn) == names
        execute(dsn, *(f"drop event trigger {name}" for name in names))
        event_trigger.uninstall(source, second)
        assert event_trigger.is_present(source, first), "its function"
        event_trigger.install(source, first)
        assert event_trigger.read_key(source, first.name) == key
        event_trigger.install(source, second, [first.publication])
        event_trigger.uninstall(source, second)
        assert triggers(dsn) == []


@pytest.mark.parametrize("installed", [False, True], ids=["alone", "beside one of ours"])
def test_event_trigger_that_a_person_made_under_the_name_is_kept(kept, dsn, installed):
    trigger = f"pgrepl_{kept.pipeline.name}"
    if installed:
        with kept.source() as source:
            event_trigger.install(source, kept.pipeline)
        execute(dsn, f"drop event trigger {trigger}")
    audited(dsn, trigger)
    with kept.source() as source:
        with pytest.raises(ConfigError, match=r"calls public.audit_ddl, and was not made for pipeline"):
            event_trigger.install(source, replace(kept.pipeline, event_trigger=True))
        event_trigger.keep_installed(source, replace(kept.pipeline, event_trigger=False))
        assert not event_trigger.is_present(source, kept.pipeline)
        with pytest.raises(psycopg2.errors.RaiseException, match="calls a function outside"):
            source.cursor().execute(removal_script(kept.pipeline.name))
        source.cursor().execute("rollback")
    assert any(f"event trigger {trigger}, which" in what for what in teardown(kept.access).kept)
    assert triggers(dsn) == [trigger]
