"""Skipping a transaction that the server cannot send, by the receiver's rule: first the gap is
durable in the changelog, then the slot is told. Only the receiver's part of the product may use this.
"""

from __future__ import annotations

import logging

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.changelog.gaps import Gap, last_gap
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_durable_lsn
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver import continuity
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.slot import advance_slot, read_slot
from airflow_provider_pgrepl.replication.storage import durable, storage_errors

log = logging.getLogger(__name__)


def record_gap(pipeline: Pipeline, gap: Gap, after: int | None) -> None:
    """Have the gap in the changelog, in one commit, behind all that was received before it.

    `after`: the `sequence` of the writer that has made that durable. Raises FencedError when another receiver
    has written since, LakeUnavailableError.
    """
    writer = ChangelogWriter(changelog_uri(pipeline.lake_root), after)
    if writer.durable_lsn > gap.lsn:
        raise ChangelogError(f"the changelog is durable up to {writer.durable_lsn}, beyond {gap.lsn}")
    part = writer.write_part(gap.rows(writer.epoch))
    writer.append(
        [part],
        durable_lsn=gap.end_lsn,
        first_lsn=gap.lsn,
        last_lsn=gap.lsn,
        last_commit_us=gap.begun.commit_us,
        kind="gap",
    )
    writer.rest()


def pass_gaps(source: Connection, pipeline: Pipeline) -> None:
    """Tell the slot of the gaps that are durable, if it stands before one; nobody may be reading it.

    Raises BusyError while somebody does, LakeUnavailableError, and what `continuity.check` raises.
    """
    uri = changelog_uri(pipeline.lake_root)
    changelog = open_changelog(uri)
    slot, durable_lsn = read_slot(source, pipeline.slot), read_durable_lsn(changelog)
    if slot is None or slot.confirmed_flush_lsn is None or slot.confirmed_flush_lsn >= durable_lsn:
        return
    record = EpochRecord.from_json(changelog.metadata().description)
    lsn = last_gap(changelog, record.epoch, LSN(max(0, slot.confirmed_flush_lsn - 1)))
    if lsn is not None:
        continuity.check(source, record, durable_lsn)
        # Who recorded it may have died before it was on the disk.
        with storage_errors(uri):
            durable.flush_newest(uri)
        advance_slot(source, slot.name, LSN(lsn + 1))
        log.warning("the slot %s was moved past the transaction at %s, which was skipped", slot.name, lsn)
