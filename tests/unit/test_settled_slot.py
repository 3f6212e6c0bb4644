"""source/slot_creation.py: from where a new slot must decode."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source.slot import Slot
from airflow_provider_pgrepl.replication.source.slot_creation import _is_settled


@pytest.mark.parametrize(
    ("confirmed", "restart", "expected"), [(200, 100, True), (200, 99, False), (199, 100, False)]
)
def test_slot_is_used_only_when_it_decodes_from_behind_its_first_consistent_point(
    confirmed: int, restart: int, expected: bool
) -> None:
    """From before it, rows may be decoded by a catalog from before DDL that ran meanwhile."""
    slot = Slot("s", "pgoutput", "d", False, None, LSN(confirmed), LSN(restart), "reserved", None)
    assert _is_settled(slot, LSN(100), LSN(200)) is expected
