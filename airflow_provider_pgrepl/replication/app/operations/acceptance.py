"""accept_source: a source whose tokens were lost gets a new one, by its name, and no table is copied."""

from __future__ import annotations

import logging

from airflow_provider_pgrepl.replication import continuity
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.evidence import gather
from airflow_provider_pgrepl.replication.app.ownership import check_acceptable
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.state.source_tokens import write_token

log = logging.getLogger(__name__)


def accept_source(access: Access, name: str) -> bool:
    """Take the connected server for the source that the lake was written from, though it lacks the token.

    `name`: of that source, as the error without it says. Everything else must agree, as at the start of the
    replication app: identity, lake, state, timeline, WAL position, slot and publication. Returns False, and
    changes nothing, if the source has the token. Raises BusyError while an app of the pipeline runs,
    ConfigError for another name, and what contradicts.
    """
    pipeline = access.pipeline
    with access.source("accept source") as source, access.store("accept source") as store:
        if not check_acceptable(gather(pipeline, store, source), name):
            return False
        store.lock(pipeline.name, "snapshot")
        store.lock(pipeline.name, "replicate")
        evidence = gather(pipeline, store, source)
        if not check_acceptable(evidence, name):
            return False

        def renew(before: int, record: EpochRecord, durable_lsn: LSN) -> int:
            continuity.check(source, record, durable_lsn)
            return write_token(source, record.slot, before, pipeline.used_publication)

        ChangelogWriter(changelog_uri(pipeline.lake_root), renew_token=renew).rest()
    log.warning("accepted as the source, though its tokens were lost: %s", evidence.describe())
    return True
