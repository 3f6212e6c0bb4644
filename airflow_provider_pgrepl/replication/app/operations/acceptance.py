"""Acceptance of a loss: a pipeline continues without the source's token or without tables below `_pgrepl`."""

from __future__ import annotations

import logging

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.epoch import known_tables
from airflow_provider_pgrepl.replication.app.evidence import gather
from airflow_provider_pgrepl.replication.app.ownership import check_acceptable, check_ours
from airflow_provider_pgrepl.replication.changelog import own_tables
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, Fence
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver import continuity
from airflow_provider_pgrepl.replication.state.source_tokens import write_token

log = logging.getLogger(__name__)


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
