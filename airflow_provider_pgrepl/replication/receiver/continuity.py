"""The checks that the changelog can continue from the source: same server, history, slot and publication.

A promoted standby has the same system identifier, and a later timeline. The changelog continues from it if
that is proven ([decision 73](docs/decisions/0073-a-promoted-standby-continues-the-epoch.md)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import BusyError, PgReplError, PublicationError, RewoundError, SlotError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.source.publication import read_identity
from airflow_provider_pgrepl.replication.source.server import (
    Server,
    find_fork,
    known_source,
    read_server,
    source_of,
    written_lsn,
)
from airflow_provider_pgrepl.replication.source.slot import Slot, read_slot, why_invalidated

if TYPE_CHECKING:
    from psycopg2.extensions import connection


@dataclass(frozen=True)
class Continuation:
    """The state of a source from which the changelog can continue.

    `confirmed_lsn`: that of the slot. `fork_lsn`: the LSN at which a promoted standby left the timeline that
    the changelog records; None if the source is on that timeline.
    """

    confirmed_lsn: LSN
    timeline: int
    fork_lsn: LSN | None = None


def check(source: connection, record: EpochRecord, durable_lsn: LSN, token: int) -> Continuation:
    """Return the state of the source. `token`: the changelog's; the caller checks that the source has it.

    Raises RewoundError, SlotError or PublicationError if the changelog cannot continue from the source.
    """
    server = check_source(source, record)
    fork_lsn = check_history(source, server, record, durable_lsn)
    check_publication(source, record.publication, record.publication_oid)
    slot = check_slot(source, record.slot, server)
    if (error := slot_error(slot, durable_lsn) or promotion_error(server, record, slot, token)) is not None:
        raise error
    return Continuation(slot.confirmed_flush_lsn or LSN(0), server.timeline, fork_lsn)


def check_history(source: connection, server: Server, record: EpochRecord, durable_lsn: LSN) -> LSN | None:
    """Return the LSN at which the server left the recorded timeline; None if it is on that timeline.

    Raises RewoundError if the server's history does not have all that the changelog has.
    """
    fork_lsn = find_fork(source, server, record.timeline)
    if (rewound := history_error(server, written_lsn(source), record, durable_lsn, fork_lsn)) is not None:
        raise rewound
    return fork_lsn


def check_slot(source: connection, name: str, server: Server) -> Slot:
    """Return the slot. Raises SlotError if it does not exist, or if the server has invalidated it, BusyError
    while the server is a standby that synchronizes it."""
    slot = read_slot(source, name)
    if slot is None:
        raise missing_slot(name, server)
    if server.in_recovery and slot.synced:
        raise BusyError(
            f"the server is a standby that synchronizes slot {name}, which can be read at the primary only",
            "list both hosts in the connection, with target_session_attrs=read-write; or wait until the"
            " standby is promoted",
        )
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
    server: Server,
    written: LSN,
    record: EpochRecord | None,
    durable_lsn: LSN,
    fork_lsn: LSN | None = None,
) -> RewoundError | None:
    """Return the error if the server's history lacks what was received up to `durable_lsn`, otherwise None.

    `written`: the server's WAL position, read after `durable_lsn`. `record`: None if there is no changelog.
    `fork_lsn`: as `find_fork` returns it for the recorded timeline.
    """
    if record is not None and server.timeline != record.timeline:
        if fork_lsn is None:
            return RewoundError(
                f"the source is on timeline {server.timeline}, the changelog's is {record.timeline}:"
                " it was restored or failed over, and may lack transactions that are in the lake, or it is a"
                " copy of the source",
                errors.prove_source(),
            )
        if durable_lsn > fork_lsn:
            return ahead_of_fork(server, record, durable_lsn, fork_lsn)
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


def ahead_of_fork(server: Server, record: EpochRecord, durable_lsn: LSN, fork_lsn: LSN) -> RewoundError:
    """Return the error of a promoted standby that lacks WAL from which changes were received."""
    return RewoundError(
        f"the source is on timeline {server.timeline}, which left timeline {record.timeline} at {fork_lsn},"
        f" and changes of timeline {record.timeline} were received up to {durable_lsn}: the standby was"
        f" promoted without the WAL from {fork_lsn} to {durable_lsn}, so the lake may have transactions that"
        " the source has lost",
        "check that this server is the new primary. If it is, begin a new epoch: pgrepl resync FILE.json"
        " compares every table, and pgrepl snapshot FILE.json --new-epoch resnapshots every table; either"
        " prints the name to repeat it with --give-up NAME. To prevent this, set synchronized_standby_slots:"
        f" {errors.document('how-to/fail-over')}. Nothing was changed",
    )


def promotion_error(server: Server, record: EpochRecord, slot: Slot, token: int) -> PgReplError | None:
    """Return the error if a promoted standby is not proven to continue the slot's changes, otherwise None.

    A token in the source proves that the timeline is the changelog's: another copy of the source may have
    given its own timeline the same number. Only a synchronized slot is at a position of the former primary's.
    """
    if server.timeline == record.timeline:
        return None
    if not slot.synced:
        return SlotError(
            f"the source is on timeline {server.timeline}, the changelog's is {record.timeline}, and the slot"
            f" {slot.name} was not synchronized from the former primary: it was created here, or is a copy",
            errors.prove_source(),
        )
    if not token:
        return RewoundError(
            f"the source is on timeline {server.timeline}, the changelog's is {record.timeline}, and no token"
            " proves that it was the former primary's standby",
            errors.prove_source(),
        )
    return None


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
