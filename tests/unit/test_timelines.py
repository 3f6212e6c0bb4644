"""The proof that a promoted standby continues the changelog: fork, slot and token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_provider_pgrepl.errors import RewoundError, SlotError, SourceConnectionError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.receiver.continuity import history_error, promotion_error
from airflow_provider_pgrepl.replication.source.connection import hosts_of
from airflow_provider_pgrepl.replication.source.server import Server, check_identity, parse_history
from airflow_provider_pgrepl.replication.source.slot import Slot

RECORD = EpochRecord("shop", Epoch(1), "7", 1, "s", "p", 5, LSN(50))
PROMOTED = Server(180000, "7", 2, "logical", in_recovery=False, database="shop", database_oid=5)
SLOT = Slot("s", "pgoutput", "shop", False, None, LSN(90), LSN(80), "reserved", None, True, True)
FORK = LSN(100)


def test_history_file_gives_the_end_of_each_earlier_timeline() -> None:
    text = (
        "1\t0/16B3748\tno recovery target specified\n\n# a comment\n2\t1/A0\tbefore 2026-01-01 00:00:00+00\n"
    )
    assert parse_history(text) == {1: LSN(0x16B3748), 2: LSN((1 << 32) + 0xA0)}
    assert parse_history("") == {}


def test_changelog_up_to_the_fork_continues_and_one_past_it_names_both_lsns() -> None:
    written = LSN(500)
    assert history_error(PROMOTED, written, RECORD, FORK, FORK) is None
    error = history_error(PROMOTED, written, RECORD, LSN(FORK + 8), FORK)
    assert isinstance(error, RewoundError)
    assert f"at {FORK}" in error.message
    assert f"up to {LSN(FORK + 8)}" in error.message
    assert "--new-epoch" in error.hint
    # The recorded timeline is no ancestor of the server's.
    assert history_error(PROMOTED, written, RECORD, LSN(1), None) is not None


def test_promoted_standby_needs_a_synchronized_slot_and_a_token() -> None:
    """A file-level copy of the primary has the slot at the right position, and was never synchronized."""
    assert promotion_error(PROMOTED, RECORD, SLOT, token=5) is None
    assert isinstance(promotion_error(PROMOTED, RECORD, replace(SLOT, synced=False), token=5), SlotError)
    assert isinstance(promotion_error(PROMOTED, RECORD, SLOT, token=0), RewoundError)
    same = replace(PROMOTED, timeline=RECORD.timeline)
    assert promotion_error(same, RECORD, replace(SLOT, synced=False), token=0) is None


def test_replication_connection_to_another_timeline_is_tried_again() -> None:
    check_identity(PROMOTED, "7", 2)
    check_identity(replace(PROMOTED, in_recovery=True), "7", 3)
    for identity in (("7", 1), ("8", 2)):
        with pytest.raises(SourceConnectionError, match="another server"):
            check_identity(PROMOTED, *identity)


def test_hosts_of_a_connection_string_are_paired_with_ports_as_libpq_does() -> None:
    assert hosts_of({"host": "a,b", "port": "1,2"}) == [
        {"host": "a", "port": "1"},
        {"host": "b", "port": "2"},
    ]
    assert hosts_of({"host": "a,b", "hostaddr": "10.0.0.1,", "port": "5"}) == [
        {"host": "a", "hostaddr": "10.0.0.1", "port": "5"},
        {"host": "b", "port": "5"},
    ]
    assert hosts_of({"port": "5"}) == []
