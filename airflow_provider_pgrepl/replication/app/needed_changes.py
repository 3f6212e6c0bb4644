"""Find the changes that the changelog must keep: tables, publishers, or a look back still need them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass

from airflow_provider_pgrepl.errors import SourceError
from airflow_provider_pgrepl.replication.changelog import own_tables
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.record import PublisherRecord, read_record
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.slot import read_slot
from airflow_provider_pgrepl.replication.state.tables import TableRecord

log = logging.getLogger(__name__)


def needed_above(dsn: str, pipeline: Pipeline, tables: LSN | None) -> LSN | None:
    """`tables`: above which LSN these need changes. None when nothing may go, as while the source is away."""
    try:
        sent_again = sent_again_above(dsn, pipeline)
    except SourceError as error:
        log.info("the changelog keeps its old hours for now: %s", error.message)
        return None
    return None if tables is None or sent_again is None else min(tables, sent_again)


def watched_above(records: Iterable[TableRecord]) -> LSN | None:
    """Above which LSN the definitions of tables have yet to be looked at, where there are no lake tables."""
    found = [one.position_lsn for one in records if one.state.is_followed and one.position_lsn is not None]
    return min(found, default=None)


@dataclass(frozen=True)
class Retention:
    """`needed_above` and `needed_later` as `Maintenance.run` takes them."""

    needed_above: Mapping[int, int]
    needed_later: tuple[tuple[float, Mapping[int, int]], ...] = ()


def retention(pipeline: Pipeline, epoch: int, needed: LSN) -> Retention:
    """What may go and when: what publishers have not published is kept for `publish_keep_h` of each.

    `needed`: above which LSN of the epoch all others need changes. Raises LakeError, LakeUnavailableError.
    """
    own = {epoch: int(needed)}
    rights = [
        (settings.publish_keep_h, record.needed_after)
        for settings in map(pipeline.publisher, pipeline.publishers)
        if (record := _record(pipeline.lake_root, settings.name)) is not None
    ]
    least = pipeline.changelog_retention_h
    limits = sorted({least, *(hours for hours, _ in rights if hours > least)})
    first, *later = [
        (limit, _lowest(own, [position for hours, position in rights if hours > limit])) for limit in limits
    ]
    return Retention(first[1], tuple(later))


def _record(lake_root: str, name: str) -> PublisherRecord | None:
    """None for a publisher that never began."""
    if (record := read_record(lake_root, name)) is None:
        own_tables.check_publisher(lake_root, name)
    return record


def _lowest(own: Mapping[int, int], positions: Iterable[EventPosition]) -> dict[int, int]:
    found = dict(own)
    for position in positions:
        # Of the transaction at its LSN some may be left.
        above = max(0, position.commit_lsn - (not position.is_after_transaction))
        found[position.epoch] = min(found.get(position.epoch, above), above)
    return found


def sent_again_above(dsn: str, pipeline: Pipeline) -> LSN | None:
    """Above which LSN the server may send changes again: with them it shows that it was not set back.

    After a crash the slot stands where the server has last saved it, which is not before its restart_lsn, and
    stays there as long as a transaction is open or prepared. None without a slot. Raises SourceError.
    """
    with closing(connect(dsn, f"maintenance {pipeline.name}")) as source:
        slot = read_slot(source, pipeline.slot)
    return None if slot is None else slot.restart_lsn
