"""A pipeline that begins where the slot of another program stands: no change is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from airflow_provider_pgrepl.errors import BusyError, ConfigError, PublicationError, SlotError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.snapshot import take_over
from airflow_provider_pgrepl.replication.events.stream import json_lines
from airflow_provider_pgrepl.replication.source.connection import connect_replication
from airflow_provider_pgrepl.replication.source.slot import read_slot
from tests.conftest import closing_connection
from tests.support.in_process import InProcess
from tests.support.replicated import execute

OTHER = "of_another"
TABLES = ("public.a", "public.b")


class Replaced(InProcess):
    other: str


@pytest.fixture
def replaced(spark, dsn, tmp_path) -> Iterator[Replaced]:
    """A source whose changes another program has read, up to a place, and confirmed."""
    name = f"{OTHER}_{dsn.split('dbname=')[1].split()[0]}"
    execute(
        dsn,
        "create table a (id int primary key, v text)",
        "create table b (id int primary key, v text)",
        "insert into a values (1, 'before')",
        "create publication other for table a, b",
        f"select pg_create_logical_replication_slot('{name}', 'pgoutput')",
        "insert into a values (2, 'read')",
        f"select pg_logical_slot_get_binary_changes('{name}', null, null, 'proto_version', '1',"
        " 'publication_names', 'other')",
    )
    options = {"publication": "other", "publication_mode": "use"}
    one = Replaced(spark, dsn, tmp_path, TABLES, **options)
    one.other = name
    yield one
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        cursor.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s"
            " and not active",
            (name,),
        )


def changes(one: Replaced) -> list[tuple[str, str, int]]:
    lines = "".join(json_lines(one.pipeline)).splitlines()
    found = map(json.loads, lines)
    return [(change["table"], change["op"], (change["data"] or change["old"])["id"]) for change in found]


def test_take_over_streams_unconfirmed_changes_first_and_lake_equals_source(replaced: Replaced) -> None:
    execute(
        replaced.dsn,
        "insert into a values (3, 'unread')",
        "update a set v = 'changed' where id = 1",
        "alter table b add w int",
        "insert into b values (1, 'unread', 2)",
        "delete from a where id = 2",
    )
    replaced.snapshot("--take-over", replaced.other)
    execute(replaced.dsn, "insert into a values (4, 'after')")
    replaced.catch_up()
    replaced.assert_equal(*TABLES)
    assert changes(replaced) == [
        ("public.a", "insert", 3),
        ("public.a", "update", 1),
        ("public.b", "insert", 1),
        ("public.a", "delete", 2),
        ("public.a", "insert", 4),
    ]
    with replaced.source() as source:
        assert read_slot(source, replaced.other) is not None


@pytest.mark.thorough("test_run_killed_before_any_table_was_copied_is_continued_without_the_other_slot")
def test_run_again_it_copies_nothing_again(replaced: Replaced) -> None:
    replaced.snapshot("--take-over", replaced.other)
    copied = replaced.states()
    execute(replaced.dsn, f"select pg_drop_replication_slot('{replaced.other}')")
    replaced.snapshot("--take-over", replaced.other)
    assert replaced.states() == copied
    replaced.catch_up()
    replaced.assert_equal(*TABLES)


def test_run_killed_before_any_table_was_copied_is_continued_without_the_other_slot(
    replaced: Replaced, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(replaced.dsn, "insert into a values (3, 'unread')")
    with monkeypatch.context() as patch:
        where = "airflow_provider_pgrepl.replication.app.snapshot_tables.TableSnapshotter.take"
        patch.setattr(where, lambda *_: 1 / 0)
        assert replaced.run("snapshot", "--take-over", replaced.other) == process.CRASHED
    # The epoch has begun there already: neither the other slot nor the option is needed any more.
    execute(replaced.dsn, f"select pg_drop_replication_slot('{replaced.other}')")
    replaced.snapshot()
    replaced.catch_up()
    replaced.assert_equal(*TABLES)
    assert changes(replaced) == [("public.a", "insert", 3)]


def refused(one: Replaced, slot: str) -> Exception:
    """Return the error with which a takeover is rejected, and check that nothing was begun."""
    with pytest.raises((BusyError, SlotError, PublicationError, ConfigError)) as caught:
        take_over(Access(one.pipeline, one.dsn, one.dsn), slot)
    with one.source() as source:
        assert read_slot(source, one.pipeline.slot) is None
    return caught.value


def test_rejected_take_over_names_cause_and_creates_no_slot(replaced: Replaced) -> None:
    execute(replaced.dsn, "insert into a values (3, 'unread')")
    assert "there is no slot nobody" in str(refused(replaced, "nobody"))
    stream = connect_replication(replaced.dsn, "another program")
    stream.cursor().start_replication(
        slot_name=replaced.other, options={"proto_version": "1", "publication_names": "other"}
    )
    assert isinstance(refused(replaced, replaced.other), BusyError)
    stream.close()
    execute(replaced.dsn, "drop publication other", "create publication other for table a, b")
    replaced.configure(publication_mode="create")
    assert "publication_mode" in str(refused(replaced, replaced.other))


def test_a_publication_that_was_made_later_is_refused(replaced: Replaced) -> None:
    execute(replaced.dsn, "insert into a values (3, 'unread')", "create publication later for table a, b")
    replaced.configure(publication="later")
    assert "was not there yet" in str(refused(replaced, replaced.other))


def test_a_slot_of_another_plugin_is_refused(replaced: Replaced) -> None:
    name = f"{replaced.other}_text"
    execute(replaced.dsn, f"select pg_create_physical_replication_slot('{name}')")
    try:
        assert "it is a physical slot" in str(refused(replaced, name))
    finally:
        execute(replaced.dsn, f"select pg_drop_replication_slot('{name}')")
