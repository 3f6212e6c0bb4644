"""Whether source and changelog continue each other: same server and history, same slot and publication."""

from __future__ import annotations

from psycopg2.extensions import connection

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import PublicationError, RewoundError, SlotError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.source.known_source import known_source, source_of
from airflow_provider_pgrepl.replication.source.publication import read_identity
from airflow_provider_pgrepl.replication.source.server import Server, read_server, written_lsn
from airflow_provider_pgrepl.replication.source.slot.record import Slot, read_slot, why_invalidated


def check(source: connection, record: EpochRecord, durable_lsn: LSN) -> LSN:
    """The slot's confirmed LSN. Raises RewoundError, SlotError or PublicationError when history is broken."""
    server = check_source(source, record)
    _check_history(source, server, record, durable_lsn)
    check_publication(source, record.publication, record.publication_oid)
    slot = check_slot(source, record.slot)
    confirmed = slot.confirmed_flush_lsn or LSN(0)
    if confirmed > durable_lsn:
        raise SlotError(
            f"the slot {record.slot} stands at {confirmed}, beyond {durable_lsn}, the last durable LSN:"
            " somebody else moved it or created it again, or the lake's storage lost what it had confirmed;"
            " changes between are lost",
            hints.NEW_EPOCH,
        )
    return confirmed


def check_slot(source: connection, name: str) -> Slot:
    """Return the slot. Raises SlotError when it is gone, or when the server has invalidated it."""
    slot = read_slot(source, name)
    if slot is None:
        raise SlotError(f"the replication slot {name} no longer exists", hints.NEW_EPOCH)
    if slot.invalidation:
        raise SlotError(why_invalidated(source, slot), hints.NEW_EPOCH)
    return slot


def check_source(source: connection, record: EpochRecord) -> Server:
    """The server, which is the changelog's, as is the database. Raises RewoundError for others.

    To be asked before anything else, because at another source no slot and no publication is what it was.
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


def _check_history(source: connection, server: Server, record: EpochRecord, durable_lsn: LSN) -> None:
    if server.timeline != record.timeline:
        raise RewoundError(
            f"the source is on timeline {server.timeline}, the changelog's is {record.timeline}:"
            " it was restored or failed over, and may lack transactions that are in the lake",
            hints.NEW_EPOCH,
        )
    now = written_lsn(source)
    if now < durable_lsn:
        raise RewoundError(
            f"the source stands at {now}, before {durable_lsn}, the last durable LSN: it was set back",
            hints.NEW_EPOCH,
        )


def check_publication(source: connection, name: str, recorded_oid: int) -> None:
    """Raises PublicationError when it is not the one of this oid any more, or publishes less."""
    found = read_identity(source, name)
    if found is None:
        raise PublicationError(f"the publication {name} no longer exists", hints.NEW_EPOCH)
    oid, is_complete = found
    if oid != recorded_oid:
        raise PublicationError(
            f"the publication {name} was dropped and created again; changes between are lost", hints.NEW_EPOCH
        )
    if not is_complete:
        raise PublicationError(
            f"the publication {name} was altered: it no longer publishes insert, update, delete and truncate,"
            " so changes since are lost",
            f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate'); then"
            f" {hints.NEW_EPOCH}",
        )
