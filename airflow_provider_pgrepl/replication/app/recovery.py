"""The start after a crash: sets aside half-written commits, and completes the index of relations.

In the changelog, only commits that were not confirmed to the slot are set aside: the server sends their
changes again. If a commit was confirmed and one of its files is missing, the file may only be out of sight,
behind a mount or while a copy is under way. The same holds for damage to the consistent points or the index
of relations that a crash cannot cause. A changelog that cannot be opened is identified by its last whole
commit: unless source and state are its pipeline's, nothing is set aside.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import closing, suppress
from dataclasses import replace

from airflow_provider_pgrepl.errors import NEW_EPOCH, BusyError, LakeError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.changelog.remains import ReadableChangelog, read_remains
from airflow_provider_pgrepl.replication.changelog.writer import find_torn_changelog
from airflow_provider_pgrepl.replication.delta.recovery import LogDamage, find_torn_by_crash
from airflow_provider_pgrepl.replication.lake.consistent_points import find_torn_points
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.slot import read_slot
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.source_tokens import token_error
from airflow_provider_pgrepl.replication.state.tables import TableRecord

from .ownership import Evidence, check_new_epoch, check_ours

_LOOK = "see that the lake's storage shows all its files (a mount, a copy that is still under way)"
log = logging.getLogger(__name__)


def set_aside_torn_commits(evidence: Evidence, dsn: str, give_up: Collection[str] | None = None) -> None:
    """Set aside the commits that a crash has torn. The caller holds the replication lock.

    `evidence` may lack the changelog's. Raises LakeError, LakeUnavailableError, SourceError, and
    contradictions to source, lake and state being the pipeline's.

    :param give_up: the names that a requested new epoch gives up, None if none was requested; a new epoch
        also gives up commits that were confirmed to the slot
    """
    changelog, *others = found = _find(evidence.pipeline.lake_root)
    if not any(found):
        return
    remains = read_remains(changelog.uri, min(changelog.commits, default=None))
    complete = _completed(evidence, remains, dsn)
    if give_up is None:
        check_ours(complete)
    else:
        check_new_epoch(complete, frozenset(give_up))
    if remains.record is None:
        _check_never_whole(complete, changelog, others)
    elif changelog.commits and give_up is None:
        _check_unconfirmed(complete, remains)
    for torn in found:
        torn.set_aside()


def settle_idle_lake(
    state_db: StateDatabase, evidence: Evidence, dsn: str, give_up: Collection[str] | None = None
) -> None:
    """Do the same as `set_aside_torn_commits`, for a caller that does not hold the replication lock.

    Does nothing while a replication app holds the lock: that app has done it itself.
    """
    name = evidence.pipeline.name
    if not any(_find(evidence.pipeline.lake_root)):
        return
    with suppress(BusyError):
        state_db.lock(name, "replicate")
        try:
            set_aside_torn_commits(evidence, dsn, give_up)
        finally:
            state_db.unlock(name, "replicate")


def _find(lake: str) -> list[LogDamage]:
    return [
        find_torn_changelog(changelog_uri(lake)),
        find_torn_points(lake),
        find_torn_by_crash(relations_uri(lake)),
    ]


def _completed(evidence: Evidence, remains: ReadableChangelog, dsn: str) -> Evidence:
    """Return the evidence, completed with that of a changelog that could not be opened."""
    record, missing_token = remains.record, evidence.missing_token
    if record is None:
        return evidence
    with closing(connect(dsn, f"settle {evidence.pipeline.name}", read_only=True)) as source:
        slot = read_slot(source, record.slot)
        if remains.token:
            is_recorded = evidence.recorded is not None
            missing_token = (
                token_error(source, record.slot, remains.token, is_recorded=is_recorded) or missing_token
            )
    slots = {**evidence.slots, **({} if slot is None else {slot.name: slot})}
    return replace(evidence, epoch=record, lake_id=remains.lake_id, slots=slots, missing_token=missing_token)


def _check_never_whole(evidence: Evidence, changelog: LogDamage, others: Collection[LogDamage]) -> None:
    """Raise LakeError unless the only remains of the changelog are a first commit that was never whole."""
    if evidence.recorded is not None and changelog.commits == (0,) and not any(others):
        return
    raise LakeError(
        f"no commit of the changelog {changelog.uri} can be read, so whose it is cannot be determined."
        " Nothing was changed",
        f"{_LOOK}, check the connections of source and state, and start again; if the changelog is lost, move"
        " its folder away first",
    )


def _check_unconfirmed(evidence: Evidence, remains: ReadableChangelog) -> None:
    assert remains.record is not None
    slot, left = evidence.slots.get(remains.record.slot), remains.durable_lsn
    if slot is not None and left is not None and (slot.confirmed_flush_lsn or 0) <= left:
        return
    name = f"the slot {remains.record.slot}"
    fact = "does not exist" if slot is None else f"has confirmed {slot.confirmed_flush_lsn}"
    raise LakeError(
        f"commit {remains.version + 1} of the changelog, or a file that it names, is not whole. Without it"
        f" the changelog ends at {left}, but {name} {fact}. Nothing was changed",
        f"{_LOOK}, and start again; if they are lost, {NEW_EPOCH}",
    )


def index_recorded_tables(pipeline: Pipeline, epoch: EpochRecord, records: Iterable[TableRecord]) -> None:
    """Add every recorded table that the index of relations lacks.

    Call it before receiving starts: the receiver checks the publication status of indexed tables only, so
    that missing changes of another table would go unnoticed. Raises LakeError, LakeUnavailableError.
    """
    index = RelationIndex(relations_uri(pipeline.lake_root))
    known = set(index.relation_ids())
    for record in records:
        if record.relation is not None and record.relation.oid not in known:
            log.warning(
                "table %s is not in the index of relations: the folder _pgrepl/relations was"
                " restored from a copy, or deleted. Adding the table's recorded relation again",
                record.table,
            )
            index.add(epoch.epoch, RelationRecord.of_catalog(record.relation))
