"""The walsender that reads a slot, and what it may have missed of an altered publication."""

from __future__ import annotations

import logging

from airflow_provider_pgrepl.replication.source.connection import Connection, row
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.slot import read_slot

log = logging.getLogger(__name__)

_INVALIDATES_SINCE = {14: 140018, 15: 150013, 16: 160009, 17: 170005}
"""By major version, the release from which a commit that alters the catalog invalidates what a walsender
remembers also while it decodes transactions that had begun before; others, from 18 on, always did."""


def is_told_of_publications(server_version: int) -> bool:
    """Whether this server's walsenders notice an ALTER PUBLICATION within transactions that began before."""
    return server_version >= _INVALIDATES_SINCE.get(server_version // 10000, 0)


def renew_walsender(connection: Connection, slot: str) -> bool:
    """End the walsender of a slot where it may remember what a publication was; whether one was ended.

    Whoever reads the slot connects again, and nothing is lost: the slot keeps what was not confirmed.
    """
    if is_told_of_publications(connection.server_version):
        return False
    found = read_slot(connection, slot)
    if found is None or found.active_pid is None:
        return False
    with source_errors(f"ending the walsender of slot {slot}"):
        row(connection, "SELECT pg_catalog.pg_terminate_backend(%s)", (found.active_pid,))
    log.info(
        "ended the walsender (pid %d) of slot %s: this server's version may not tell it of tables that were"
        " added to its publication; whoever reads the slot connects again",
        found.active_pid,
        slot,
    )
    return True
