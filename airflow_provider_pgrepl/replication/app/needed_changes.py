"""Find the changes that the changelog must keep, however old: tables, or a look back, still need them."""

from __future__ import annotations

import logging
from contextlib import closing

from airflow_provider_pgrepl.errors import SourceError
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.slot.record import read_slot

log = logging.getLogger(__name__)


def needed_above(dsn: str, pipeline: Pipeline, tables: LSN | None) -> LSN | None:
    """`tables`: above which LSN these need changes. None when nothing may go, as while the source is away."""
    try:
        sent_again = sent_again_above(dsn, pipeline)
    except SourceError as error:
        log.info("the changelog keeps its old hours for now: %s", error.message)
        return None
    return None if tables is None or sent_again is None else min(tables, sent_again)


def sent_again_above(dsn: str, pipeline: Pipeline) -> LSN | None:
    """Above which LSN the server may send changes again: with them it shows that it was not set back.

    After a crash the slot stands where the server has last saved it, which is not before its restart_lsn, and
    stays there as long as a transaction is open or prepared. None without a slot. Raises SourceError.
    """
    with closing(connect(dsn, f"maintenance {pipeline.name}")) as source:
        slot = read_slot(source, pipeline.slot)
    return None if slot is None else slot.restart_lsn
