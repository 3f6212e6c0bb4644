"""The checks that the changelog can continue from the source: same server, history, slot and publication."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import PublicationError, RewoundError, SlotError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.source.publication import read_identity
from airflow_provider_pgrepl.replication.source.server import (
    Server,
    known_source,
    read_server,
    source_of,
    written_lsn,
)
from airflow_provider_pgrepl.replication.source.slot import Slot, read_slot, why_invalidated

if TYPE_CHECKING:
    from psycopg2.extensions import connection


def check(source: connection, record: EpochRecord, durable_lsn: LSN) -> LSN:
    """Return the slot's confirmed LSN.

    Raises RewoundError, SlotError or PublicationError if the changelog cannot continue from the source.
    """
    server = check_source(source, record)
    if (rewound := history_error(server, written_lsn(source), record, durable_lsn)) is not None:
        raise rewound
    check_publication(source, record.publication, record.publication_oid)
    slot = check_slot(source, record.slot, server)
    if (moved := slot_error(slot, durable_lsn)) is not None:
        raise moved
    return slot.confirmed_flush_lsn or LSN(0)


def check_slot(source: connection, name: str, server: Server) -> Slot:
    """Return the slot. Raises SlotError if it does not exist, or if the server has invalidated it."""
    slot = read_slot(source, name)
    if slot is None:
        raise missing_slot(name, server)
    if slot.invalidation:
        raise SlotError(why_invalidated(source, slot), errors.NEW_EPOCH)
    return slot


def check_source(source: connection, record: EpochRecord) -> Server:
    """Return the server. Raises RewoundError if the changelog is from another server or database.

    Call this before every other check: at another source, slot and publication differ too.
    """
    server, slot = read_server(source), read_slot(source, record.slot)
    before = known_source(record, server, {} if slot is None else {slot.name: slot})
    if before.differs(server):
        raise RewoundError(
            f"the changelog was written from {before}, and the connection leads to another"
            f" {before.kind_of(server)}: {source_of(server)}",
            "check the connection (conn_id, or PGREPL_DSN). Nothing was changed",
        )
    return server


def history_error(
    server: Server, written: LSN, record: EpochRecord | None, durable_lsn: LSN
) -> RewoundError | None:
    """Return the error if the source's timeline changed or its WAL is before `durable_lsn`, otherwise None.

    `written`: the server's WAL position, read after `durable_lsn`. `record`: None if there is no changelog.
    """
    if record is not None and server.timeline != record.timeline:
        return RewoundError(
            f"the source is on timeline {server.timeline}, the changelog's is {record.timeline}:"
            " it was restored or failed over, and may lack transactions that are in the lake, or it is a copy"
            " of the source",
            errors.prove_source(),
        )
    if written >= durable_lsn:
        return None
    replays = ", or it has not yet replayed its primary's WAL" if server.in_recovery else ""
    return RewoundError(
        f"the WAL position of the source ({written}) is before {durable_lsn}, up to where its changes were"
        f" received: it was restored to an earlier state, or is a copy of the source{replays}",
        errors.prove_source(),
    )


def slot_error(slot: Slot, durable_lsn: LSN) -> SlotError | None:
    """Return the error if the slot has confirmed an LSN past the last durable LSN, or None.

    `durable_lsn`: read after the slot, because a receiver advances both.
    """
    confirmed = slot.confirmed_flush_lsn or LSN(0)
    if confirmed <= durable_lsn:
        return None
    return SlotError(
        f"the slot {slot.name} has confirmed {confirmed}, beyond {durable_lsn}, the last durable LSN:"
        " another program advanced or recreated the slot, or the lake's storage lost commits, and"
        " the changes in between are lost; or this server is a copy of the source",
        errors.prove_source(),
    )


def missing_slot(name: str, server: Server) -> SlotError:
    """Return the error for a source that does not have the slot."""
    return SlotError(
        f"there is no replication slot {name} in {source_of(server)}: it was dropped, or this server is a"
        " copy of the source, which has none",
        errors.prove_source(),
    )


def check_publication(source: connection, name: str, recorded_oid: int) -> None:
    """Raise PublicationError if the publication is missing, recreated, or leaves out kinds of changes."""
    found = read_identity(source, name)
    if found is None:
        raise PublicationError(f"the publication {name} no longer exists", errors.NEW_EPOCH)
    oid, is_complete = found
    if oid != recorded_oid:
        raise PublicationError(
            f"the publication {name} was dropped and created again; changes between are lost",
            errors.NEW_EPOCH,
        )
    if not is_complete:
        raise PublicationError(
            f"the publication {name} was altered: it no longer publishes all of insert, update, delete"
            " and truncate, so changes since are lost",
            f"ALTER PUBLICATION {quote_identifier(name)} SET (publish = 'insert, update, delete, truncate');"
            f" then {errors.NEW_EPOCH}",
        )
