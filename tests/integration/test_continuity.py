"""receiver/continuity.py: a source that is not as the changelog left it is rejected before it is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import PublicationError, RewoundError, SlotError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver import continuity
from tests.support.received import Received
from tests.support.replicated import execute


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Received:
    execute(dsn, "create table t(id int primary key)")
    pipeline = Received(dsn, tmp_path, ("public.t",))
    pipeline.begin()
    return pipeline


def check(received: Received, durable_lsn: LSN | None = None, **changed: Any) -> LSN:
    """Check a changelog whose record differs in some fields from what the source is now."""
    record: EpochRecord = replace(read_epoch(received.changelog), **changed)
    with received.source() as source:
        durable = received.durable_lsn if durable_lsn is None else durable_lsn
        return continuity.check(source, record, durable, token=1).confirmed_lsn


def test_source_as_it_was_left_continues_at_the_confirmed_lsn(received: Received) -> None:
    assert check(received) == received.slot().confirmed_flush_lsn


def test_cluster_with_another_system_identifier_is_rejected(received: Received) -> None:
    with pytest.raises(RewoundError, match="another server"):
        check(received, system_identifier="1")


@pytest.mark.parametrize("change", [-1, 1], ids=["promoted", "restored"])
def test_source_on_another_timeline_is_rejected(received: Received, change: int) -> None:
    """A promoted standby has a higher timeline, a server restored from an older backup a lower one."""
    timeline = read_epoch(received.changelog).timeline
    with pytest.raises(RewoundError, match="timeline"):
        check(received, timeline=timeline + change)


def test_source_behind_the_durable_lsn_is_rejected(received: Received) -> None:
    """The epoch began before the state to which the source was restored."""
    with pytest.raises(RewoundError, match="restored to an earlier state"):
        check(received, durable_lsn=LSN(received.source_lsn() + (1 << 30)))


def test_slot_beyond_the_durable_lsn_is_rejected(received: Received) -> None:
    confirmed = received.slot().confirmed_flush_lsn
    assert confirmed is not None
    assert check(received, durable_lsn=confirmed) == confirmed
    with pytest.raises(SlotError, match="beyond"):
        check(received, durable_lsn=LSN(confirmed - 1))


@pytest.mark.parametrize("change", [-1, 1])
def test_publication_with_another_oid_is_rejected(received: Received, change: int) -> None:
    """Oids wrap around, so a new publication may have a lower one."""
    oid = read_epoch(received.changelog).publication_oid
    with pytest.raises(PublicationError, match="created again"):
        check(received, publication_oid=oid + change)


@pytest.mark.parametrize("operation", ["insert", "update", "delete", "truncate"])
def test_publication_without_an_operation_is_rejected(received: Received, dsn: str, operation: str) -> None:
    others = {"insert", "update", "delete", "truncate"} - {operation}
    execute(dsn, f"alter publication {received.pipeline.publication} set (publish = '{', '.join(others)}')")
    with pytest.raises(PublicationError, match="no longer publishes"):
        check(received)
