"""The position of another program's slot: a slot of our own begins where that one stands.

pg_copy_logical_replication_slot copies restart_lsn and confirmed_flush_lsn, so the server sends the new slot
all that the other's reader has not confirmed (PostgreSQL's manual, 9.28.6).
"""

from __future__ import annotations

import logging
from contextlib import closing

import psycopg2
import psycopg2.errors

from airflow_provider_pgrepl.errors import BusyError, PublicationError, SlotError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, rows
from airflow_provider_pgrepl.replication.source.permanent import drop_unused
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.slot import READING_WAL_S, read_slot, reason_to_keep
from airflow_provider_pgrepl.replication.source.time_limit import patience

log = logging.getLogger(__name__)


def take_over_slot(dsn: str, name: str, other: str, publication: str) -> LSN:
    """Create the slot `name` where `other` stands, and return that position; `other` stays as it is.

    Raises BusyError while somebody reads the other slot; SlotError when it is not there, or cannot be
    continued; PublicationError when the publication was not there yet at its position. No slot is left then.
    """
    with closing(connect(dsn, "slot control")) as control:
        _check(control, other)
        with source_errors(f"copying slot {other}"):
            rows(control, "SELECT pg_catalog.pg_copy_logical_replication_slot(%s, %s, false)", (other, name))
        try:
            _check_decodes(control, name, publication)
            copied = read_slot(control, name)
            if copied is None or copied.confirmed_flush_lsn is None:
                raise SlotError(f"the slot {name} was dropped while it was made", "run the same again")
        except BaseException:
            drop_unused(dsn, control, name)
            raise
    log.info("slot %s begins where slot %s stands, at %s", name, other, copied.confirmed_flush_lsn)
    return copied.confirmed_flush_lsn


def _check(control: Connection, other: str) -> None:
    slot = read_slot(control, other)
    if slot is None:
        raise SlotError(
            f"there is no slot {other} whose position could be taken over",
            "name the slot of the program that is replaced, or begin without it",
        )
    invalid = f"the server has invalidated it ({slot.invalidation})" if slot.invalidation else None
    if reason := reason_to_keep(control, slot) or invalid:
        raise SlotError(
            f"the position of slot {other} cannot be taken over: {reason}",
            "begin without it: what it held and nobody has read is not published then",
        )
    if slot.active:
        raise BusyError(
            f"slot {other} is still read, by pid {slot.active_pid}",
            "stop the program that is replaced, then run the same again",
        )


def _check_decodes(control: Connection, name: str, publication: str) -> None:
    """Whether the first change can be decoded, which needs the publication as of then.

    Where it is missing, servers before 18 raise an error; from 18 on they leave changes out, with a warning.
    """
    options = ("proto_version", "1", "publication_names", quote_identifier(publication))
    peek = "SELECT count(*) FROM pg_catalog.pg_logical_slot_peek_binary_changes(%s, NULL, 1, %s, %s, %s, %s)"
    with source_errors(f"reading slot {name}"), patience(control, READING_WAL_S):
        control.notices = []
        try:
            rows(control, peek, (name, *options))
            # Whatever the server's language is.
            is_missing = any(publication in notice for notice in control.notices)
        except psycopg2.errors.UndefinedObject:
            is_missing = True
    if is_missing:
        raise PublicationError(
            f"the publication {publication} was not there yet where the slot stands",
            "name the publication that the replaced program has used",
        )
