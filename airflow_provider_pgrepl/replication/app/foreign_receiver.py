"""A receiver that writes the lake, and holds no lock in this state database: one of another state, or of the
source that the connected server is a copy of."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from airflow_provider_pgrepl.errors import BusyError, RewoundError
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import is_at_rest, open_changelog, read_sequence
from airflow_provider_pgrepl.replication.receiver.changelog_feed import RENEW_S
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.store import Store

log = logging.getLogger(__name__)

_POLL_S = 5.0
_POLLS = int(RENEW_S * 1.25 / _POLL_S)


def check_no_foreign_receiver(store: Store, pipeline: Pipeline) -> None:
    """Raise RewoundError if a receiver of others writes the lake. One that holds the lock here may run."""
    try:
        store.lock(pipeline.name, "replicate")
    except BusyError:
        return
    try:
        check_no_receiver(pipeline)
    finally:
        store.unlock(pipeline.name, "replicate")


def check_no_receiver(pipeline: Pipeline, wait: Callable[[float], None] = time.sleep) -> None:
    """Raise RewoundError if a receiver writes the lake. The caller holds the lock of replication.

    Unless the last receiver has ended by itself, this waits for longer than one that runs lets pass between
    two commits. Raises ChangelogError, LakeUnavailableError.
    """
    uri = changelog_uri(pipeline.lake_root)
    changelog = open_changelog(uri)
    if is_at_rest(changelog):
        return
    log.info(
        "the last receiver of the lake %s was killed, or runs elsewhere: waiting %g s for a sign of it",
        pipeline.lake_root,
        _POLLS * _POLL_S,
    )
    for _ in range(_POLLS):
        wait(_POLL_S)
        if read_sequence(open_changelog(uri)) != read_sequence(changelog):
            raise RewoundError(
                f"an application receives changes into the lake {pipeline.lake_root}, and holds no lock in"
                " this state database: this server is a copy of the source, or the state is another one",
                "check the connections (conn_id, or PGREPL_DSN; state_conn_id, or PGREPL_STATE_DSN). If they"
                " are right, stop that application, and run this again. Nothing was changed",
            )
