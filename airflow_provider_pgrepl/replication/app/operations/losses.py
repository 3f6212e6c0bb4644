"""Acceptance of a loss, on request: of a transaction that the server cannot send, of the source's token, of
tables below `_pgrepl`.

`pgrepl skip` advances the slot past the transaction. A gap is committed to the changelog before the slot is
advanced. Every table that the transaction may have changed is marked errored at the gap, and must be
resnapshotted. Reads as of a point in time across the gap raise an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError, PgReplError, SlotError, UnsendableError
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.epoch import check_owner, known_tables
from airflow_provider_pgrepl.replication.app.evidence import check, gather
from airflow_provider_pgrepl.replication.app.ownership import check_acceptable, check_ours
from airflow_provider_pgrepl.replication.app.recovery import index_recorded_tables, set_aside_torn_commits
from airflow_provider_pgrepl.replication.changelog import own_tables
from airflow_provider_pgrepl.replication.changelog.gaps import Gap, find_gap, gap_error, record_gap
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_epoch
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, Fence
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.receiver import continuity
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver, pass_gaps
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.server import wal_lsn
from airflow_provider_pgrepl.replication.source.slot import read_slot
from airflow_provider_pgrepl.replication.source.wal_records import untouched_tables
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.source_tokens import write_token
from airflow_provider_pgrepl.replication.state.tables import TableRecord

from .selection import choose, recorded

log = logging.getLogger(__name__)

_POLL_S = 0.1


@dataclass(frozen=True)
class SkipResult:
    """The result of `skip_transaction`, or with `dry_run` the result that it would have.

    `touched`: tables that the transaction may have changed; they are errored until they are resnapshotted.
    `named`: tables that the caller declared unchanged. `seen`: tables that the WAL shows to be unchanged.
    """

    lsn: LSN
    xid: int
    touched: tuple[TableName, ...]
    named: tuple[TableName, ...]
    seen: tuple[TableName, ...]

    def to_text(self) -> str:
        """Return the consequences of the skip as text for people."""
        lines = [
            f"skipping loses permanently: the transaction at {self.lsn} (xid {self.xid})",
            "marked errored until they are resnapshotted (pgrepl snapshot FILE.json --tables NAMES):"
            f" {_names(self.touched)}",
            f"unchanged according to --unchanged-tables: {_names(self.named)}",
            f"unchanged according to the WAL: {_names(self.seen)}",
            "its logical messages, if it had any, are lost",
        ]
        return "\n".join(lines)


def skip_transaction(
    access: Access, lsn: LSN | str, unchanged_tables: Iterable[TableName | str] = (), *, dry_run: bool = False
) -> SkipResult:
    """Advance the slot past the transaction that commits at an LSN, once everything before it is durable.

    With `dry_run`, only return the consequences. In either case the changes before the transaction are
    received into the changelog. Can be repeated after an interruption. Raises BusyError while an app of the
    pipeline runs, ConfigError if that is not the transaction that the server cannot send, SlotError if the
    server can send all, and what receiving raises.

    :param unchanged_tables: tables that the transaction has surely not changed
    """
    wanted, unchanged_tables = _parse(lsn), list(unchanged_tables)
    name = access.pipeline.name
    with access.state_db("skip") as state_db, access.source("skip") as source:
        found = check(access.pipeline, state_db, access.dsn, lake_may_fail=True)
        state_db.lock(name, "snapshot")
        state_db.lock(name, "replicate")
        set_aside_torn_commits(found, access.dsn)
        check(access.pipeline, state_db, access.dsn)
        records = recorded(state_db, name)
        named = (
            [record.table for record in choose(state_db, name, unchanged_tables)] if unchanged_tables else []
        )
        gap, seen = _done(access, wanted), frozenset[int]()
        if gap is not None:
            _check_spared(gap, records, named)
        else:
            _recall(access, records)
            receiver = _receive(access, source, wanted)
            gap, seen = _find(access, source, receiver, records, named)
            if not dry_run:
                record_gap(access.pipeline.lake_root, gap, receiver.progress.sequence)
        if not dry_run:
            epoch = read_epoch(changelog_uri(access.pipeline.lake_root)).epoch
            state_db.record_skip(name, epoch, gap.lsn, gap.begun.xid, gap.why)
            pass_gaps(source, access.pipeline)
            _mark_errored(state_db, name, records, gap)
        return _skipped(gap, records, named, seen)


def _parse(lsn: LSN | str) -> LSN:
    try:
        return LSN.parse(lsn) if isinstance(lsn, str) else lsn
    except ValueError as error:
        raise ConfigError(f"--lsn: {error}") from None


def _done(access: Access, lsn: LSN) -> Gap | None:
    """Return the gap if an earlier run has recorded it, else None."""
    changelog = open_changelog(changelog_uri(access.pipeline.lake_root))
    record = EpochRecord.from_json(changelog.metadata().description)
    check_owner(access.pipeline, record)
    return find_gap(changelog, record.epoch, lsn)


def _recall(access: Access, records: Mapping[TableName, TableRecord]) -> None:
    epoch = read_epoch(changelog_uri(access.pipeline.lake_root))
    index_recorded_tables(access.pipeline, epoch, records.values())


def _check_spared(gap: Gap, records: Mapping[TableName, TableRecord], named: list[TableName]) -> None:
    late = [str(table) for table in named if _may_lack(records[table], gap)]
    if late:
        raise ConfigError(
            f"--unchanged-tables: the transaction at {gap.lsn} was skipped already, as one that may have"
            f" changed {', '.join(late)}",
            errors.resnapshot(",".join(late)),
        )


def _receive(access: Access, source: Connection, wanted: LSN) -> Receiver:
    """Receive every transaction that commits before `wanted`, and return the receiver that failed at
    `wanted`.

    Raises SlotError if the server sends everything without failing, ConfigError if it fails at another
    transaction, and any other error of the receiver.
    """
    target = wal_lsn(source)
    receiver = Receiver(access.dsn, access.pipeline)
    try:
        receiver.start()
        while not receiver.failed.wait(_POLL_S):
            if receiver.progress.seen_lsn >= target:
                raise SlotError(
                    f"the server has sent everything up to {target}: nothing was skipped",
                    "start the replication app",
                )
            receiver.request_keepalive()
    finally:
        receiver.stop()
    error, unfinished = receiver.error, receiver.unfinished
    assert error is not None
    if not isinstance(error, UnsendableError) or unfinished is None:
        raise error
    if unfinished.commit_lsn != wanted:
        raise ConfigError(
            f"--lsn: the server fails to send the transaction at {LSN(unfinished.commit_lsn)}, not the one at"
            f" {wanted}. Nothing was skipped",
            "to print what a skip of that transaction costs, run"
            f" pgrepl skip FILE.json --lsn {LSN(unfinished.commit_lsn)}",
        )
    return receiver


def _find(
    access: Access,
    source: Connection,
    receiver: Receiver,
    records: Mapping[TableName, TableRecord],
    named: list[TableName],
) -> tuple[Gap, frozenset[int]]:
    """Return the gap, and the OIDs of the tables that the WAL shows to be unchanged."""
    begun, slot = receiver.unfinished, read_slot(source, access.pipeline.slot)
    assert begun is not None
    every = _oids(access, records)
    spared = {oid for table in named for oid in every.get(table, ())}
    oids = {oid for found in every.values() for oid in found} - spared
    seen = frozenset[int]()
    if slot is not None and slot.restart_lsn is not None:
        # A connection of its own: it is abandoned if pg_walinspect takes too long.
        with access.source("skip, WAL of") as wal:
            seen = untouched_tables(wal, oids, slot.restart_lsn, LSN(begun.commit_lsn), begun.xid)
    why = receiver.error.message if isinstance(receiver.error, PgReplError) else ""
    return Gap(begun, frozenset(oids - seen), why), seen


def _oids(access: Access, records: Mapping[TableName, TableRecord]) -> dict[TableName, set[int]]:
    """Return every OID that a table has had, by table name, as far as state and lake record them."""
    found: dict[TableName, set[int]] = {}
    for record in records.values():
        if record.relation is not None:
            found.setdefault(record.table, set()).add(record.relation.oid)
    for received in RelationIndex(relations_uri(access.pipeline.lake_root)).all():
        message = received.message
        found.setdefault(TableName(message.schema, message.name), set()).add(message.oid)
    return found


def _mark_errored(
    state_db: StateDatabase, pipeline: str, records: Mapping[TableName, TableRecord], gap: Gap
) -> None:
    """Mark tables errored that may have changes in the gap, as the replication app does when it reaches the
    gap."""
    for record in records.values():
        if not record.state.needs_changes or not _may_lack(record, gap):
            continue
        if not state_db.mark_errored(pipeline, record, gap_error(gap.lsn, record.table), gap.lsn):
            log.info("table %s was changed by another process meanwhile", record.table)


def _may_lack(record: TableRecord, gap: Gap) -> bool:
    """Return True if the table was copied before the gap, and the gap may hold changes of it."""
    if record.relation is None or record.position_lsn is None:
        return False
    return record.relation.oid in gap.relations and record.position_lsn < gap.lsn


def _skipped(
    gap: Gap, records: Mapping[TableName, TableRecord], named: list[TableName], seen: frozenset[int]
) -> SkipResult:
    touched = [record.table for record in records.values() if _may_lack(record, gap)]
    shown = [r.table for r in records.values() if r.relation is not None and r.relation.oid in seen]
    return SkipResult(gap.lsn, gap.begun.xid, tuple(touched), tuple(named), tuple(shown))


def _names(tables: Iterable[TableName]) -> str:
    return ", ".join(map(str, tables)) or "none"


def accept_missing(access: Access, *, dry_run: bool) -> list[str]:
    """Let the pipeline continue without missing tables below `_pgrepl`. Return a sentence for each loss.

    The next write to a lost table creates it again. With `dry_run` nothing is changed. Raises BusyError while
    an app of the pipeline runs, and LakeError if another table is in the place of a missing one. Raises the
    errors of `check_ours` if source, lake and state are not the pipeline's.
    """
    pipeline = access.pipeline
    with access.source("accept missing") as source, access.state_db("accept missing") as state_db:
        check_ours(gather(pipeline, state_db, source))
        state_db.lock(pipeline.name, "snapshot")
        state_db.lock(pipeline.name, "replicate")
        evidence = gather(pipeline, state_db, source)
        check_ours(evidence)
        missing = own_tables.find_lost(pipeline.lake_root, known_tables(state_db, pipeline, evidence.epoch))
        lost = [one.reason for one in missing]
        if missing and not dry_run:
            own_tables.give_up(pipeline.lake_root, missing)
            log.warning("continuing without lost tables: %s", "; ".join(lost))
    return lost


def accept_source(access: Access, name: str) -> bool:
    """Accept the connected server as the source that the lake was written from, although it lacks the token.

    Everything else must agree, as at the start of the replication app: identity, lake, state, timeline, WAL
    position, slot and publication. Returns False, and changes nothing, if the source has the token. Raises
    BusyError while an app of the pipeline runs, ConfigError for another name, and every other contradiction.

    :param name: the name of that source, which the ConfigError for another name contains
    """
    pipeline = access.pipeline
    with access.source("accept source") as source, access.state_db("accept source") as state_db:
        if not check_acceptable(gather(pipeline, state_db, source), name):
            return False
        state_db.lock(pipeline.name, "snapshot")
        state_db.lock(pipeline.name, "replicate")
        evidence = gather(pipeline, state_db, source)
        if not check_acceptable(evidence, name):
            return False

        def renew(before: int, record: EpochRecord, durable_lsn: LSN) -> Fence:
            continuity.check(source, record, durable_lsn, before)
            token = write_token(source, record.slot, before, pipeline.used_publication)
            # The next start of the replication app records another timeline.
            return Fence(token, record.timeline)

        ChangelogWriter(changelog_uri(pipeline.lake_root), check_source=renew).rest()
    log.warning("accepted as the source, although its token was missing: %s", evidence.describe())
    return True
