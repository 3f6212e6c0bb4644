"""The changes that the changelog must keep: for tables, for publishers, and in case they are sent again."""

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


def retention_lsn(dsn: str, pipeline: Pipeline, tables_lsn: LSN | None) -> LSN | None:
    """Return the LSN above which changes must be kept, or None if no change may be deleted.

    Returns None if `tables_lsn` is None, the slot does not exist, or the source cannot be reached.

    :param tables_lsn: the LSN above which tables need changes; None if it cannot be determined
    """
    try:
        redelivery_lsn = redelivery_above(dsn, pipeline)
    except SourceError as error:
        log.info("no changelog hours are deleted while the source cannot be read: %s", error.message)
        return None
    return None if tables_lsn is None or redelivery_lsn is None else min(tables_lsn, redelivery_lsn)


def unchecked_above(records: Iterable[TableRecord]) -> LSN | None:
    """Return the LSN above which table definitions have yet to be checked, or None if no table is followed.

    For a pipeline without lake tables.
    """
    found = [one.position_lsn for one in records if one.state.is_followed and one.position_lsn is not None]
    return min(found, default=None)


@dataclass(frozen=True)
class Retention:
    """The changes that the changelog must keep, as arguments of `Maintenance.run`.

    `needed_above`: for each epoch, the LSN above which changes are kept. `needed_later`: pairs of an age in
    hours and the LSNs that apply to changes older than that age.
    """

    needed_above: Mapping[int, int]
    needed_later: tuple[tuple[float, Mapping[int, int]], ...] = ()


def retention(pipeline: Pipeline, epoch: int, needed: LSN) -> Retention:
    """Return which changes must be kept, and for how long.

    Changes that a publisher has not published are kept for its `publish_retention_h` hours. Raises LakeError,
    LakeUnavailableError.

    :param needed: the LSN of the epoch above which all other readers need changes
    """
    own = {epoch: int(needed)}
    publishers = [
        (settings.publish_retention_h, record.needed_after)
        for settings in map(pipeline.publisher, pipeline.publishers)
        if (record := _record(pipeline.lake_root, settings.name)) is not None
    ]
    least = pipeline.changelog_retention_h
    limits = sorted({least, *(hours for hours, _ in publishers if hours > least)})
    first, *later = [
        (limit, _lowest(own, [position for hours, position in publishers if hours > limit]))
        for limit in limits
    ]
    return Retention(first[1], tuple(later))


def _record(lake_root: str, name: str) -> PublisherRecord | None:
    """Return the record of a publisher; None if it never began. Raises LakeError if its table is missing."""
    if (record := read_record(lake_root, name)) is None:
        own_tables.check_publisher(lake_root, name)
    return record


def _lowest(own: Mapping[int, int], positions: Iterable[EventPosition]) -> dict[int, int]:
    found = dict(own)
    for position in positions:
        # Part of the transaction at this LSN may be unpublished.
        above = max(0, position.commit_lsn - (not position.is_after_transaction))
        found[position.epoch] = min(found.get(position.epoch, above), above)
    return found


def redelivery_above(dsn: str, pipeline: Pipeline) -> LSN | None:
    """Return the LSN above which the server may send changes again; None without a slot. Raises SourceError.

    Changes that are sent again prove that the server was not restored to an earlier state. After a crash the
    slot is at the position that the server last saved. That is not before its restart_lsn, which does not
    advance while a transaction is open or prepared.
    """
    with closing(connect(dsn, f"maintenance {pipeline.name}")) as source:
        slot = read_slot(source, pipeline.slot)
    return None if slot is None else slot.restart_lsn
